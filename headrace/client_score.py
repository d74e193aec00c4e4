"""The call that scores a text, once asynchronous, once not."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc

from headrace.client_stream import rpc_error
from headrace.errors import ServerError
from headrace.retry import Attempts
from headrace.score import Score
from headrace.v1 import decode_pb2

Metadata = Any


class _Received:
    """What a stream of scores has told so far."""

    def __init__(self) -> None:
        self._header: Any = None
        self._result: Any = None
        self._token_ids: list[int] = []
        self._logprobs: list[float | None] = []
        self._top: list[tuple[tuple[int, float], ...]] = []

    def take(self, event: decode_pb2.ScorePromptResponse) -> None:
        match event.WhichOneof("event"):
            case "header":
                self._header = event.header
                self._add(event.header.first_token_id, None, ())
            case "chunk":
                for token_id, place in zip(event.chunk.token_ids, event.chunk.logprobs, strict=True):
                    self._add(token_id, place.logprob, tuple((other.token_id, other.logprob) for other in place.top))
            case "result":
                self._result = event.result

    def score(self) -> Score:
        """The whole. Raises ServerError where the stream has ended too early."""
        if self._result is None or len(self._token_ids) != self._header.prompt_tokens:
            raise ServerError("the stream of scores ended too early; some are missing", "INTERNAL")
        return Score(
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            top=tuple(self._top),
            request_id=self._header.request_id,
            model_digest=self._header.model_digest,
            queue_ms=self._result.queue_ms,
            compute_ms=self._result.compute_ms,
        )

    def _add(self, token_id: int, logprob: float | None, top: tuple[tuple[int, float], ...]) -> None:
        self._token_ids.append(token_id)
        self._logprobs.append(logprob)
        self._top.append(top)


async def score_async(
    decode: Any, request: decode_pb2.ScorePromptRequest, attempts: Attempts, metadata: Metadata
) -> Score:
    """Scores a text; UNAVAILABLE is tried again.

    Raises:
        CallError: the request is wrong or the call failed.
    """
    while True:
        received = _Received()
        call = decode.ScorePrompt(request, timeout=attempts.remaining_s(), metadata=metadata)
        try:
            async for event in call:
                received.take(event)
            return received.score()
        except grpc.aio.AioRpcError as error:
            failure = rpc_error(error)
        finally:
            call.cancel()
        await asyncio.sleep(attempts.pause_after(failure))


def score(decode: Any, request: decode_pb2.ScorePromptRequest, attempts: Attempts, metadata: Metadata) -> Score:
    """Scores a text; UNAVAILABLE is tried again.

    Raises:
        CallError: the request is wrong or the call failed.
    """
    while True:
        received = _Received()
        call = decode.ScorePrompt(request, timeout=attempts.remaining_s(), metadata=metadata)
        try:
            for event in call:
                received.take(event)
            return received.score()
        except grpc.RpcError as error:
            failure = rpc_error(error)
        finally:
            call.cancel()
        time.sleep(attempts.pause_after(failure))
