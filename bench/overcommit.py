"""What over-committing KV memory buys: the real scheduler, with passes that cost time on paper only.

    python -m bench.overcommit [--json FILE]

A night's batch of requests waits from the beginning. Memory holds 8 of them grown up, a pass takes up to 16. How long
answers really get is what over-committing bets on, so three kinds are tried: all that was asked for, anything up to
it, and mostly short ones. A pass takes as long as reading the layers or as the products of its rows, whichever is
longer: constants of a 1.9 B model in bf16, streamed from disk or resident. What is computed again after a preemption
is rows of some pass.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from decode_service.sampling import SamplingParams
from decode_service.scheduler import DecodeScheduler
from decode_service.sequence import Phase, Sequence
from decode_service.tables import BlockTables
from decode_service.turn import turns
from shared.blocks import BlockPool
from shared.outlet import Outlet

REQUESTS, BATCH, GROWN_UP = 240, 16, 8
BLOCK_TOKENS, PASS_TOKENS = 16, 512
READ_S = {"streamed": 1.7, "resident": 0.11}
"""Reading 3.9 GB once, from disk or from memory."""
ROW_S = 0.004
"""The products of one row through all layers."""
MOST_PER_PASS = 5
"""A pass yields one to so many tokens for each sequence, as drafts go."""
FACTORS = (1.0, 1.25, 1.5, 2.0, 3.0)


@dataclass(frozen=True)
class Shape:
    """What requests look like."""

    name: str
    prompt_tokens: tuple[int, int]
    max_tokens: int


SHAPES = (Shape("reports", (64, 768), 256), Shape("essays", (32, 160), 768))

LENGTHS: Mapping[str, Callable[[random.Random, int], int]] = {
    "all they may": lambda chance, most: most,
    "uniform": lambda chance, most: chance.randint(1, most),
    "mostly short": lambda chance, most: min(most, 1 + int(chance.expovariate(4 / most))),
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One night."""

    weights: str
    shape: str
    lengths: str
    factor: float
    tokens_per_s: float
    passes: int
    mean_batch: float
    preemptions: int
    computed_again: float
    """Part of all rows."""


def main() -> None:
    """Tries all factors on all kinds of answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    outcomes = [
        asyncio.run(night(weights, shape, lengths, factor))
        for weights in READ_S
        for shape in SHAPES
        for lengths in LENGTHS
        for factor in FACTORS
    ]
    show(outcomes)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))


async def night(weights: str, shape: Shape, lengths: str, factor: float) -> Outcome:
    """Serves all requests."""
    chance, preempted = random.Random(7), list[int]()
    blocks = GROWN_UP * -(-(sum(shape.prompt_tokens) // 2 + shape.max_tokens) // BLOCK_TOKENS)
    scheduler = DecodeScheduler(
        BlockTables(BlockPool(blocks, BLOCK_TOKENS), "", overcommit=factor),
        batch_limit=BATCH,
        queue_limit=REQUESTS,
        unread_limit=1,
        draft_tokens=MOST_PER_PASS - 1,
        on_preempted=lambda: preempted.append(1),
    )
    sequences = {request(shape, chance): LENGTHS[lengths](chance, shape.max_tokens) for _ in range(REQUESTS)}
    for sequence in sequences:
        scheduler.submit(sequence)
    elapsed_s, passes, seats, rows = 0.0, 0, 0, 0
    while any(sequence.phase is not Phase.ENDED for sequence in sequences):
        for sequence in sequences:
            if sequence.phase is Phase.FILLING:
                scheduler.start(sequence, None)
        batch = scheduler.next_batch(timeout_s=0) or []
        taken = one_pass(batch, sequences, chance)
        scheduler.pass_done(batch)
        elapsed_s, passes = elapsed_s + max(READ_S[weights], taken * ROW_S), passes + 1
        seats, rows = seats + len(batch), rows + taken
    needed = sum(len(sequence.tokens) for sequence in sequences)
    return Outcome(
        weights=weights,
        shape=shape.name,
        lengths=lengths,
        factor=factor,
        tokens_per_s=sum(sequences.values()) / elapsed_s,
        passes=passes,
        mean_batch=seats / passes,
        preemptions=len(preempted),
        computed_again=max(0, rows - needed) / rows,
    )


def request(shape: Shape, chance: random.Random) -> Sequence:
    """A prompt like no other."""
    prompt = [chance.randrange(1 << 16) for _ in range(chance.randint(*shape.prompt_tokens))]
    return Sequence(
        request_id="",
        tokens=prompt,
        prompt_tokens=len(prompt),
        max_tokens=shape.max_tokens,
        sampling=SamplingParams(),
        output=None,  # type: ignore[arg-type]  # nothing is turned into text
        outlet=Outlet(),
        on_admitted=lambda: None,
    )


def one_pass(batch: list[Sequence], lengths: Mapping[Sequence, int], chance: random.Random) -> int:
    """Moves everybody in the batch on; returns the rows that bring something that stays."""
    rows = 0
    for turn in turns(batch, PASS_TOKENS):
        sequence = turn.sequence
        count = min(chance.randint(1, MOST_PER_PASS), lengths[sequence] - sequence.generated_tokens)
        reaches_end = turn.reaches_end
        count = min(count, 1 + len(sequence.blocks) * BLOCK_TOKENS - len(sequence.tokens)) if turn.drafts else 1
        rows += len(turn.tokens) + (count - 1 if reaches_end else 0)
        sequence.kv_length += len(turn.tokens)
        if reaches_end:
            sequence.tokens += [chance.randrange(1 << 16) for _ in range(count)]
            sequence.kv_length += count - 1
            sequence.ended = sequence.generated_tokens == lengths[sequence]
    return rows


def case(outcome: Outcome) -> str:
    """What the factors are compared on."""
    return f"{outcome.weights}, {outcome.shape}, {outcome.lengths}"


def show(outcomes: list[Outcome]) -> None:
    """Prints the table."""
    columns = (
        "weights, requests, answers",
        "factor",
        "tokens/s",
        "to 1.0",
        "mean batch",
        "preemptions",
        "computed again",
    )
    table = Table(*columns, title="Over-committing KV memory (simulated passes)")
    base = {case(outcome): outcome.tokens_per_s for outcome in outcomes if outcome.factor == 1.0}
    for outcome in outcomes:
        table.add_row(
            case(outcome),
            f"{outcome.factor:.2f}",
            f"{outcome.tokens_per_s:.1f}",
            f"{outcome.tokens_per_s / base[case(outcome)]:.2f}",
            f"{outcome.mean_batch:.1f}",
            str(outcome.preemptions),
            f"{outcome.computed_again:.1%}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
