"""Memory that is promised more often than it is there: sequences give way and come back, and no answer changes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from decode_service.sampling import SamplingParams
from shared.pack.reader import Pack
from tests.end_to_end.conftest import SchemePack
from tests.end_to_end.reference import GREEDY, plain_answer
from tests.end_to_end.stack import answers, decode_replica, everything, prefill_replica, services, until

MAX_TOKENS = 60
PROMPTS = [[5 + number, 90, 17] * (1 + number) for number in range(8)]
BLOCKS = 10
"""What two of these sequences need when they have grown up."""
TIGHT: dict[str, Any] = {"kv_blocks": BLOCKS, "overcommit": 4.0, "batch": 6}
SAMPLED = SamplingParams(temperature=0.75, seed=3)


def requests(**changes: Any) -> list[dict[str, Any]]:
    """Half of them greedy, half of them sampled."""
    plain = [{"token_ids": prompt, "max_tokens": MAX_TOKENS} | changes for prompt in PROMPTS]
    return plain[:4] + [request | {"temperature": SAMPLED.temperature, "seed": SAMPLED.seed} for request in plain[4:]]


@pytest.fixture(scope="module")
def expected(endless_pack: Path) -> list[tuple[int, ...]]:
    """Of one process that does one after the other."""
    everywhere = everything(Pack.open(endless_pack))
    return [
        plain_answer(endless_pack, everywhere, prompt, MAX_TOKENS, SAMPLED if number >= 4 else GREEDY)[0]
        for number, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("draft", ["none", "ngram", "model", "self"])
@pytest.mark.parametrize("handed_off", [True, False], ids=["handed off", "colocated"])
@pytest.mark.parametrize("shares_prefixes", [True, False], ids=["sharing", "alone"])
async def test_answers_are_the_same_however_often_sequences_give_way(
    endless_pack: Path,
    truncated_pack: SchemePack,
    expected: list[tuple[int, ...]],
    draft: str,
    handed_off: bool,
    shares_prefixes: bool,
) -> None:
    path = endless_pack
    drafting: dict[str, Any] = {"draft": draft, "draft_length": 2, "shares_prefixes": shares_prefixes}
    if draft in ("model", "self"):
        drafting["draft_pack"] = truncated_pack("fp32") if draft == "model" else path
    async with prefill_replica(path) as prefill:
        addresses = [prefill.address] if handed_off else []
        async with decode_replica(path, *addresses, **drafting, **TIGHT) as decode:
            found = await answers(decode.client, requests(), at_once=True)
            await decode.idle()
            (status,) = await decode.client.status()
    assert [answer.token_ids for answer in found] == expected
    assert status.preemptions > 0


async def test_nobody_gives_way_where_nothing_is_over_committed(
    endless_pack: Path, expected: list[tuple[int, ...]]
) -> None:
    async with services(endless_pack, draft="ngram", **TIGHT | {"overcommit": 1.0}) as decode:
        found = await answers(decode.client, requests(), at_once=True)
        await decode.idle()
        assert decode.telemetry.totals.preemptions == 0
    assert [answer.token_ids for answer in found] == expected


async def test_streams_go_on_where_they_were_when_their_sequence_gave_way(
    endless_pack: Path, expected: list[tuple[int, ...]]
) -> None:
    async with services(endless_pack, draft="ngram", **TIGHT) as decode:

        async def stream(request: dict[str, Any]) -> tuple[int, ...]:
            tokens: list[int] = []
            async with decode.client.generate(**request) as generation:
                async for chunk in generation:
                    tokens += chunk.token_ids
            return tuple(tokens)

        assert list(await asyncio.gather(*map(stream, requests()))) == expected
        await decode.idle()
        assert decode.telemetry.totals.preemptions > 0


async def test_whoever_leaves_at_any_moment_leaves_nothing_behind_and_the_others_come_back(
    endless_pack: Path, expected: list[tuple[int, ...]]
) -> None:
    async with services(endless_pack, **TIGHT) as decode:
        calls = [asyncio.create_task(decode.client.complete(**request)) for request in requests()]
        for number in (7, 1, 4):
            seen = decode.telemetry.totals.preemptions
            await until(lambda seen=seen: decode.telemetry.totals.preemptions > seen or calls[0].done())
            calls[number].cancel()
        left = [number for number in range(8) if number not in (7, 1, 4)]
        assert [(await calls[number]).token_ids for number in left] == [expected[number] for number in left]
        await decode.idle()
        await asyncio.gather(*calls, return_exceptions=True)


async def test_an_urgent_request_takes_the_memory_of_others_and_is_answered_before_them(endless_pack: Path) -> None:
    async with services(endless_pack, kv_blocks=BLOCKS, overcommit=1.0) as decode:
        patient = [
            asyncio.create_task(decode.client.complete(token_ids=prompt, max_tokens=MAX_TOKENS, priority=-1))
            for prompt in PROMPTS[:4]
        ]
        await until(lambda: decode.scheduler.queued > 0 and decode.telemetry.totals.passes > 4)
        urgent = await decode.client.complete(token_ids=[8] * 90, max_tokens=16, priority=100)
        still_waiting = [task for task in patient if not task.done()]
        later = await asyncio.gather(*patient)
        await decode.idle()
        preemptions = decode.telemetry.totals.preemptions
        alone = [
            await decode.client.complete(token_ids=prompt, max_tokens=MAX_TOKENS, priority=-1) for prompt in PROMPTS[:4]
        ]
    assert len(urgent.token_ids) == 16
    assert still_waiting
    assert preemptions > 0
    assert [answer.token_ids for answer in later] == [answer.token_ids for answer in alone]
