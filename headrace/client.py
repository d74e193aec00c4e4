"""The client: `AsyncClient` for asyncio programs, `Client` for all others. Same methods, same errors.

The examples here, as in `headrace.types`, are executed by a test, against a service whose model knows little."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping
from types import TracebackType
from typing import Any, Unpack

import grpc

from headrace import client_wire
from headrace.client_batch import CONCURRENCY, BatchRequest, Outcome, outcomes, outcomes_async
from headrace.client_channel import open_async_channel, open_channel
from headrace.client_score import score, score_async
from headrace.client_status import async_statuses, statuses
from headrace.client_stream import AsyncGeneration, Generation, rpc_error
from headrace.errors import Cancelled
from headrace.request import Request, RequestOptions
from headrace.retry import DEFAULT_RETRY, Attempts, RetryPolicy
from headrace.score import Score, ScoreOptions
from headrace.target import Target, balanced, name_of, replicas
from headrace.tls import Tls, metadata_of
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
        tls: Tls | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            target: `host:port`, several of them (balanced per call), or any gRPC name such as `dns:///decode:50051`.
            timeout_s: the deadline of a call that states none, retries included; None sets none.
            retry: how often a call that found no replica is tried again.
            tls: files of an encrypted channel; None: not encrypted.
            metadata: travels with every call, as in {"authorization": "Bearer …"}; names in lower case.

        Raises:
            InputError: the target is empty, lacks a port or cannot be resolved, or metadata cannot travel.
        """
        self._target = target
        self._endpoint = balanced(target)
        self._timeout_s = timeout_s
        self._retry = retry
        self._tls = tls.naming(name_of(target)) if tls else None
        self._metadata = metadata_of(metadata)

    def _attempts(self, timeout_s: float | None) -> Attempts:
        return Attempts(self._retry, self._timeout_s if timeout_s is None else timeout_s)


class AsyncClient(_Settings):
    """Talks to one or more decode services. Opens its channel on first use; close it, or use `async with`.

    >>> import asyncio
    >>> from headrace import AsyncClient
    >>> async def ask() -> None:
    ...     async with AsyncClient(target, timeout_s=60) as client:
    ...         async for chunk in client.generate("What is a headrace?", max_tokens=32):
    ...             print(chunk.text, end="")
    >>> asyncio.run(ask())
    A channel that leads water to a mill.
    """

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
            lambda remaining_s: self._decode.Generate(request, timeout=remaining_s, metadata=self._metadata),
            self._attempts(timeout_s),
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
                answer = await self._decode.Complete(request, timeout=attempts.remaining_s(), metadata=self._metadata)
                return client_wire.completion(answer)
            except grpc.aio.AioRpcError as error:
                failure = rpc_error(error)
            await asyncio.sleep(attempts.pause_after(failure))

    def batch(
        self, requests: Iterable[BatchRequest], *, concurrency: int = CONCURRENCY, timeout_s: float | None = None
    ) -> AsyncGenerator[Outcome]:
        """Answers many requests, so many at a time, and yields what came of each, in their order.

        A request that fails yields its CallError, and the others go on. `requests` is read as it is needed. Closing the
        generator early cancels what is under way.

        >>> async def ask() -> None:
        ...     async with AsyncClient(target) as client:
        ...         async for answer in client.batch([{"prompt": "What is silt?"}], concurrency=2):
        ...             print(answer.status if isinstance(answer, CallError) else answer.text)
        >>> asyncio.run(ask())
        Fine earth that water carries.

        Raises:
            InputError: the concurrency is less than 1.
        """

        async def complete(request: BatchRequest) -> Completion:
            return await self.complete(timeout_s=timeout_s, **request)

        return outcomes_async(complete, requests, concurrency)

    async def score(
        self, text: str | None = None, *, timeout_s: float | None = None, **options: Unpack[ScoreOptions]
    ) -> Score:
        """How likely each token of a text is after those before it; its perplexity.

        Exactly one of text, `messages` and `token_ids` is given. Cancelling the task cancels the call.

        Raises:
            CallError: the request is wrong or the call failed; FailedPrecondition where decode has no --prefill.
        """
        request = client_wire.score_request(Request(text, logprobs=True, **options))
        return await score_async(self._decode, request, self._attempts(timeout_s), self._metadata)

    async def status(self) -> tuple[ServerStatus, ...]:
        """Asks every replica, in the order of the target.

        Raises:
            CallError: a replica did not answer within 10 s; the message names it.
        """
        addresses = await asyncio.to_thread(replicas, self._target)
        return await async_statuses(addresses, self._tls, self._metadata)

    async def close(self) -> None:
        """Closes the channel; calls still running are cancelled."""
        if "_channel" in self.__dict__:
            await self._channel.close()

    @functools.cached_property
    def _channel(self) -> Any:
        return open_async_channel(self._endpoint, self._tls)

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
    """Talks to one or more decode services. May be shared by threads. Close it, or use `with`.

    >>> from headrace import Client
    >>> client = Client(target, timeout_s=60)
    >>> answer = client.complete(messages=[{"role": "user", "content": "What is a headrace?"}], max_tokens=32)
    >>> answer.text
    'A channel that leads water to a mill.'
    >>> answer.finish_reason, answer.usage.completion_tokens
    ('stop', 4)
    >>> client.close()
    """

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
            lambda remaining_s: self._decode.Generate(request, timeout=remaining_s, metadata=self._metadata),
            self._attempts(timeout_s),
        )

    def complete(
        self, prompt: str | None = None, *, timeout_s: float | None = None, **options: Unpack[RequestOptions]
    ) -> Completion:
        """Returns a whole answer.

        Raises:
            CallError: the request is wrong or the call failed; UNAVAILABLE is retried first.
        """
        return self._complete(Request(prompt, **options), timeout_s)

    def _complete(
        self, asked: Request, timeout_s: float | None, started: Callable[[Any], None] = lambda call: None
    ) -> Completion:
        request = client_wire.complete_request(asked)
        attempts = self._attempts(timeout_s)
        while True:
            try:
                call = self._decode.Complete.future(request, timeout=attempts.remaining_s(), metadata=self._metadata)
                started(call)
                return client_wire.completion(_result(call))
            except grpc.RpcError as error:
                failure = rpc_error(error)
            except grpc.FutureCancelledError:
                raise Cancelled("the call was closed") from None
            time.sleep(attempts.pause_after(failure))

    def batch(
        self, requests: Iterable[BatchRequest], *, concurrency: int = CONCURRENCY, timeout_s: float | None = None
    ) -> Generator[Outcome]:
        """Answers many requests, so many at a time, and yields what came of each, in their order.

        A request that fails yields its CallError, and the others go on. `requests` is read as it is needed. Closing the
        generator early, as leaving a loop does, cancels what is under way.

        >>> with Client(target) as client:
        ...     for answer in client.batch([{"prompt": "What is silt?"}, {"prompt": "", "max_tokens": 8}]):
        ...         print(answer.status if isinstance(answer, CallError) else answer.text)
        Fine earth that water carries.
        INVALID_ARGUMENT

        Raises:
            InputError: the concurrency is less than 1.
        """

        def complete(request: BatchRequest, started: Callable[[Any], None]) -> Completion:
            return self._complete(Request(**request), timeout_s, started)

        return outcomes(complete, requests, concurrency)

    def score(
        self, text: str | None = None, *, timeout_s: float | None = None, **options: Unpack[ScoreOptions]
    ) -> Score:
        """How likely each token of a text is after those before it; its perplexity.

        Exactly one of text, `messages` and `token_ids` is given.

        Raises:
            CallError: the request is wrong or the call failed; FailedPrecondition where decode has no --prefill.
        """
        request = client_wire.score_request(Request(text, logprobs=True, **options))
        return score(self._decode, request, self._attempts(timeout_s), self._metadata)

    def status(self) -> tuple[ServerStatus, ...]:
        """Asks every replica, in the order of the target.

        Raises:
            CallError: a replica did not answer within 10 s; the message names it.
        """
        return statuses(replicas(self._target), self._tls, self._metadata)

    def close(self) -> None:
        """Closes the channel; calls still running are cancelled."""
        if "_channel" in self.__dict__:
            self._channel.close()

    @functools.cached_property
    def _channel(self) -> Any:
        return open_channel(self._endpoint, self._tls)

    @functools.cached_property
    def _decode(self) -> Any:
        return decode_pb2_grpc.DecodeServiceStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _result(call: Any) -> Any:
    """Waits for a call, and cancels it where the wait is interrupted."""
    try:
        return call.result()
    except BaseException:
        call.cancel()
        raise
