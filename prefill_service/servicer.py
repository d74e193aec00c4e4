"""The Prefill and Score RPCs: requests in, frames or scores out."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from headrace.v1 import logprobs_pb2, prefill_pb2, prefill_pb2_grpc
from prefill_service.scheduler import PromptJob, PromptScheduler
from shared.errors import InvalidRequestError, ModelMismatchError, UnavailableError
from shared.kv.handoff import Frame, KvLayout, prompt_tokens_error
from shared.logprobs import Scores
from shared.outlet import Outlet
from shared.request_fields import check_name, check_priority, check_top_logprobs
from shared.spool import Spool, SpooledOutlet
from shared.wire import (
    frame_to_wire,
    layout_from_wire,
    layout_to_wire,
    outcome_to_wire,
    score_outcome_to_wire,
    scores_to_wire,
)


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Validates a prompt or text, hands it to the scheduler, and streams what the engine makes of it."""

    def __init__(
        self,
        scheduler: PromptScheduler,
        spool: Spool,
        *,
        model_digest: str,
        layout: KvLayout,
        vocab_size: int,
        context_length: int,
    ) -> None:
        self._scheduler = scheduler
        self._spool = spool
        self._model_digest = model_digest
        self._layout = layout
        self._vocab_size = vocab_size
        self._context_length = context_length

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """See `protos/headrace/v1/prefill.proto`."""
        self._validate(request)
        self._layout.require(layout_from_wire(request.kv_layout), "the caller")
        job = PromptJob(
            request.request_id,
            list(request.token_ids),
            SpooledOutlet(self._spool),
            priority=request.priority,
            held_tokens=request.held_tokens,
            cache_salt=request.cache_salt,
            deadline_s=_deadline_s(context),
        )
        async with self._submitted(job) as items:
            yield self._header(request)
            async for item in items:
                yield frame_to_wire(item) if isinstance(item, Frame) else outcome_to_wire(item)

    async def Score(self, request: prefill_pb2.ScoreRequest, context: Any) -> AsyncIterator[prefill_pb2.ScoreResponse]:
        """See `protos/headrace/v1/prefill.proto`."""
        self._validate_score(request)
        job = PromptJob(
            request.request_id,
            list(request.token_ids),
            SpooledOutlet(self._spool),
            priority=request.priority,
            top_logprobs=request.top_logprobs,
            deadline_s=_deadline_s(context),
        )
        async with self._submitted(job) as items:
            yield self._score_header(request)
            async for item in items:
                yield scores_to_wire(item) if isinstance(item, Scores) else score_outcome_to_wire(item)

    @asynccontextmanager
    async def _submitted(self, job: PromptJob) -> AsyncIterator[Outlet[Any]]:
        """What the engine makes of a prompt; when the context is left nothing of it remains."""
        self._scheduler.submit(job)
        try:
            yield job.outlet
        finally:
            self._scheduler.cancel(job)
            job.outlet.drop(UnavailableError("nobody reads this stream any more"))

    def _validate(self, request: prefill_pb2.PrefillRequest) -> None:
        self._require_model(request.model_digest)
        check_name("cache_salt", request.cache_salt)
        self._validate_prompt(request)
        if request.held_tokens >= len(request.token_ids):
            raise InvalidRequestError(
                f"held_tokens is {request.held_tokens}, but the prompt has {len(request.token_ids)} tokens, of which "
                "the last is always computed; hold fewer"
            )

    def _validate_score(self, request: prefill_pb2.ScoreRequest) -> None:
        if request.model_digest:
            self._require_model(request.model_digest)
        self._validate_prompt(request)
        check_top_logprobs(request.top_logprobs)

    def _require_model(self, model_digest: str) -> None:
        if model_digest != self._model_digest:
            raise ModelMismatchError(
                f"this replica serves model {self._model_digest[:12]}…, the caller expects "
                f"{model_digest[:12] or 'none'}…; deploy one pack to both"
            )

    def _validate_prompt(self, request: prefill_pb2.PrefillRequest | prefill_pb2.ScoreRequest) -> None:
        if error := prompt_tokens_error(request.token_ids, self._vocab_size, self._context_length):
            raise InvalidRequestError(error)
        check_name("request_id", request.request_id)
        check_priority(request.priority)

    def _header(self, request: prefill_pb2.PrefillRequest) -> prefill_pb2.PrefillResponse:
        return prefill_pb2.PrefillResponse(
            header=prefill_pb2.PrefillHeader(
                request_id=request.request_id,
                model_digest=self._model_digest,
                kv_layout=layout_to_wire(self._layout),
                prompt_tokens=len(request.token_ids),
            )
        )

    def _score_header(self, request: prefill_pb2.ScoreRequest) -> prefill_pb2.ScoreResponse:
        return prefill_pb2.ScoreResponse(
            header=logprobs_pb2.ScoreHeader(
                request_id=request.request_id,
                model_digest=self._model_digest,
                prompt_tokens=len(request.token_ids),
                first_token_id=request.token_ids[0],
            )
        )


def _deadline_s(context: Any) -> float | None:
    left_s = context.time_remaining()
    return None if left_s is None else time.monotonic() + float(left_s)
