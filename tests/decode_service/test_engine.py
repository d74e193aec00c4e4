"""The decode engine on its own: whatever a draft proposes the answer is the target's, and a failed pass ends well."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from decode_service.engine import DecodeEngine
from decode_service.sampling import SamplingParams
from decode_service.scheduler import DecodeScheduler
from decode_service.sequence import Sequence
from decode_service.speculation.controller import DraftController
from decode_service.speculation.draft import Drafts
from decode_service.speculation.model_draft import ModelDraft
from decode_service.speculation.proposer import Proposer
from decode_service.tables import BlockTables
from decode_service.text.output import Emission, TextOutput
from decode_service.text.stopping import StopConditions
from decode_service.text.tokenizer import Tokenizer
from decode_service.warm_up import MostRows
from shared.blocks import BlockPool
from shared.health import EngineHealth
from shared.kv.paged import BLOCK_TOKENS, PagedKeyValues
from shared.metrics import Identity, Telemetry, Totals
from shared.model.model import Model
from shared.outlet import Outlet
from shared.pack.reader import Pack
from shared.streaming.plan import Residency
from tests.conftest import TinyPack
from tests.end_to_end.reference import plain_answer
from tests.end_to_end.stack import everything, quarter

BLOCKS, MAX_TOKENS, LONGEST = 40, 24, 6
PROMPTS = [[5, 6, 7, 5, 6], [200], [9] * 40, [301, 77, 13]]
SAMPLED = SamplingParams(temperature=0.9, top_k=40, seed=11)


@pytest.fixture(scope="module")
def pack(tiny_pack: TinyPack) -> Path:
    return tiny_pack("fp32")


@dataclass(frozen=True)
class Engine:
    """An engine at work, without services around it."""

    pack: Pack
    scheduler: DecodeScheduler
    telemetry: Telemetry
    kv: PagedKeyValues
    health: EngineHealth

    def submit(self, prompt: list[int], sampling: SamplingParams) -> Sequence:
        """A sequence whose prompt is computed in the engine's own passes."""
        tokenizer = Tokenizer(self.pack.tokenizer_json(), None, {})
        ends = frozenset(self.pack.manifest.end_token_ids)
        sequence = Sequence(
            request_id="",
            tokens=list(prompt),
            prompt_tokens=len(prompt),
            max_tokens=MAX_TOKENS,
            sampling=sampling,
            output=TextOutput(tokenizer, StopConditions(MAX_TOKENS), ends),
            outlet=Outlet[Emission](),
            on_admitted=lambda: self.scheduler.start(sequence, None),
        )
        self.scheduler.submit(sequence)
        return sequence


@asynccontextmanager
async def engine_with(
    path: Path,
    drafts: Drafts,
    *,
    residency: Callable[[Pack], Residency] = everything,
    controller: DraftController | None = None,
    warm_rows: MostRows | None = None,
) -> AsyncIterator[Engine]:
    """Runs until everything submitted has ended; then no block may be in use."""
    pack = Pack.open(path)
    model = Model(pack, residency(pack))
    tables = BlockTables(BlockPool(BLOCKS, BLOCK_TOKENS), "")
    scheduler = DecodeScheduler(tables, batch_limit=8, queue_limit=8, unread_limit=1000, draft_tokens=LONGEST)
    telemetry = Telemetry(
        Identity(stage="decode", model_digest="", scheme="fp32", context_length=512, layers=4, budget_bytes=1)
    )
    kv = PagedKeyValues(pack.spec, model.dtype, BLOCKS)
    proposer = Proposer(drafts, controller or DraftController(LONGEST, LONGEST, rows_limit=1024))
    engine = DecodeEngine(model, kv, proposer, scheduler, telemetry, 16, warm_rows)
    engine.start()
    await asyncio.to_thread(engine.wait_until_warm)
    try:
        yield Engine(pack, scheduler, telemetry, kv, engine.health)
    finally:
        scheduler.close()
        await asyncio.to_thread(engine.join)
    scheduler.check_integrity()
    assert scheduler.blocks_used == 0


async def tokens_of(sequence: Sequence) -> tuple[int, ...]:
    return tuple([token async for emission in sequence.outlet for token in emission.token_ids])


def expected(path: Path, sampling: SamplingParams) -> list[tuple[int, ...]]:
    everywhere = everything(Pack.open(path))
    return [plain_answer(path, everywhere, prompt, MAX_TOKENS, sampling)[0] for prompt in PROMPTS]


class ScriptedDraft:
    """Proposes what a function of the sequence and the count says."""

    kind: Literal["ngram"] = "ngram"

    def __init__(self, script: Callable[[Sequence, int], list[int]]) -> None:
        self._script = script

    def certainty(self, sequence: Sequence) -> int:
        return 0

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
        return [self._script(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("seed", range(3))
async def test_whatever_a_draft_proposes_the_answer_is_the_targets_own(
    pack: Path, sampling: SamplingParams, seed: int
) -> None:
    chance = random.Random(seed)
    answers = expected(pack, sampling)
    by_prompt = dict(zip(map(tuple, PROMPTS), answers, strict=True))

    def mostly_right(sequence: Sequence, count: int) -> list[int]:
        """The right tokens, some of them replaced, of a length of its own."""
        answer = by_prompt[tuple(sequence.tokens[: sequence.prompt_tokens])]
        coming = answer[sequence.generated_tokens :][: chance.randint(0, count)]
        return [token if chance.random() < 0.7 else chance.randrange(320) for token in coming]

    async with engine_with(pack, Drafts(ScriptedDraft(mostly_right))) as engine:
        sequences = [engine.submit(prompt, sampling) for prompt in PROMPTS]
        assert [await tokens_of(sequence) for sequence in sequences] == answers
        totals = engine.telemetry.totals
    assert 0 < totals.accepted_tokens < totals.draft_tokens
    assert sum(sequence.accepted_tokens for sequence in sequences) == totals.accepted_tokens


async def test_a_draft_that_is_always_right_makes_an_answer_take_few_passes(pack: Path) -> None:
    (answer, *_) = expected(pack, SAMPLED)

    def right(sequence: Sequence, count: int) -> list[int]:
        return list(answer[sequence.generated_tokens :][:count])

    async with engine_with(pack, Drafts(ScriptedDraft(right))) as engine:
        sequence = engine.submit(PROMPTS[0], SAMPLED)
        assert await tokens_of(sequence) == answer
    after_the_first = len(answer) - 1
    assert sequence.passes == 1 + -(-after_the_first // (LONGEST + 1))


async def test_a_pass_that_fails_ends_its_sequences_with_the_error_and_the_next_ones_are_served(
    pack: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(sequence: Sequence, count: int) -> list[int]:
        if sequence.prompt_tokens == 1:
            raise ZeroDivisionError("a defect")
        return []

    async with engine_with(pack, Drafts(ScriptedDraft(broken))) as engine:
        with pytest.raises(ZeroDivisionError):
            await tokens_of(engine.submit([200], SamplingParams()))
        healthy = await tokens_of(engine.submit(PROMPTS[3], SamplingParams()))
    assert healthy == expected(pack, SamplingParams())[3]
    assert "pass failed" in caplog.text


async def test_closing_serves_everything_that_was_submitted(pack: Path) -> None:
    async with engine_with(pack, Drafts()) as engine:
        sequences = [engine.submit(prompt, SamplingParams()) for prompt in PROMPTS]
    assert [await tokens_of(sequence) for sequence in sequences] == expected(pack, SamplingParams())


async def test_blocks_that_are_shared_are_never_written_again(pack: Path) -> None:
    head = [5, 6, 7, 8] * 9
    seen: list[tuple[list[int], bytes]] = []

    def looking_on(sequence: Sequence, count: int) -> list[int]:
        """Proposes nonsense, which is written behind the last token and rejected."""
        whole = sequence.blocks[: len(head) // BLOCK_TOKENS]
        seen.append((whole, engine.kv.keys[:, whole].numpy().tobytes() + engine.kv.values[:, whole].numpy().tobytes()))
        return [300] * count

    async with engine_with(pack, Drafts(ScriptedDraft(looking_on))) as engine:
        for tail in ([9], [200, 201], [44] * 20):
            await tokens_of(engine.submit(head + tail, SamplingParams()))
    assert len(seen) > 10
    assert all(once == seen[0] for once in seen)


class Listening(DraftController):
    """A controller that remembers which passes it was told of."""

    def __init__(self) -> None:
        super().__init__(0, LONGEST, rows_limit=1024)
        self.target_rows: list[int] = []
        self.draft_rows: list[int] = []

    def passed(self, rows: int, elapsed_s: float) -> None:
        self.target_rows.append(rows)
        super().passed(rows, elapsed_s)

    def draft_passed(self, rows: int, elapsed_s: float) -> None:
        self.draft_rows.append(rows)
        super().draft_passed(rows, elapsed_s)


async def test_before_the_first_request_costs_are_known_and_nothing_else_has_changed(pack: Path) -> None:
    controller = Listening()
    copy = Pack.open(pack)
    draft_kv = PagedKeyValues(copy.spec, copy.scheme.compute_dtype, BLOCKS)
    draft = ModelDraft(Model(copy, everything(copy)), draft_kv, shares_target_kv=False)
    async with engine_with(
        pack, Drafts(model=draft), controller=controller, warm_rows=MostRows(target=40, draft=4)
    ) as engine:
        known = {1, 2, 4, 8, 16, 32}
        assert set(controller.target_rows) <= known
        assert 1 in controller.target_rows
        assert 1 in controller.draft_rows
        assert set(controller.draft_rows) <= {1, 2, 4}
        assert engine.telemetry.totals == Totals()
        assert engine.scheduler.blocks_used == engine.scheduler.blocks_cached == 0
        sequences = [engine.submit(prompt, SAMPLED) for prompt in PROMPTS]
        assert [await tokens_of(sequence) for sequence in sequences] == expected(pack, SAMPLED)


async def test_layers_that_cannot_be_read_before_the_first_request_make_the_engine_unhealthy(
    tiny_pack: TinyPack, tmp_path: Path
) -> None:
    damaged = shutil.copytree(tiny_pack("fp32"), tmp_path / "damaged")
    streamed = next(layer for layer in range(4) if layer not in quarter(Pack.open(damaged)).resident)
    file = Pack.open(damaged).layer_path(streamed)
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    async with engine_with(damaged, Drafts(), residency=quarter, warm_rows=MostRows(target=8, draft=8)) as engine:
        assert not engine.health.healthy
