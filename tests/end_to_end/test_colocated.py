"""Prompts computed in decode's own passes: the same answers, whatever the mode."""

from __future__ import annotations

from pathlib import Path

import pytest

from decode_service.prompts import LocalPrefill
from headrace.errors import Unavailable
from tests.end_to_end.conftest import SchemePack
from tests.end_to_end.reference import transformers_greedy, transformers_model
from tests.end_to_end.stack import answers, decode_replica, prefill_replica, quarter

NOBODY = "127.0.0.1:1"
"""An address that refuses connections."""


@pytest.fixture(scope="module")
def expected(checkpoint: Path, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    model = transformers_model(checkpoint)
    return [transformers_greedy(model, prompt, 24) for prompt in prompts]


def requests(prompts: list[list[int]]) -> list[dict[str, object]]:
    return [{"token_ids": prompt, "max_tokens": 24} for prompt in prompts]


@pytest.mark.parametrize("pass_tokens", [3, 512])
@pytest.mark.parametrize("draft", ["none", "ngram", "model"])
async def test_without_prefill_replicas_prompts_share_passes_with_drafts(
    target_pack: SchemePack,
    truncated_pack: SchemePack,
    prompts: list[list[int]],
    expected: list[tuple[int, ...]],
    draft: str,
    pass_tokens: int,
) -> None:
    draft_pack = truncated_pack("fp32") if draft == "model" else None
    async with decode_replica(
        target_pack("fp32"), draft=draft, draft_pack=draft_pack, residency=quarter, pass_tokens=pass_tokens
    ) as decode:
        found = await answers(decode.client, requests(prompts), at_once=True)
        await decode.idle()
    assert [answer.token_ids for answer in found] == expected
    assert all(answer.timings.prefill_compute_ms == 0 for answer in found)


async def test_short_prompts_ride_along_and_long_ones_are_handed_off(
    target_pack: SchemePack, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    limit = sorted(map(len, prompts))[len(prompts) // 2]
    async with (
        prefill_replica(target_pack("fp32")) as prefill,
        decode_replica(
            target_pack("fp32"), prefill.address, local_prefill=LocalPrefill.SHORT, short_prompt=limit
        ) as decode,
    ):
        found = await answers(decode.client, requests(prompts), at_once=True)
        handed_off = prefill.telemetry.totals.prompt_tokens
    assert [answer.token_ids for answer in found] == expected
    assert handed_off == sum(len(prompt) for prompt in prompts if len(prompt) > limit) > 0


async def test_answers_are_the_same_whatever_measured_costs_say_of_prompts(
    target_pack: SchemePack, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    long = [[7, 8, 9] * 40, [5] * 100]
    path = target_pack("fp32")
    async with (
        prefill_replica(path) as prefill,
        decode_replica(path, prefill.address, local_prefill=LocalPrefill.SHORT, short_prompt=None) as decode,
    ):
        for _ in range(2):
            await answers(decode.client, requests(long), at_once=True)
            found = await answers(decode.client, requests(prompts), at_once=True)
            assert [answer.token_ids for answer in found] == expected
        assert prefill.telemetry.totals.prompt_tokens >= sum(map(len, long)), "nothing was known of handoffs at first"


async def test_when_no_replica_answers_the_fallback_computes_here_and_never_does_not(
    target_pack: SchemePack, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    async with decode_replica(target_pack("fp32"), NOBODY, local_prefill=LocalPrefill.FALLBACK) as decode:
        (found,) = await answers(decode.client, requests(prompts)[:1], at_once=True)
    assert found.token_ids == expected[0]
    async with decode_replica(target_pack("fp32"), NOBODY) as decode:
        with pytest.raises(Unavailable):
            await answers(decode.client, requests(prompts)[:1], at_once=True)
        await decode.idle()
