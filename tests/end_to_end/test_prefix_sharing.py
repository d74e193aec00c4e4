"""Prompts that begin alike are computed once, and nobody can tell from the answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from decode_service.prompts import LocalPrefill
from shared.kv.paged import BLOCK_TOKENS
from tests.end_to_end.conftest import SchemePack
from tests.end_to_end.stack import answers, decode_replica, prefill_replica, services

HEAD = [7, 300, 12, 44] * 20
"""A system prompt of five blocks."""
PROMPTS = [HEAD + [9 + number, 200 - number] * (1 + 5 * number) for number in range(5)]
SAMPLING: dict[str, Any] = {"temperature": 0.8, "seed": 11}
REQUESTS = [{"token_ids": prompt, "max_tokens": 20} for prompt in PROMPTS]
REQUESTS += [request | SAMPLING for request in REQUESTS]


def held(tokens: int) -> int:
    """How many of so many known tokens are in whole blocks."""
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize("draft", ["none", "ngram", "model", "self"])
@pytest.mark.parametrize("handed_off", [True, False], ids=["handed off", "colocated"])
async def test_answers_are_the_same_with_and_without_sharing(
    target_pack: SchemePack, truncated_pack: SchemePack, draft: str, handed_off: bool
) -> None:
    path = target_pack("fp32")
    drafting: dict[str, Any] = {"draft": draft}
    if draft in ("model", "self"):
        drafting["draft_pack"] = truncated_pack("fp32") if draft == "model" else path
    found = {}
    async with prefill_replica(path, cache_blocks=0) as prefill:
        addresses = [prefill.address] if handed_off else []
        for shares in (True, False):
            async with decode_replica(path, *addresses, shares_prefixes=shares, **drafting) as decode:
                found[shares] = await answers(decode.client, REQUESTS, at_once=False)
                found[shares] += await answers(decode.client, REQUESTS, at_once=True)
                await decode.idle()
                (status,) = await decode.client.status()
            cached = [answer.usage.cached_tokens for answer in found[shares]]
            assert status.cached_tokens == sum(cached)
            assert (status.kv_blocks_cached > 0) == shares
            if shares:
                assert cached[0] == 0
                assert all(count >= len(HEAD) for count in cached[1:])
                assert cached[5:10] == [held(len(prompt) - 1) for prompt in PROMPTS], "known from the first round"
            else:
                assert cached == [0] * len(cached)
    assert [answer.token_ids for answer in found[True]] == [answer.token_ids for answer in found[False]]


async def test_a_chat_computes_its_system_prompt_once_and_each_turn_only_what_is_new(target_pack: SchemePack) -> None:
    system = {"role": "system", "content": "You sum up reports from the field in one plain sentence. " * 4}
    async with services(target_pack("fp32")) as decode:
        first = await decode.client.complete(messages=[system, {"role": "user", "content": "leak"}], max_tokens=40)
        other = await decode.client.complete(messages=[system, {"role": "user", "content": "pump"}], max_tokens=4)
        prompt = [5] * 30
        turn = await decode.client.complete(token_ids=prompt, max_tokens=40, ignore_eos=True)
        await decode.idle()  # an answer may be read before the pass that ended it has let go of its blocks
        next_turn = await decode.client.complete(token_ids=[*prompt, *turn.token_ids, 9, 9], max_tokens=4)
        await decode.idle()
    assert first.usage.cached_tokens == 0
    assert 0 < other.usage.cached_tokens < other.usage.prompt_tokens
    assert other.usage.cached_tokens >= held(other.usage.prompt_tokens - 30)
    assert next_turn.usage.cached_tokens == held(len(prompt) + 39), "the answer's last token was never an input"


async def test_only_what_is_missing_is_handed_off_or_computed_here_where_that_is_short(target_pack: SchemePack) -> None:
    path = target_pack("fp32")
    long, short = HEAD + [3] * 60, HEAD + [4] * 8
    async with (
        prefill_replica(path) as prefill,
        decode_replica(path, prefill.address, local_prefill=LocalPrefill.SHORT, short_prompt=16) as decode,
    ):
        for prompt in (HEAD, long, short, long):
            await decode.client.complete(token_ids=prompt, max_tokens=4)
        calls = prefill.telemetry.totals.passes
    assert calls == 2, "the first two; what the others lack is short"


async def test_nothing_is_shared_between_tenants(target_pack: SchemePack) -> None:
    async with services(target_pack("fp32")) as decode:
        found = [
            await decode.client.complete(token_ids=PROMPTS[0], max_tokens=8, cache_salt=salt)
            for salt in ("a", "b", "a", "b", "")
        ]
    assert [answer.usage.cached_tokens for answer in found] == [0, 0, len(HEAD), len(HEAD), 0]
    assert len({answer.token_ids for answer in found}) == 1


@pytest.mark.parametrize("draft", ["model", "self"])
async def test_a_draft_is_as_good_after_a_prefix_hit_as_before(target_pack: SchemePack, draft: str) -> None:
    path: Path = target_pack("fp32")
    async with services(path, draft=draft, draft_pack=path) as decode:
        first, again = [
            await decode.client.complete(token_ids=PROMPTS[4], max_tokens=41, ignore_eos=True) for _ in range(2)
        ]
    assert again.usage.cached_tokens > 0
    assert first.usage.accepted_tokens == first.usage.draft_tokens > 0, "it has the target's own weights"
    assert (again.usage.draft_tokens, again.usage.accepted_tokens) == (
        first.usage.draft_tokens,
        first.usage.accepted_tokens,
    )
