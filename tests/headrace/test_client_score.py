"""Scores as the client returns them, and what it makes of streams that fail or lack something."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from headrace.client import AsyncClient, Client
from headrace.errors import ServerError, Unavailable
from headrace.retry import RetryPolicy
from headrace.score import Score
from tests.headrace.fake_decode import DIGEST, FakeDecode, served


class Faulty(FakeDecode):
    """Ends with each status in turn, after so many events, and then well."""

    def __init__(self, kept: int, *codes: grpc.StatusCode) -> None:
        super().__init__()
        self.kept = kept
        self.codes = list(codes)

    async def ScorePrompt(self, request: Any, context: Any) -> AsyncIterator[Any]:
        events = [event async for event in super().ScorePrompt(request, context)]
        for event in events[: self.kept] if self.codes else events:
            yield event
        if self.codes:
            await context.abort(self.codes.pop(0), "as scripted")


class Short(FakeDecode):
    """Ends well after so many events."""

    def __init__(self, kept: int) -> None:
        super().__init__()
        self.kept = kept

    async def ScorePrompt(self, request: Any, context: Any) -> AsyncIterator[Any]:
        events = [event async for event in super().ScorePrompt(request, context)]
        for event in events[: self.kept]:
            yield event


def assert_score(score: Score) -> None:
    assert (score.token_ids, score.logprobs) == ((7, 8, 9), (None, -0.5, -0.5))
    assert score.top == ((), ((9, -0.25),), ((9, -0.25),))
    assert (score.request_id, score.model_digest, score.queue_ms, score.compute_ms) == ("s1", DIGEST, 1.0, 2.0)
    assert score.total_logprob == -1.0
    assert score.perplexity == pytest.approx(math.exp(0.5))


async def test_both_clients_return_the_same_score_and_send_the_same_request() -> None:
    async with served(fake := FakeDecode()) as address:
        async with AsyncClient(address, metadata={"tenant": "a"}) as client:
            assert_score(await client.score("water", top_logprobs=1, request_id="s1", priority=5))
        with Client(address, metadata={"tenant": "a"}) as sync:
            assert_score(await asyncio.to_thread(sync.score, "water", top_logprobs=1, request_id="s1", priority=5))
    first, second = fake.requests
    assert first == second
    assert (first.prompt.text, first.top_logprobs, first.request_id, first.priority) == ("water", 1, "s1", 5)
    assert [sent["tenant"] for sent in fake.metadata] == ["a", "a"]


async def test_a_call_that_found_no_replica_is_tried_again_from_the_beginning() -> None:
    retry = RetryPolicy(attempts=3, first_delay_s=0.001)
    unavailable = grpc.StatusCode.UNAVAILABLE
    async with served(Faulty(2, unavailable, unavailable)) as address, AsyncClient(address, retry=retry) as client:
        assert_score(await client.score("water", top_logprobs=1, request_id="s1"))
    async with served(Faulty(0, unavailable)) as address:
        with Client(address, retry=retry) as sync:
            assert_score(await asyncio.to_thread(sync.score, "water", top_logprobs=1, request_id="s1"))
    async with served(Faulty(0, *[unavailable] * 3)) as address, AsyncClient(address, retry=retry) as client:
        with pytest.raises(Unavailable, match="as scripted"):
            await client.score("water")


@pytest.mark.parametrize("kept", [1, 2])
async def test_a_stream_that_ends_too_early_is_an_error_and_no_score(kept: int) -> None:
    async with served(Short(kept)) as address, AsyncClient(address) as client:
        with pytest.raises(ServerError, match="ended too early"):
            await client.score("water")
