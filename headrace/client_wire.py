"""Between the client's types and protobuf."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from headrace.client_chat import chat_prompt
from headrace.errors import InvalidRequest
from headrace.request import Request
from headrace.types import (
    Chunk,
    Completion,
    FinishReason,
    Header,
    Result,
    ServerStatus,
    Stage,
    Timings,
    TokenLogprobs,
    Usage,
)
from headrace.v1 import decode_pb2, logprobs_pb2, status_pb2

MOST_REQUEST_BYTES = 4 << 20
"""What a service takes in one message; far more text than any context holds."""

AnyRequest = TypeVar(
    "AnyRequest", decode_pb2.GenerateRequest, decode_pb2.CompleteRequest, decode_pb2.ScorePromptRequest
)


def generate_request(request: Request) -> decode_pb2.GenerateRequest:
    """The message of the streaming call. Raises InvalidRequest when it is too large to travel."""
    return _fitting(decode_pb2.GenerateRequest(**_request_fields(request)))


def complete_request(request: Request) -> decode_pb2.CompleteRequest:
    """The message of the unary call. Raises InvalidRequest when it is too large to travel."""
    return _fitting(decode_pb2.CompleteRequest(**_request_fields(request)))


def score_request(request: Request) -> decode_pb2.ScorePromptRequest:
    """The message of the call that scores a text. Raises InvalidRequest when it is too large to travel."""
    return _fitting(
        decode_pb2.ScorePromptRequest(
            prompt=_prompt(request),
            top_logprobs=request.top_logprobs,
            request_id=request.request_id,
            priority=request.priority,
        )
    )


def _fitting(message: AnyRequest) -> AnyRequest:
    if message.ByteSize() > MOST_REQUEST_BYTES:
        raise InvalidRequest(
            f"the request has {message.ByteSize():,} bytes, at most {MOST_REQUEST_BYTES:,} travel; shorten the prompt"
        )
    return message


def _request_fields(request: Request) -> dict[str, Any]:
    return {
        "prompt": _prompt(request),
        "sampling": decode_pb2.Sampling(
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            min_p=request.min_p,
            repetition_penalty=request.repetition_penalty,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            logit_bias=request.logit_bias,
            bad_token_ids=request.bad_token_ids,
            seed=request.seed,
        ),
        "stopping": decode_pb2.Stopping(
            max_tokens=request.max_tokens,
            strings=request.stop_strings,
            token_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
            min_tokens=request.min_tokens,
        ),
        "request_id": request.request_id,
        "priority": request.priority,
        "cache_salt": request.cache_salt,
        "logprobs": request.logprobs,
        "top_logprobs": request.top_logprobs,
    }


def _prompt(request: Request) -> decode_pb2.Prompt:
    if request.messages is not None:
        return decode_pb2.Prompt(chat=chat_prompt(request))
    if request.token_ids is not None:
        return decode_pb2.Prompt(tokens=decode_pb2.TokenPrompt(ids=request.token_ids))
    assert request.prompt is not None  # a Request has exactly one form
    return decode_pb2.Prompt(text=request.prompt)


def chunk(message: decode_pb2.GenerationChunk) -> Chunk:
    """New text and tokens."""
    return Chunk(message.text, tuple(message.token_ids), _logprobs(message.logprobs))


def _logprobs(messages: Iterable[logprobs_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(place.logprob, tuple((other.token_id, other.logprob) for other in place.top))
        for place in messages
    )


def header(message: decode_pb2.GenerationHeader) -> Header:
    """What an answer is made with."""
    return Header(
        request_id=message.request_id,
        model_digest=message.model_digest,
        prompt_tokens=message.prompt_tokens,
        seed=message.seed,
    )


_FINISH_REASONS: Mapping[int, FinishReason] = {
    decode_pb2.FINISH_REASON_STOP: "stop",
    decode_pb2.FINISH_REASON_LENGTH: "length",
}


def result(message: decode_pb2.GenerationResult) -> Result:
    """Why an answer ended and what it took."""
    usage, timings = message.usage, message.timings
    return Result(
        finish_reason=_FINISH_REASONS[message.finish_reason],
        usage=Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            draft_tokens=usage.draft_tokens,
            accepted_tokens=usage.accepted_tokens,
            passes=usage.passes,
            cached_tokens=usage.cached_tokens,
        ),
        timings=Timings(
            queue_ms=timings.queue_ms,
            prefill_ms=timings.prefill_ms,
            prefill_compute_ms=timings.prefill_compute_ms,
            first_token_ms=timings.first_token_ms,
            decode_ms=timings.decode_ms,
        ),
    )


def completion(message: decode_pb2.CompleteResponse) -> Completion:
    """A whole answer."""
    made_with, ended = header(message.header), result(message.result)
    return Completion(
        text=message.text,
        token_ids=tuple(message.token_ids),
        finish_reason=ended.finish_reason,
        usage=ended.usage,
        timings=ended.timings,
        request_id=made_with.request_id,
        seed=made_with.seed,
        model_digest=made_with.model_digest,
        logprobs=_logprobs(message.logprobs),
    )


_STAGES: Mapping[int, Stage] = {status_pb2.STAGE_PREFILL: "prefill", status_pb2.STAGE_DECODE: "decode"}


def server_status(message: status_pb2.GetStatusResponse, address: str) -> ServerStatus:
    """Identity, load and totals of the process at that address."""
    return ServerStatus(
        address=address,
        stage=_STAGES[message.stage],
        model_digest=message.model_digest,
        scheme=message.scheme,
        context_length=message.context_length,
        queued=message.queued,
        running=message.running,
        passes=message.passes,
        batched_requests=message.batched_requests,
        streamed_bytes=message.streamed_bytes,
        prompt_tokens=message.prompt_tokens,
        generated_tokens=message.generated_tokens,
        draft_tokens=message.draft_tokens,
        accepted_tokens=message.accepted_tokens,
        resident_layers=message.resident_layers,
        layers=message.layers,
        budget_bytes=message.budget_bytes,
        peak_rss_bytes=message.peak_rss_bytes,
        kv_blocks_used=message.kv_blocks_used,
        kv_blocks=message.kv_blocks,
        kv_blocks_cached=message.kv_blocks_cached,
        cached_tokens=message.cached_tokens,
        preemptions=message.preemptions,
        draining=message.draining,
    )
