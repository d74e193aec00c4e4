"""A prompt's keys, values and final features are the same to the last bit, however much of it was in the cache."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from prefill_service.engine import PrefillEngine
from prefill_service.prompt_cache import PromptCache
from prefill_service.scheduler import PromptJob, PromptScheduler
from shared.blocks import BlockPool
from shared.errors import DataLossError
from shared.kv.handoff import Frame, HandoffReceiver, PrefillOutcome
from shared.kv.layout import layout_of
from shared.kv.paged import BLOCK_TOKENS
from shared.metrics import Identity, Telemetry, Totals
from shared.model.model import Model
from shared.outlet import Outlet
from shared.pack.format import layer_file_name
from shared.pack.reader import Pack
from shared.streaming.plan import Residency
from tests.conftest import TinyPack
from tests.conftest import pack as make_pack
from tests.end_to_end.stack import everything
from tests.shared.model.families import family_checkpoint

CONTEXT = 1024
chosen = random.Random(0)
SHARED = [chosen.randrange(2, 320) for _ in range(700)]
"""What most prompts of these tests begin with."""


def beginning(tokens: int, own: int = 0) -> list[int]:
    """A prompt that begins like others, and ends with tokens of its own."""
    return SHARED[:tokens] + [chosen.randrange(2, 320) for _ in range(own)]


PROMPTS = [
    beginning(300, 5),
    beginning(290),
    beginning(700, 1),
    beginning(333, 200),
    beginning(17, 3),
    beginning(16, 1),
    beginning(640),
    beginning(0, 33),
    beginning(512, 77),
]
"""Prefixes and lengths at and between the borders of blocks and of attention's chunks."""
CACHED_IN_ORDER = [0, 288, 288, 320, 16, 16, 624, 0, 512]

Result = tuple[bytes, bytes]
"""All keys and values as they were sent, and the final features."""


class WatchedOutlet(Outlet[Frame | PrefillOutcome]):
    """Calls back, on the engine's thread, for every item that is put."""

    def __init__(self, on_put: Callable[[], None]) -> None:
        super().__init__()
        self._on_put = on_put

    def put(self, item: Frame | PrefillOutcome, size: int = 1) -> None:
        super().put(item, size)
        self._on_put()


@dataclass
class Replica:
    """An engine with a cache, of which tests choose the passes."""

    scheduler: PromptScheduler
    engine: PrefillEngine
    cache: PromptCache
    telemetry: Telemetry

    @property
    def totals(self) -> Totals:
        return self.telemetry.totals

    async def one_by_one(self, prompts: Sequence[Sequence[int]]) -> list[Result]:
        """A pass for each prompt."""
        results = []
        for prompt in prompts:
            job = job_of(prompt)
            self.scheduler.submit(job)
            results.append(result_of(await received(job)))
        return results

    async def idle(self) -> None:
        """Waits until the engine has let go of a pass that somebody waited for to its end, and checks every block."""
        while self.scheduler.running:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        self.engine.check_integrity()


@asynccontextmanager
async def replica(
    path: Path,
    *jobs: PromptJob,
    blocks: int = 200,
    pass_tokens: int = 10_000,
    residency: Callable[[Pack], Residency] = everything,
) -> AsyncIterator[Replica]:
    """The jobs share the first pass; when the context is left every block is accounted for."""
    pack = Pack.open(path)
    scheduler = PromptScheduler(pass_tokens, queue_limit=100)
    for job in jobs:
        scheduler.submit(job)
    identity = Identity(
        stage="prefill", model_digest="", scheme="", context_length=CONTEXT, layers=pack.spec.layers, budget_bytes=1
    )
    cache, telemetry = PromptCache(BlockPool(blocks, BLOCK_TOKENS), pack.manifest.model_digest), Telemetry(identity)
    engine = PrefillEngine(Model(pack, residency(pack)), layout_of(pack), scheduler, telemetry, cache)
    engine.start()
    try:
        yield Replica(scheduler, engine, cache, telemetry)
    finally:
        scheduler.close()
        await asyncio.to_thread(engine.join)
        engine.check_integrity()


def job_of(prompt: Sequence[int], outlet: Outlet[Frame | PrefillOutcome] | None = None, **fields: Any) -> PromptJob:
    return PromptJob("", prompt, outlet or Outlet(), **fields)


async def received(job: PromptJob) -> list[Frame | PrefillOutcome]:
    return [item async for item in job.outlet]


def result_of(items: Sequence[Frame | PrefillOutcome]) -> Result:
    *frames, outcome = items
    assert isinstance(outcome, PrefillOutcome)
    assert outcome.frame_count == len(frames)
    sent = b"".join(frame.keys + frame.values for frame in frames if isinstance(frame, Frame))
    return sent, outcome.last_hidden


async def cached_tokens(job: PromptJob) -> int:
    outcome = (await received(job))[-1]
    assert isinstance(outcome, PrefillOutcome)
    return outcome.cached_tokens


async def alone(path: Path, *prompts: Sequence[int]) -> list[Result]:
    """Each prompt computed as a whole, in a pass of its own."""
    async with replica(path, blocks=0) as without:
        return await without.one_by_one(prompts)


@pytest.mark.parametrize("scheme", ["fp32", "bf16", "int8", "nf4"])
async def test_a_prompt_is_the_same_to_the_last_bit_alone_after_others_with_them_and_in_a_tiny_cache(
    tiny_pack: TinyPack, scheme: str
) -> None:
    path = tiny_pack(scheme, context=CONTEXT)
    expected = await alone(path, *PROMPTS)
    total = sum(map(len, PROMPTS))
    async with replica(path) as after_each_other:
        assert await after_each_other.one_by_one(PROMPTS) == expected
        await after_each_other.idle()
        assert await after_each_other.one_by_one(PROMPTS[::-1]) == expected[::-1]
        totals = after_each_other.totals
        assert totals.prompt_tokens + totals.cached_tokens == 2 * total
    jobs = [job_of(prompt) for prompt in PROMPTS]
    async with replica(path, *jobs) as together:
        assert [result_of(await received(job)) for job in jobs] == expected
        assert (together.totals.passes, together.totals.cached_tokens) == (1, sum(CACHED_IN_ORDER))
    async with replica(path, blocks=9) as tiny:
        assert await tiny.one_by_one(PROMPTS) == expected
        await tiny.idle()
        assert tiny.cache.blocks_cached == 9
        assert 0 < tiny.totals.cached_tokens < sum(CACHED_IN_ORDER)


@pytest.mark.parametrize("family", ["Mistral 0.1", "Gemma 2", "Gemma 3", "Qwen3-MoE", "Llama, dynamic"])
async def test_windows_soft_caps_experts_and_scaled_rotations_change_nothing_about_that(
    tmp_path: Path, family: str
) -> None:
    checkpoint = family_checkpoint(tmp_path / "checkpoint", family)
    path = make_pack(checkpoint, tmp_path / "pack", "bf16")
    prompts = [prompt for prompt in PROMPTS if len(prompt) <= 512]
    async with replica(path) as cached:
        assert await cached.one_by_one(prompts) == await alone(path, *prompts)
        assert cached.totals.cached_tokens > 0


async def test_prompts_report_what_was_not_computed_and_are_sent_whole(tiny_pack: TinyPack) -> None:
    path = tiny_pack("fp32", context=CONTEXT)
    layout = layout_of(Pack.open(path))
    jobs = [job_of(prompt) for prompt in PROMPTS]
    async with replica(path, *jobs):
        for job, cached in zip(jobs, CACHED_IN_ORDER, strict=True):
            *frames, outcome = await received(job)
            assert isinstance(outcome, PrefillOutcome)
            assert outcome.cached_tokens == cached
            assert outcome.batch_tokens == sum(map(len, PROMPTS)) - sum(CACHED_IN_ORDER)
            receiver = HandoffReceiver(layout, len(job.token_ids), lambda *_: None)
            for frame in frames:
                assert isinstance(frame, Frame)
                receiver.accept(frame)


async def test_prompts_that_begin_with_what_is_known_share_passes_that_could_not_hold_them_whole(
    tiny_pack: TinyPack,
) -> None:
    prompts = [beginning(480, 16) for _ in range(9)]
    jobs = [job_of(prompt) for prompt in prompts]
    path = tiny_pack("fp32", context=CONTEXT)
    async with replica(path, *jobs, pass_tokens=500) as cached:
        assert [result_of(await received(job)) for job in jobs] == await alone(path, *prompts)
        assert cached.totals.passes == 2, "the first prompt; the others, 16 tokens each"


@pytest.mark.parametrize("held", [1, 16, 150, 288, 289, 304])
async def test_frames_begin_behind_what_the_caller_holds_cached_or_not(tiny_pack: TinyPack, held: int) -> None:
    path = tiny_pack("fp32", context=CONTEXT)
    layout = layout_of(Pack.open(path))
    *whole, _ = await whole_frames(path)
    async with replica(path) as cached:
        for known in (0, 288):
            job = job_of(PROMPTS[0], held_tokens=held)
            cached.scheduler.submit(job)
            *frames, outcome = await received(job)
            assert isinstance(outcome, PrefillOutcome)
            assert outcome.cached_tokens == (known and 304)
            receiver = HandoffReceiver(layout, 305, lambda *_: None, held)
            for frame, complete in zip(frames, whole, strict=True):
                assert isinstance(frame, Frame)
                assert isinstance(complete, Frame)
                receiver.accept(frame)
                assert frame.keys == complete.keys[held * layout.token_bytes :]
                assert frame.values == complete.values[held * layout.token_bytes :]


async def whole_frames(path: Path) -> list[Frame | PrefillOutcome]:
    job = job_of(PROMPTS[0])
    async with replica(path, job, blocks=0):
        return await received(job)


async def test_salts_keep_prompts_apart_in_a_pass_and_between_passes(tiny_pack: TinyPack) -> None:
    path = tiny_pack("fp32", context=CONTEXT)
    jobs = [job_of(PROMPTS[0], cache_salt=salt) for salt in ("a", "b", "a", "")]
    async with replica(path, *jobs) as cached:
        assert [await cached_tokens(job) for job in jobs] == [0, 0, 304, 0]
        later = [job_of(PROMPTS[0], cache_salt=salt) for salt in ("b", "c", "")]
        for job in later:
            cached.scheduler.submit(job)
        assert [await cached_tokens(job) for job in later] == [304, 0, 304]


async def test_a_cancelled_prompt_goes_on_only_for_those_who_build_on_it_and_the_rest_of_it_is_forgotten(
    tiny_pack: TinyPack,
) -> None:
    path = tiny_pack("fp32", context=CONTEXT)
    long, building, apart = beginning(600), beginning(100, 20), beginning(0, 50)

    def cancel() -> None:
        leaving.cancelled = True

    leaving = job_of(long, WatchedOutlet(cancel))
    jobs = [leaving, job_of(building), job_of(apart)]
    async with replica(path, *jobs) as cached:
        assert [result_of(await received(job)) for job in jobs[1:]] == await alone(path, building, apart)
        leaving.outlet.close()
        assert len(await received(leaving)) == 1, "of its first layer"
        await cached.idle()
        assert cached.cache.blocks_cached == 96 // BLOCK_TOKENS + 1 + 48 // BLOCK_TOKENS
        assert cached.totals.prompt_tokens == 24 + 50
        again = job_of(long)
        cached.scheduler.submit(again)
        items = await received(again)
        assert result_of(items) == (await alone(path, long))[0]
        assert isinstance(items[-1], PrefillOutcome)
        assert items[-1].cached_tokens == 96


async def test_a_pass_that_everybody_leaves_leaves_nothing_behind(tiny_pack: TinyPack) -> None:
    def cancel() -> None:
        for job in jobs:
            job.cancelled = True

    jobs = [job_of(prompt, WatchedOutlet(cancel)) for prompt in PROMPTS[:3]]
    async with replica(tiny_pack("fp32", context=CONTEXT), *jobs) as cached:
        pass
    assert (cached.cache.blocks_cached, cached.totals.passes) == (0, 1)


async def test_a_layer_that_cannot_be_read_makes_the_pass_forget_what_it_was_to_fill_and_nothing_else(
    tiny_pack: TinyPack, tmp_path: Path
) -> None:
    whole = tiny_pack("fp32", context=CONTEXT)
    path = shutil.copytree(whole, tmp_path / "pack")
    damaged = path / layer_file_name(3)

    def damage() -> None:
        os.truncate(damaged, 4096)

    def restore() -> None:
        shutil.copy2(whole / layer_file_name(3), tmp_path / "whole")
        (tmp_path / "whole").rename(damaged)

    async with replica(path, residency=lambda pack: Residency(frozenset(), slots=2)) as cached:
        await cached.one_by_one([beginning(100)])
        failing = [job_of(prompt, WatchedOutlet(damage)) for prompt in PROMPTS[:3]]
        for job in failing:
            cached.scheduler.submit(job)
        for job in failing:
            with pytest.raises(DataLossError, match="layer 3"):
                await received(job)
        await cached.idle()
        restore()
        assert cached.cache.blocks_cached == 96 // BLOCK_TOKENS
        assert await cached.one_by_one(PROMPTS[:3]) == await alone(whole, *PROMPTS[:3])
