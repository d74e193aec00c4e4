"""The client: `AsyncClient` for asyncio programs, `Client` for all others. Same methods, same errors."""

from __future__ import annotations

import asyncio
import functools
import time
from types import TracebackType
from typing import Any, Unpack

import grpc

from headrace import client_wire
from headrace.client_status import async_statuses, statuses
from headrace.client_stream import AsyncGeneration, Generation, rpc_error
from headrace.request import Request, RequestOptions
from headrace.retry import DEFAULT_RETRY, Attempts, RetryPolicy
from headrace.target import Target, balanced, replicas
from headrace.types import Completion, ServerStatus
from headrace.v1 import decode_pb2_grpc

DEFAULT_TIMEOUT_S = 600.0


class _Settings:
    """What both clients are told."""

    def __init__(
        self,
        target: Target,
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        retry: RetryPolicy = DEFAULT_RETRY,
    ) -> None:
        """
        Args:
            target: `host:port`, several of them (balanced per call), or any gRPC name such as `dns:///decode:50051`.
            timeout_s: the deadline of a call that states none, retries included; None sets none.
            retry: how often a call that found no replica is tried again.

        Raises:
            InputError: the target is empty, lacks a port or cannot be resolved.
        """
        self._target = target
        self._endpoint = balanced(target)
        self._timeout_s = timeout_s
        self._retry = retry

    def _attempts(self, timeout_s: float | None) -> Attempts:
        return Attempts(self._retry, self._timeout_s if timeout_s is None else timeout_s)


class AsyncClient(_Settings):
    """Talks to one or more decode services. Opens its channel on first use; close it, or use `async with`."""

    def generate(
        self, prompt: str | None = None, *, timeout_s: float | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncGeneration:
        """Streams an answer: `async for chunk in client.generate("…", max_tokens=64)`.

        Exactly one of prompt, `messages` and `token_ids` is given. After the last chunk, `.header` and `.result` tell
        what the answer was made with and what it took. The call starts with the first iteration.

        Raises:
            InvalidRequest: the request is wrong in itself; the message names the field.
        """
        request = client_wire.generate_request(Request(prompt, **options))
        return AsyncGeneration(
            lambda remaining_s: self._decode.Generate(request, timeout=remaining_s), self._attempts(timeout_s)
        )

    async def complete(
        self, prompt: str | None = None, *, timeout_s: float | None = None, **options: Unpack[RequestOptions]
    ) -> Completion:
        """Returns a whole answer. Cancelling the task cancels the call.

        Raises:
            CallError: the request is wrong or the call failed; UNAVAILABLE is retried first.
        """
        request = client_wire.complete_request(Request(prompt, **options))
        attempts = self._attempts(timeout_s)
        while True:
            try:
                return client_wire.completion(await self._decode.Complete(request, timeout=attempts.remaining_s()))
            except grpc.aio.AioRpcError as error:
                failure = rpc_error(error)
            await asyncio.sleep(attempts.pause_after(failure))

    async def status(self) -> tuple[ServerStatus, ...]:
        """Asks every replica, in the order of the target.

        Raises:
            CallError: a replica did not answer within 10 s; the message names it.
        """
        return await async_statuses(await asyncio.to_thread(replicas, self._target))

    async def close(self) -> None:
        """Closes the channel; calls still running are cancelled."""
        if "_channel" in self.__dict__:
            await self._channel.close()

    @functools.cached_property
    def _channel(self) -> Any:
        return grpc.aio.insecure_channel(self._endpoint.name, options=self._endpoint.options)

    @functools.cached_property
    def _decode(self) -> Any:
        return decode_pb2_grpc.DecodeServiceStub(self._channel)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Client(_Settings):
    """Talks to one or more decode services. May be shared by threads. Close it, or use `with`."""

    def generate(
        self, prompt: str | None = None, *, timeout_s: float | None = None, **options: Unpack[RequestOptions]
    ) -> Generation:
        """Streams an answer: `for chunk in client.generate("…", max_tokens=64)`.

        Exactly one of prompt, `messages` and `token_ids` is given. After the last chunk, `.header` and `.result` tell
        what the answer was made with and what it took. The call starts with the first iteration.

        Raises:
            InvalidRequest: the request is wrong in itself; the message names the field.
        """
        request = client_wire.generate_request(Request(prompt, **options))
        return Generation(
            lambda remaining_s: self._decode.Generate(request, timeout=remaining_s), self._attempts(timeout_s)
        )

    def complete(
        self, prompt: str | None = None, *, timeout_s: float | None = None, **options: Unpack[RequestOptions]
    ) -> Completion:
        """Returns a whole answer.

        Raises:
            CallError: the request is wrong or the call failed; UNAVAILABLE is retried first.
        """
        request = client_wire.complete_request(Request(prompt, **options))
        attempts = self._attempts(timeout_s)
        while True:
            try:
                return client_wire.completion(_unary(self._decode.Complete, request, attempts.remaining_s()))
            except grpc.RpcError as error:
                failure = rpc_error(error)
            time.sleep(attempts.pause_after(failure))

    def status(self) -> tuple[ServerStatus, ...]:
        """Asks every replica, in the order of the target.

        Raises:
            CallError: a replica did not answer within 10 s; the message names it.
        """
        return statuses(replicas(self._target))

    def close(self) -> None:
        """Closes the channel; calls still running are cancelled."""
        if "_channel" in self.__dict__:
            self._channel.close()

    @functools.cached_property
    def _channel(self) -> Any:
        return grpc.insecure_channel(self._endpoint.name, options=self._endpoint.options)

    @functools.cached_property
    def _decode(self) -> Any:
        return decode_pb2_grpc.DecodeServiceStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _unary(method: Any, request: Any, timeout_s: float | None) -> Any:
    """Calls, and cancels the call where the wait is interrupted."""
    call = method.future(request, timeout=timeout_s)
    try:
        return call.result()
    except BaseException:
        call.cancel()
        raise
