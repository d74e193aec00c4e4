"""A streamed answer: chunks as they come, then what it took. Once asynchronous, once not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import grpc

from headrace import client_wire
from headrace.errors import CallError, Cancelled, ServerError, call_error
from headrace.retry import Attempts
from headrace.types import Chunk, Header, Result
from headrace.v1 import decode_pb2

StartCall = Callable[[float | None], Any]
"""Starts the RPC with that timeout in seconds, and returns gRPC's own call."""


class _Answer:
    """What a stream has told so far, and whether its call may be tried again."""

    def __init__(self, start: StartCall, attempts: Attempts) -> None:
        self.header: Header | None = None
        """What the answer is made with; set before the first chunk."""
        self.result: Result | None = None
        """Why the answer ended and what it took; set once iteration has ended."""
        self._start = start
        self._attempts = attempts
        self._call: Any = None
        self._delivered = False
        self._closed = False

    def _ensure_call(self) -> Any:
        if self._closed:
            raise Cancelled("the call was closed")
        if self._call is None:
            self._call = self._start(self._attempts.remaining_s())
        return self._call

    def _take(self, event: decode_pb2.GenerateResponse) -> Chunk | None:
        """Keeps a header or a result; returns a chunk."""
        kind = event.WhichOneof("event")
        if kind == "chunk":
            self._delivered = True
            return client_wire.chunk(event.chunk)
        if kind == "header":
            self.header = client_wire.header(event.header)
        elif kind == "result":
            self.result = client_wire.result(event.result)
        return None

    def _end(self) -> None:
        self._closed = True
        if self.result is None:
            raise ServerError("the stream ended without a result; the answer may be incomplete", "INTERNAL")

    def _pause_after(self, failure: CallError) -> float:
        """Seconds until the next try; raises the failure where there is none."""
        self._call = None
        try:
            if self._delivered:
                raise failure
            return self._attempts.pause_after(failure)
        except CallError:
            self._closed = True
            raise

    def _cancel(self) -> None:
        self._closed = True
        if self._call is not None:
            self._call.cancel()


class AsyncGeneration(_Answer):
    """An answer on its way. Iterate it for its chunks; leaving its `async with` early cancels the call.

    Raises, while iterating:
        CallError: the call failed. UNAVAILABLE is retried as long as no chunk was delivered.
    """

    def __aiter__(self) -> AsyncGeneration:
        return self

    async def __anext__(self) -> Chunk:
        while not self._closed:
            event = await self._next_event()
            if event is grpc.aio.EOF:  # type: ignore[attr-defined]  # its stubs lack it
                self._end()
            elif (chunk := self._take(event)) is not None:
                return chunk
        raise StopAsyncIteration

    async def _next_event(self) -> Any:
        while True:
            try:
                return await self._ensure_call().read()
            except grpc.aio.AioRpcError as error:
                failure = rpc_error(error)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self._closed and not (task and task.cancelling()):
                    raise Cancelled("the call was closed") from None
                self._cancel()
                raise
            await asyncio.sleep(self._pause_after(failure))

    async def aclose(self) -> None:
        """Cancels the call unless it has ended; harmless after the end."""
        self._cancel()

    async def __aenter__(self) -> AsyncGeneration:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel()


class Generation(_Answer):
    """An answer on its way. Iterate it for its chunks; leaving its `with` early cancels the call.

    Raises, while iterating:
        CallError: the call failed. UNAVAILABLE is retried as long as no chunk was delivered.
    """

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> Chunk:
        while not self._closed:
            event = self._next_event()
            if event is None:
                self._end()
            elif (chunk := self._take(event)) is not None:
                return chunk
        raise StopIteration

    def _next_event(self) -> Any:
        """The next event; None at the end."""
        while True:
            try:
                return next(self._ensure_call(), None)
            except grpc.RpcError as error:
                failure = rpc_error(error)
            except BaseException:
                self._cancel()
                raise
            time.sleep(self._pause_after(failure))

    def close(self) -> None:
        """Cancels the call unless it has ended; harmless after the end. May be called from another thread."""
        self._cancel()

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel()


def rpc_error(error: Any) -> CallError:
    """gRPC's error as one of ours."""
    return call_error(error.code().name, error.details() or "no details given")
