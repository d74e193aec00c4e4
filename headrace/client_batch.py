"""Many requests at a time, from a program: outcomes in the order of the requests, and never more under way than stated.

For files, and for what must survive the end of the process, there is `headrace batch`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

from headrace.errors import CallError, InputError
from headrace.request import RequestOptions
from headrace.types import Completion

CONCURRENCY = 8
WINDOW = 4
"""Outcomes that wait for an earlier one are held, up to so many times the concurrency."""

Outcome = Completion | CallError


class BatchRequest(RequestOptions, total=False):
    """One request of a batch: what `complete` takes."""

    prompt: str | None
    """What to continue; or `messages` or `token_ids` instead."""


async def outcomes_async(
    complete: Callable[[BatchRequest], Coroutine[Any, Any, Completion]],
    requests: Iterable[BatchRequest],
    concurrency: int,
) -> AsyncGenerator[Outcome]:
    """Yields each request's answer, or its failure. Closed early, it cancels what is under way."""
    _require_positive(concurrency)
    room = asyncio.Semaphore(concurrency)
    under_way: deque[asyncio.Task[Outcome]] = deque()

    async def outcome(request: BatchRequest) -> Outcome:
        async with room:
            try:
                return await complete(request)
            except CallError as error:
                return error

    try:
        for request in requests:
            under_way.append(asyncio.create_task(outcome(request)))
            if len(under_way) >= WINDOW * concurrency:
                yield await under_way.popleft()
        while under_way:
            yield await under_way.popleft()
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


def outcomes(
    complete: Callable[[BatchRequest, Callable[[Any], None]], Completion],
    requests: Iterable[BatchRequest],
    concurrency: int,
) -> Generator[Outcome]:
    """Yields each request's answer, or its failure. Closed early, it cancels what is under way.

    Args:
        complete: answers a request, in any thread; hands each gRPC call that it starts to its second argument.
    """
    _require_positive(concurrency)
    calls = _Calls()
    under_way: deque[Future[Outcome]] = deque()

    def outcome(request: BatchRequest) -> Outcome:
        try:
            return complete(request, calls.add)
        except CallError as error:
            return error

    with ThreadPoolExecutor(concurrency, "headrace-batch") as threads, closing(calls):
        try:
            for request in requests:
                under_way.append(threads.submit(outcome, request))
                if len(under_way) >= WINDOW * concurrency:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()


class _Calls:
    """The calls of a batch, to be cancelled together."""

    def __init__(self) -> None:
        self._calls: set[Any] = set()
        self._closed = False

    def add(self, call: Any) -> None:
        """Takes a call; one that comes after the end is cancelled at once."""
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        if self._closed:
            call.cancel()

    def close(self) -> None:
        """Cancels those that run."""
        self._closed = True
        for call in tuple(self._calls):
            call.cancel()


def _require_positive(concurrency: int) -> None:
    if concurrency < 1:
        raise InputError(f"concurrency must be 1 or more; found {concurrency}")
