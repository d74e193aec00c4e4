"""The RPCs of decode: a request in, tokens out as they are accepted, or scores of a text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from decode_service.life import Life
from decode_service.prompts import Prompts
from decode_service.requests import RequestReader
from decode_service.scheduler import DecodeScheduler
from decode_service.scoring import Scoring
from decode_service.sequence import Sequence
from decode_service.text.output import Emission, FinishReason
from headrace.v1 import decode_pb2, decode_pb2_grpc
from shared.kv.handoff import PrefillOutcome
from shared.metrics import Telemetry
from shared.outlet import Outlet
from shared.wire import logprobs_to_wire

_FINISH_REASONS = {
    FinishReason.STOP: decode_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: decode_pb2.FINISH_REASON_LENGTH,
}


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Takes a request through its life: read, admit, prefill, generate, release."""

    def __init__(
        self,
        reader: RequestReader,
        scheduler: DecodeScheduler,
        prompts: Prompts,
        telemetry: Telemetry,
        model_digest: str,
        scoring: Scoring,
    ) -> None:
        self._reader = reader
        self._scheduler = scheduler
        self._prompts = prompts
        self._telemetry = telemetry
        self._model_digest = model_digest
        self._scoring = scoring

    async def Generate(
        self, request: decode_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[decode_pb2.GenerateResponse]:
        """See `protos/headrace/v1/decode.proto`."""
        async with self._generation(request, context) as (sequence, outcome):
            yield decode_pb2.GenerateResponse(header=self._header(sequence))
            finish = None
            async for emission in sequence.outlet:
                finish = emission.finish
                yield decode_pb2.GenerateResponse(
                    chunk=decode_pb2.GenerationChunk(
                        text=emission.text, token_ids=emission.token_ids, logprobs=logprobs_to_wire(emission.logprobs)
                    )
                )
            yield decode_pb2.GenerateResponse(result=self._result(sequence, outcome, finish))

    async def Complete(self, request: decode_pb2.CompleteRequest, context: Any) -> decode_pb2.CompleteResponse:
        """See `protos/headrace/v1/decode.proto`."""
        async with self._generation(request, context) as (sequence, outcome):
            emissions = [emission async for emission in sequence.outlet]
            return decode_pb2.CompleteResponse(
                header=self._header(sequence),
                text="".join(emission.text for emission in emissions),
                token_ids=[token for emission in emissions for token in emission.token_ids],
                result=self._result(sequence, outcome, emissions[-1].finish),
                logprobs=[logprobs for emission in emissions for logprobs in logprobs_to_wire(emission.logprobs)],
            )

    async def ScorePrompt(self, request: decode_pb2.ScorePromptRequest, context: Any) -> None:
        """See `protos/headrace/v1/decode.proto`."""
        await self._scoring.score(request, context.write, context.time_remaining())

    @asynccontextmanager
    async def _generation(
        self, request: decode_pb2.GenerateRequest | decode_pb2.CompleteRequest, context: Any
    ) -> AsyncIterator[tuple[Sequence, PrefillOutcome | None]]:
        """A sequence that generates while the context is open; its blocks are freed after."""
        life = Life(self._scheduler, self._prompts, context.time_remaining)
        sequence = await self._reader.read(request, Outlet[Emission](), life.on_admitted)
        outcome_label = "failed"
        self._scheduler.submit(sequence)
        try:
            outcome = await life.begin(sequence)
            sequence.prefilled_s = time.monotonic()
            self._telemetry.add(prompt_tokens=sequence.prompt_tokens, cached_tokens=sequence.cached_tokens)
            yield sequence, outcome
            outcome_label = "completed"
        except asyncio.CancelledError:
            outcome_label = "cancelled"
            raise
        finally:
            life.end()
            self._scheduler.leave(sequence)
            self._telemetry.record_request(outcome_label)

    def _header(self, sequence: Sequence) -> decode_pb2.GenerationHeader:
        return decode_pb2.GenerationHeader(
            request_id=sequence.request_id,
            model_digest=self._model_digest,
            prompt_tokens=sequence.prompt_tokens,
            seed=sequence.sampling.seed,
        )

    @staticmethod
    def _result(
        sequence: Sequence, outcome: PrefillOutcome | None, finish: FinishReason | None
    ) -> decode_pb2.GenerationResult:
        return decode_pb2.GenerationResult(
            finish_reason=_FINISH_REASONS[finish] if finish else decode_pb2.FINISH_REASON_UNSPECIFIED,
            usage=decode_pb2.Usage(
                prompt_tokens=sequence.prompt_tokens,
                completion_tokens=sequence.generated_tokens,
                draft_tokens=sequence.draft_tokens,
                accepted_tokens=sequence.accepted_tokens,
                passes=sequence.passes,
                cached_tokens=_cached_tokens(sequence, outcome),
            ),
            timings=decode_pb2.Timings(
                queue_ms=(sequence.admitted_s - sequence.arrived_s) * 1e3,
                prefill_ms=(sequence.prefilled_s - sequence.admitted_s) * 1e3,
                prefill_compute_ms=outcome.compute_ms if outcome else 0.0,
                first_token_ms=(sequence.first_token_s - sequence.arrived_s) * 1e3,
                decode_ms=(sequence.last_token_s - sequence.first_token_s) * 1e3,
            ),
        )


def _cached_tokens(sequence: Sequence, outcome: PrefillOutcome | None) -> int:
    """Leading prompt tokens that neither stage computed again."""
    return max(sequence.cached_tokens, outcome.cached_tokens if outcome else 0)
