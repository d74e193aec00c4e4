"""`python -m decode_service.answer_speed PACK`: prints the processor seconds that a token takes once it is chosen.

That is what the engine does with it between two passes: the acceptance rule, text, stops, counting, and handing it over
to the RPC that waits for it, with the pack's own tokenizer. `headrace plan` asks for it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from itertools import count
from pathlib import Path

from decode_service.sampling import SamplingParams
from decode_service.sequence import Sequence
from decode_service.speculation.acceptance import accept
from decode_service.text.output import Emission, TextOutput
from decode_service.text.stopping import StopConditions
from decode_service.text.tokenizer import Tokenizer
from shared.metrics import Identity, Telemetry
from shared.outlet import Outlet
from shared.pack.reader import Pack

SEQUENCES, TOKENS = 16, 64
"""Answers that grow together, and how long they get."""
STRIDE = 7919
"""A prime: between one token's id and the next one's."""
ENOUGH_S = 0.3
"""Of processor time."""


def main() -> None:
    """Measures, and prints the seconds."""
    print(asyncio.run(token_s(Pack.open(Path(sys.argv[1])))))


async def token_s(pack: Pack) -> float:
    """Processor seconds for one token of an answer, its way to the reader included."""
    tokenizer = Tokenizer(pack.tokenizer_json(), pack.chat_template(), pack.manifest.special_tokens)
    await _round_s(tokenizer)
    seconds: list[float] = []
    while sum(seconds) < ENOUGH_S:
        seconds.append(await _round_s(tokenizer))
    return sorted(seconds)[len(seconds) // 4] / (SEQUENCES * TOKENS)


async def _round_s(tokenizer: Tokenizer) -> float:
    sequences = [_sequence(tokenizer) for _ in range(SEQUENCES)]
    identity = Identity(stage="decode", model_digest="", scheme="", context_length=1, layers=1, budget_bytes=1)
    started_s = time.process_time()
    reading = [asyncio.create_task(_read(sequence)) for sequence in sequences]
    await asyncio.to_thread(_grow, sequences, tokenizer, Telemetry(identity))
    await asyncio.gather(*reading)
    return time.process_time() - started_s


def _grow(sequences: list[Sequence], tokenizer: Tokenizer, telemetry: Telemetry) -> None:
    """What the engine does pass by pass; the tokens come from all over the vocabulary."""
    for number in count(1):
        chosen = number * STRIDE % tokenizer.vocab_size
        for sequence in sequences:
            emission = sequence.append(accept([], [chosen].__getitem__))
            telemetry.add(generated_tokens=1)
            sequence.emit(emission)
        if all(sequence.ended for sequence in sequences):
            return


async def _read(sequence: Sequence) -> str:
    return "".join([emission.text async for emission in sequence.outlet])


def _sequence(tokenizer: Tokenizer) -> Sequence:
    return Sequence(
        request_id="",
        tokens=[0],
        prompt_tokens=1,
        max_tokens=TOKENS,
        sampling=SamplingParams(),
        output=TextOutput(tokenizer, StopConditions(max_tokens=TOKENS), frozenset()),
        outlet=Outlet[Emission](),
        on_admitted=lambda: None,
    )


if __name__ == "__main__":
    main()
