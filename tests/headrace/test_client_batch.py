"""Batches of a program: in order, bounded, and over when nobody listens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, closing
from typing import Any

import grpc
import pytest

from headrace import AsyncClient, Client, Completion, InputError, InvalidRequest
from headrace.client_batch import WINDOW, BatchRequest
from tests.headrace.fake_decode import FakeDecode, echo, hanging, served


class Meter:
    """A script that counts how many calls are under way; nothing is answered before two are. "fails" fails."""

    def __init__(self) -> None:
        self.under_way = self.most = 0
        self.two = asyncio.Event()

    async def __call__(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        if self.under_way == 2:
            self.two.set()
        try:
            await self.two.wait()
            if request.prompt.text == "fails":
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "as scripted")
            async for event in echo(request, context):
                yield event
                await asyncio.sleep(0)
        finally:
            self.under_way -= 1


def asked(count: int) -> Iterator[BatchRequest]:
    return ({"prompt": f"Water {number}"} for number in range(count))


@pytest.mark.parametrize("kind", [AsyncClient, Client])
async def test_outcomes_come_in_order_and_a_failure_stops_nobody(kind: type) -> None:
    requests: list[BatchRequest] = [*asked(9), {"prompt": "fails"}, {"prompt": "x", "top_k": -1}, *asked(9)]
    meter = Meter()
    async with served(FakeDecode(meter)) as address:
        if kind is AsyncClient:
            async with AsyncClient(address) as client:
                found = [outcome async for outcome in client.batch(requests, concurrency=3)]
        else:
            found = await asyncio.to_thread(lambda: list(Client(address).batch(requests, concurrency=3)))
    texts = [outcome.text if isinstance(outcome, Completion) else outcome.status for outcome in found]
    waters = [f"Water {number}" for number in range(9)]
    assert texts == [*waters, "INVALID_ARGUMENT", "INVALID_ARGUMENT", *waters]
    assert next(str(outcome) for outcome in found if isinstance(outcome, InvalidRequest)) == "as scripted"
    assert 1 < meter.most <= 3


async def test_requests_are_read_only_as_they_are_needed() -> None:
    read = 0

    def endless() -> Iterator[BatchRequest]:
        nonlocal read
        while True:
            read += 1
            yield {"prompt": "Water"}

    async with (
        served(FakeDecode()) as address,
        AsyncClient(address) as client,
        aclosing(client.batch(endless(), concurrency=2)) as outcomes,
    ):
        await anext(outcomes)
    assert read == WINDOW * 2


async def test_an_asynchronous_batch_that_is_left_cancels_its_calls() -> None:
    hangs = asyncio.Event()

    async def first_only(request: Any, context: Any) -> AsyncIterator[Any]:
        if len(fake.requests) > 1:
            hangs.set()
        async for event in echo(request, context) if len(fake.requests) == 1 else hanging(request, context):
            yield event

    fake = FakeDecode(first_only)
    async with served(fake) as address, AsyncClient(address) as client:
        async with aclosing(client.batch(asked(20), concurrency=1)) as outcomes:
            assert isinstance(await anext(outcomes), Completion)
            await hangs.wait()
        await fake.cancelled.wait()


async def test_a_synchronous_batch_that_is_left_cancels_its_calls() -> None:
    hangs = asyncio.Event()

    async def first_only(request: Any, context: Any) -> AsyncIterator[Any]:
        if len(fake.requests) > 1:
            hangs.set()
        async for event in echo(request, context) if len(fake.requests) == 1 else hanging(request, context):
            yield event

    def use(address: str, loop: asyncio.AbstractEventLoop) -> None:
        with Client(address) as client, closing(client.batch(asked(20), concurrency=1)) as outcomes:
            assert isinstance(next(outcomes), Completion)
            asyncio.run_coroutine_threadsafe(hangs.wait(), loop).result()

    fake = FakeDecode(first_only)
    async with served(fake) as address:
        await asyncio.to_thread(use, address, asyncio.get_running_loop())
        await fake.cancelled.wait()


def test_a_concurrency_of_nothing_is_refused() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(InputError, match="1 or more; found 0"):
        next(client.batch(asked(1), concurrency=0))
