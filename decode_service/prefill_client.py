"""Calling prefill: on a replica that is not busy, and on another one when a call fails."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc

from decode_service.prefill_client_channel import OpenChannel, open_plain
from decode_service.replicas import SILENT_S, Replica, Replicas, Sample
from headrace.v1 import logprobs_pb2, prefill_pb2, prefill_pb2_grpc
from shared.errors import (
    CapacityError,
    DataLossError,
    DeadlineError,
    HeadraceError,
    InvalidRequestError,
    ModelMismatchError,
    UnavailableError,
)
from shared.kv.handoff import HandoffReceiver, KvLayout, PrefillOutcome
from shared.wire import frame_from_wire, layout_from_wire, layout_to_wire, outcome_from_wire

Answer = TypeVar("Answer")

ROUNDS = 3
"""How often every replica is tried before a request fails."""
FIRST_PAUSE_S = 0.1
"""Pause before the second round; doubled before each further one."""

_ERRORS: dict[grpc.StatusCode, type[HeadraceError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.FAILED_PRECONDITION: ModelMismatchError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: CapacityError,
    grpc.StatusCode.DATA_LOSS: DataLossError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
}
"""What a status of prefill means here; every other status makes the replica unavailable."""


class PrefillClient:
    """Computes prompts on whichever prefill replica answers."""

    def __init__(
        self,
        targets: Sequence[str],
        *,
        model_digest: str,
        layout: KvLayout,
        hidden_size: int,
        open_channel: OpenChannel = open_plain,
        sample: Sample = random.sample,
        silent_s: float = SILENT_S,
    ) -> None:
        """Prepares calls to all replicas that the gRPC targets stand for; they need not be up yet.

        Args:
            open_channel: opens the channel to a replica.
            sample: draws the replicas among which the least busy is chosen.
            silent_s: how long a call may bring nothing before its replica is asked whether it is alive.

        Raises:
            ConfigurationError: one of the texts is no target.
        """
        self._model_digest = model_digest
        self._layout = layout
        self._hidden_size = hidden_size
        self._replicas = Replicas(targets, sample=sample, open_channel=open_channel)
        self._silent_s = silent_s

    async def close(self) -> None:
        """Closes all channels."""
        await self._replicas.close()

    async def prefill(
        self,
        request_id: str,
        token_ids: list[int],
        store: Callable[[int, int, bytes, bytes], None],
        timeout_s: float | None,
        *,
        priority: int = 0,
        held_tokens: int = 0,
        cache_salt: str = "",
    ) -> PrefillOutcome:
        """Computes a prompt and stores its keys and values as they arrive.

        When a replica fails the prompt is computed again on another, from the beginning; nothing is stored any more
        once this has returned or raised.

        Args:
            store: called as store(layer, first_token, keys, values).
            timeout_s: what is left of the client's deadline.
            priority: -100 to 100; prompts of a higher one are computed first.
            held_tokens: leading tokens whose keys and values are here already; only what follows them is stored.
            cache_salt: replicas reuse keys and values only between prompts of the same salt.

        Raises:
            InvalidRequestError, ModelMismatchError, CapacityError, DataLossError: as prefill says.
            DeadlineError: the time is over.
            UnavailableError: no replica could compute it.
        """
        request = prefill_pb2.PrefillRequest(
            token_ids=token_ids,
            model_digest=self._model_digest,
            kv_layout=layout_to_wire(self._layout),
            request_id=request_id,
            priority=priority,
            held_tokens=held_tokens,
            cache_salt=cache_salt,
        )

        async def once(replica: Replica, left_s: float | None) -> PrefillOutcome:
            return await self._prefill_on(replica, request, store, left_s)

        return await self._somewhere(len(token_ids), timeout_s, once)

    async def score(
        self,
        request_id: str,
        token_ids: list[int],
        send: Callable[[logprobs_pb2.ScoreChunk], Awaitable[None]],
        timeout_s: float | None,
        *,
        top_logprobs: int = 0,
        priority: int = 0,
    ) -> logprobs_pb2.ScoreResult:
        """Scores a text. When a replica fails another one goes on where it stopped.

        Args:
            send: called with scores of consecutive tokens, each once and in order.
            timeout_s: what is left of the client's deadline.
            top_logprobs: how many of the likeliest tokens to report at each place.
            priority: -100 to 100; texts of a higher one are scored first.

        Raises:
            HeadraceError: as `prefill`.
        """
        request = prefill_pb2.ScoreRequest(
            token_ids=token_ids,
            top_logprobs=top_logprobs,
            request_id=request_id,
            priority=priority,
            model_digest=self._model_digest,
        )
        sent = 1  # the first token has no score

        async def send_new(chunk: logprobs_pb2.ScoreChunk) -> None:
            nonlocal sent
            end = chunk.first_token + len(chunk.token_ids)
            if end <= sent:
                return  # from another replica before
            in_order = (chunk.first_token, len(chunk.logprobs)) == (sent, len(chunk.token_ids))
            if not in_order or list(chunk.token_ids) != token_ids[sent:end]:
                raise DataLossError(f"scores out of order: expected those from token {sent} on")
            await send(chunk)
            sent = end

        async def once(replica: Replica, left_s: float | None) -> logprobs_pb2.ScoreResult:
            result = await self._score_on(replica, request, send_new, left_s)
            if sent != len(token_ids):
                raise DataLossError(f"scores ended after {sent} of {len(token_ids)} tokens")
            return result

        return await self._somewhere(len(token_ids), timeout_s, once)

    async def _score_on(
        self,
        replica: Replica,
        request: prefill_pb2.ScoreRequest,
        send: Callable[[logprobs_pb2.ScoreChunk], Awaitable[None]],
        timeout_s: float | None,
    ) -> logprobs_pb2.ScoreResult:
        call = prefill_pb2_grpc.PrefillServiceStub(replica.channel).Score(request, timeout=timeout_s)
        with _errors_of(replica, call, self._silent_s) as stream:
            async for response in stream:
                match response.WhichOneof("event"):
                    case "header":
                        self._check_digest(response.header.model_digest)
                    case "chunk":
                        await send(response.chunk)
                    case "result":
                        result: logprobs_pb2.ScoreResult = response.result
                        return result
            raise DataLossError("the stream of scores ended without a result")

    async def _somewhere(
        self, tokens: int, timeout_s: float | None, call: Callable[[Replica, float | None], Awaitable[Answer]]
    ) -> Answer:
        """Makes a call on one replica after another, until one answers it or refuses it for good."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        failure: HeadraceError = UnavailableError("no prefill replica is configured")
        for round_number in range(ROUNDS):
            if round_number:
                await _pause(FIRST_PAUSE_S * 2 ** (round_number - 1), deadline_s)
            try:
                untried = await self._replicas.known()
            except UnavailableError as error:
                failure = error
                continue
            full: _QueueFullError | None = None
            while untried:
                replica = await self._replicas.least_busy(untried)
                untried.remove(replica)
                try:
                    with replica.calling(tokens):
                        answer = await call(replica, _left_s(deadline_s))
                except _QueueFullError as error:
                    full = error
                except (InvalidRequestError, CapacityError, DeadlineError):
                    raise
                except ModelMismatchError as error:
                    failure = error
                    replica.mismatched(error)
                except HeadraceError as error:
                    failure = error
                    replica.failed(error)
                    self._replicas.look_again()
                else:
                    replica.succeeded()
                    return answer
            if full:
                raise full
        raise failure

    async def _prefill_on(
        self,
        replica: Replica,
        request: prefill_pb2.PrefillRequest,
        store: Callable[[int, int, bytes, bytes], None],
        timeout_s: float | None,
    ) -> PrefillOutcome:
        receiver = HandoffReceiver(self._layout, len(request.token_ids), store, request.held_tokens)
        call = prefill_pb2_grpc.PrefillServiceStub(replica.channel).Prefill(request, timeout=timeout_s)
        with _errors_of(replica, call, self._silent_s) as stream:
            async for response in stream:
                match response.WhichOneof("event"):
                    case "header":
                        self._check_header(request, response.header)
                    case "frame":
                        receiver.accept(frame_from_wire(response.frame))
                    case "result":
                        outcome = outcome_from_wire(response.result)
                        receiver.finish(outcome, self._hidden_size)
                        return outcome
            raise DataLossError("the prefill stream ended without a result")

    def _check_digest(self, model_digest: str) -> None:
        if model_digest != self._model_digest:
            raise ModelMismatchError(f"prefill answers with model {model_digest[:12]}…")

    def _check_header(self, request: prefill_pb2.PrefillRequest, header: prefill_pb2.PrefillHeader) -> None:
        """Confirms, before anything is stored, that this is the answer to our question."""
        self._check_digest(header.model_digest)
        self._layout.require(layout_from_wire(header.kv_layout), "prefill")
        if (header.request_id, header.prompt_tokens) != (request.request_id, len(request.token_ids)):
            raise DataLossError("prefill answers another request")


class _QueueFullError(CapacityError):
    """The replica has not begun; another one may."""


class _Stream:
    """The responses of a call, and whether there has been one."""

    def __init__(self, call: Any, replica: Replica, silent_s: float) -> None:
        self._call = call
        self._replica = replica
        self._silent_s = silent_s
        self.begun = False

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (response := await self._next()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
            self.begun = True
            yield response

    async def _next(self) -> Any:
        """The next response, however long it takes a replica that is alive."""
        coming = asyncio.ensure_future(self._call.read())
        try:
            while not (await asyncio.wait([coming], timeout=self._silent_s))[0]:
                if not await self._replica.is_alive(self._silent_s) and not coming.done():
                    raise UnavailableError(
                        f"prefill replica {self._replica.address} has said nothing for {self._silent_s:g} s, and does "
                        "not tell its status"
                    )
            return coming.result()
        finally:
            coming.cancel()


@contextmanager
def _errors_of(replica: Replica, call: Any, silent_s: float) -> Iterator[_Stream]:
    """Around reading a call: statuses become our errors, and whatever happens the call is over in the end."""
    stream = _Stream(call, replica, silent_s)
    try:
        yield stream
    except grpc.aio.AioRpcError as error:
        kind = _ERRORS.get(error.code(), UnavailableError)
        if kind is CapacityError and not stream.begun:
            kind = _QueueFullError
        raise kind(f"prefill replica {replica.address}: {error.details() or error.code().name}") from None
    finally:
        call.cancel()


def _left_s(deadline_s: float | None) -> float | None:
    if deadline_s is None:
        return None
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise DeadlineError("the deadline passed before a prefill replica had computed the prompt; allow more time")
    return left_s


async def _pause(pause_s: float, deadline_s: float | None) -> None:
    left_s = _left_s(deadline_s)
    await asyncio.sleep(pause_s if left_s is None else min(pause_s, left_s))
