"""Prefill passes: what reaches each caller, and that cancelled ones cost no further layer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prefill_service.engine import PrefillEngine
from prefill_service.scheduler import PromptJob, PromptScheduler
from shared.errors import CapacityError
from shared.kv.handoff import Frame, PrefillOutcome
from shared.kv.layout import layout_of
from shared.metrics import Identity, Telemetry
from shared.model.model import Model
from shared.outlet import Outlet
from shared.pack.reader import Pack
from shared.spool import Spool, SpooledOutlet
from shared.spool_file import SpoolFolder
from tests.conftest import TinyPack
from tests.end_to_end.stack import everything

LAYERS = 4
Sent = list[Frame | PrefillOutcome]


class WatchedOutlet(Outlet[Frame | PrefillOutcome]):
    """Calls back, on the engine's thread, for every item that is put."""

    def __init__(self, on_put: Callable[[Frame | PrefillOutcome], None]) -> None:
        super().__init__()
        self._on_put = on_put

    def put(self, item: Frame | PrefillOutcome, size: int = 1) -> None:
        super().put(item, size)
        self._on_put(item)


@pytest.fixture(scope="module")
def pack(tiny_pack: TinyPack) -> Path:
    return tiny_pack("fp32")


@asynccontextmanager
async def engine_for(path: Path, *jobs: PromptJob, pass_tokens: int = 10_000) -> AsyncIterator[Telemetry]:
    """Runs the jobs, in one pass unless it is too small; when the context is left the engine has ended."""
    pack = Pack.open(path)
    scheduler = PromptScheduler(pass_tokens, queue_limit=100)
    for job in jobs:
        scheduler.submit(job)
    telemetry = Telemetry(
        Identity(stage="prefill", model_digest="", scheme="fp32", context_length=1, layers=LAYERS, budget_bytes=1)
    )
    engine = PrefillEngine(Model(pack, everything(pack)), layout_of(pack), scheduler, telemetry)
    engine.start()
    try:
        yield telemetry
    finally:
        scheduler.close()
        await asyncio.to_thread(engine.join)


async def received(job: PromptJob) -> Sent:
    return [item async for item in job.outlet]


def job_of(tokens: int, outlet: Outlet[Frame | PrefillOutcome] | None = None) -> PromptJob:
    return PromptJob("", [2 + number % 300 for number in range(tokens)], outlet or Outlet())


async def alone(pack: Path, tokens: int) -> Sent:
    job = job_of(tokens)
    async with engine_for(pack, job):
        return await received(job)


async def test_every_caller_gets_its_layers_in_order_and_last_the_outcome(pack: Path) -> None:
    jobs = [job_of(tokens) for tokens in (1, 7, 300)]
    async with engine_for(pack, *jobs) as telemetry:
        sent = [await received(job) for job in jobs]
    for (*frames, outcome), job in zip(sent, jobs, strict=True):
        assert [frame.layer for frame in frames if isinstance(frame, Frame)] == list(range(LAYERS))
        assert all(isinstance(frame, Frame) and frame.token_count == len(job.token_ids) for frame in frames)
        assert isinstance(outcome, PrefillOutcome)
        assert (outcome.frame_count, outcome.batch_prompts, outcome.batch_tokens) == (LAYERS, 3, 308)
    assert (telemetry.totals.passes, telemetry.totals.batched_requests, telemetry.totals.prompt_tokens) == (1, 3, 308)


async def test_a_cancelled_prompt_leaves_at_the_next_layer_and_its_neighbours_do_not_notice(pack: Path) -> None:
    def cancel(_: object) -> None:
        leaving.cancelled = True

    first, last = job_of(20), job_of(33)
    leaving = job_of(50, WatchedOutlet(cancel))
    async with engine_for(pack, first, leaving, last):
        neighbours = [await received(first), await received(last)]
    leaving.outlet.close()
    assert [item.layer for item in await received(leaving) if isinstance(item, Frame)] == [0]
    for sent, tokens in zip(neighbours, (20, 33), strict=True):
        *frames, outcome = await alone(pack, tokens)
        assert sent[:-1] == frames
        assert isinstance(sent[-1], PrefillOutcome)
        assert isinstance(outcome, PrefillOutcome)
        assert sent[-1].last_hidden == outcome.last_hidden


async def test_prompts_that_left_do_not_count_as_computed(pack: Path) -> None:
    def cancel(_: object) -> None:
        leaving.cancelled = True

    staying, leaving = job_of(20), job_of(50, WatchedOutlet(cancel))
    async with engine_for(pack, staying, leaving) as telemetry:
        await received(staying)
    assert (telemetry.totals.prompt_tokens, telemetry.totals.batched_requests) == (20, 2)


async def test_a_pass_that_nobody_waits_for_any_more_ends_at_the_next_layer(pack: Path) -> None:
    def cancel(_: object) -> None:
        job.cancelled = True

    job = job_of(50, WatchedOutlet(cancel))
    async with engine_for(pack, job):
        pass
    job.outlet.close()
    assert len(await received(job)) == 1


async def test_a_caller_that_reads_too_slowly_loses_its_request_and_its_memory_and_no_neighbour_does(
    pack: Path,
) -> None:
    layer_bytes = 400 * 2 * layout_of(Pack.open(pack)).token_bytes
    spool = Spool(2 * layer_bytes)
    small, large = (job_of(tokens, SpooledOutlet(spool)) for tokens in (10, 400))
    async with engine_for(pack, small, large) as telemetry:
        pass
    assert telemetry.totals.passes == 1
    assert large.outlet.pending == 0
    with pytest.raises(CapacityError, match=r"\d+ bytes of KV wait for a caller that reads too slowly"):
        await received(large)
    assert len(await received(small)) == LAYERS + 1


async def test_with_a_spool_on_disk_nobody_loses_anything(pack: Path, tmp_path: Path) -> None:
    layer_bytes = 400 * 2 * layout_of(Pack.open(pack)).token_bytes
    spool = Spool(layer_bytes, SpoolFolder(tmp_path, 1 << 30))
    jobs = [job_of(tokens, SpooledOutlet(spool)) for tokens in (10, 400)]
    async with engine_for(pack, *jobs):
        pass
    assert spool.memory_bytes <= layer_bytes < spool.disk_bytes
    for job, tokens in zip(jobs, (10, 400), strict=True):
        *frames, outcome = await received(job)
        *expected, _ = await alone(pack, tokens)
        assert frames == expected
        assert isinstance(outcome, PrefillOutcome)
    spool.close()


async def test_a_spool_that_overflows_with_the_last_layer_is_an_error_and_never_an_answer(pack: Path) -> None:
    layer_bytes = 100 * 2 * layout_of(Pack.open(pack)).token_bytes
    job = job_of(100, SpooledOutlet(Spool(LAYERS * layer_bytes - 1)))
    async with engine_for(pack, job) as telemetry:
        pass
    assert telemetry.totals.prompt_tokens == 0
    with pytest.raises(CapacityError):
        await received(job)


async def test_slow_callers_of_earlier_passes_count_as_well(pack: Path) -> None:
    layer_bytes = 100 * 2 * layout_of(Pack.open(pack)).token_bytes
    spool_bytes = int(2.5 * LAYERS * layer_bytes)
    spool = Spool(spool_bytes)
    jobs = [job_of(100, SpooledOutlet(spool)) for _ in range(3)]
    async with engine_for(pack, *jobs, pass_tokens=100) as telemetry:
        pass
    assert telemetry.totals.passes == 3
    assert sum(job.outlet.pending for job in jobs) <= spool_bytes
    assert sum(job.outlet.pending > 0 for job in jobs) == 2
