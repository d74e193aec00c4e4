"""Prefill's prefix cache behind decode replicas that share nothing: fewer tokens computed, and the same answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from headrace.client_status import statuses
from tests.end_to_end.conftest import SchemePack
from tests.end_to_end.reference import transformers_greedy, transformers_model
from tests.end_to_end.stack import Prefill, answers, decode_replica, prefill_replica
from tests.shared.model.runs import random_tokens

HEAD = random_tokens(150, 300)
"""A system prompt of nine blocks and a piece."""
PROMPTS = [HEAD + random_tokens(1 + 37 * number, 300, seed=number) for number in range(5)]
REQUESTS: list[dict[str, Any]] = [{"token_ids": prompt, "max_tokens": 16} for prompt in PROMPTS]
WHOLE_TOKENS = sum(map(len, PROMPTS))
CACHED_TOKENS = 4 * 144


async def answered(path: Path, cache_blocks: int, *, at_once: bool) -> tuple[list[tuple[int, ...]], Prefill]:
    """The answers, and the prefill replica that they came from."""
    async with (
        prefill_replica(path, cache_blocks=cache_blocks) as prefill,
        decode_replica(path, prefill.address, shares_prefixes=False) as decode,
    ):
        got = await answers(decode.client, REQUESTS, at_once=at_once)
        await decode.idle()
    return [answer.token_ids for answer in got], prefill


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
async def test_in_float32_answers_after_hits_are_those_of_transformers(
    checkpoint: Path, target_pack: SchemePack, at_once: bool
) -> None:
    oracle = transformers_model(checkpoint)
    got, prefill = await answered(target_pack("fp32"), 256, at_once=at_once)
    assert got == [transformers_greedy(oracle, prompt, 16) for prompt in PROMPTS]
    totals = prefill.telemetry.totals
    assert (totals.cached_tokens, totals.prompt_tokens) == (CACHED_TOKENS, WHOLE_TOKENS - CACHED_TOKENS)


@pytest.mark.parametrize("scheme", ["bf16", "int8", "nf4"])
async def test_below_float32_a_hit_changes_no_token_either(target_pack: SchemePack, scheme: str) -> None:
    without, _ = await answered(target_pack(scheme), 0, at_once=False)
    tiny, _ = await answered(target_pack(scheme), 4, at_once=False)
    hits, prefill = await answered(target_pack(scheme), 256, at_once=False)
    assert hits == tiny == without
    assert prefill.telemetry.totals.cached_tokens == CACHED_TOKENS


async def test_a_salt_that_a_client_gives_reaches_the_cache(target_pack: SchemePack) -> None:
    path = target_pack("fp32")
    async with (
        prefill_replica(path) as prefill,
        decode_replica(path, prefill.address, shares_prefixes=False) as decode,
    ):
        for salt, cached in (("a", 0), ("b", 0), ("a", 144)):
            before = prefill.telemetry.totals.cached_tokens
            await decode.client.complete(**REQUESTS[0], cache_salt=salt)
            assert prefill.telemetry.totals.cached_tokens - before == cached
        await decode.idle()


async def test_two_decode_replicas_profit_from_each_other_through_prefill(target_pack: SchemePack) -> None:
    path = target_pack("fp32")
    async with (
        prefill_replica(path) as prefill,
        decode_replica(path, prefill.address) as first,
        decode_replica(path, prefill.address) as second,
    ):
        expected = await answers(first.client, REQUESTS[:2], at_once=False)
        again = await answers(second.client, REQUESTS[:2], at_once=False)
        await first.idle()
        await second.idle()
        (status,) = await asyncio.to_thread(statuses, [prefill.address])
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in expected]
    # Of both prompts the whole blocks at the second replica, of the second prompt the common ones at the first.
    assert status.cached_tokens == 144 + 144 + 176
    assert (status.kv_blocks, status.kv_blocks_cached, status.kv_blocks_used) == (256, 9 + 2, 0)
    registry = CollectorRegistry()
    registry.register(prefill.telemetry)
    for name, value in (
        ("headrace_cached_tokens_total", status.cached_tokens),
        ("headrace_kv_blocks_cached", status.kv_blocks_cached),
        ("headrace_queued_tokens", 0),
    ):
        assert registry.get_sample_value(name, {"stage": "prefill"}) == value
