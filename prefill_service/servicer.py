"""The Prefill RPC: requests in, frames out."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from headrace.v1 import prefill_pb2, prefill_pb2_grpc
from prefill_service.scheduler import PromptJob, PromptScheduler
from shared.errors import InvalidRequestError, ModelMismatchError, UnavailableError
from shared.kv.handoff import Frame, KvLayout, PrefillOutcome, prompt_tokens_error
from shared.spool import Spool, SpooledOutlet
from shared.wire import frame_to_wire, layout_from_wire, layout_to_wire, outcome_to_wire

LONGEST_NAME = 128
"""Characters of a request's id and of its salt."""
MOST_PRIORITY = 100


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Validates a prompt, hands it to the scheduler, and streams what the engine makes of it."""

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
        outlet = SpooledOutlet[Frame | PrefillOutcome](self._spool)
        job = PromptJob(
            request.request_id,
            list(request.token_ids),
            outlet,
            priority=request.priority,
            held_tokens=request.held_tokens,
            cache_salt=request.cache_salt,
            deadline_s=None if (left_s := context.time_remaining()) is None else time.monotonic() + left_s,
        )
        self._scheduler.submit(job)
        try:
            yield self._header(request)
            async for item in outlet:
                yield frame_to_wire(item) if isinstance(item, Frame) else outcome_to_wire(item)
        finally:
            self._scheduler.cancel(job)
            outlet.drop(UnavailableError("nobody reads this stream any more"))

    def _validate(self, request: prefill_pb2.PrefillRequest) -> None:
        if request.model_digest != self._model_digest:
            raise ModelMismatchError(
                f"this replica serves model {self._model_digest[:12]}…, the caller expects "
                f"{request.model_digest[:12] or 'none'}…; deploy one pack to both"
            )
        self._layout.require(layout_from_wire(request.kv_layout), "the caller")
        if error := prompt_tokens_error(request.token_ids, self._vocab_size, self._context_length):
            raise InvalidRequestError(error)
        for name in ("request_id", "cache_salt"):
            if (length := len(getattr(request, name))) > LONGEST_NAME:
                raise InvalidRequestError(f"{name} has {length} characters; at most {LONGEST_NAME} are allowed")
        if abs(request.priority) > MOST_PRIORITY:
            raise InvalidRequestError(f"priority is {request.priority}; it must be from -100 to 100")
        if request.held_tokens >= len(request.token_ids):
            raise InvalidRequestError(
                f"held_tokens is {request.held_tokens}, but the prompt has {len(request.token_ids)} tokens, of which "
                "the last is always computed; hold fewer"
            )

    def _header(self, request: prefill_pb2.PrefillRequest) -> prefill_pb2.PrefillResponse:
        return prefill_pb2.PrefillResponse(
            header=prefill_pb2.PrefillHeader(
                request_id=request.request_id,
                model_digest=self._model_digest,
                kv_layout=layout_to_wire(self._layout),
                prompt_tokens=len(request.token_ids),
            )
        )
