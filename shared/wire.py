"""Domain values ↔ protobuf messages, for what both services exchange."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.v1 import kv_cache_pb2, logprobs_pb2, prefill_pb2
from shared.errors import ModelMismatchError
from shared.kv.handoff import Frame, KvLayout, PrefillOutcome
from shared.logprobs import ScoreOutcome, Scores, TokenLogprobs

_DTYPES = {"bf16": kv_cache_pb2.KV_DTYPE_BF16, "fp32": kv_cache_pb2.KV_DTYPE_FP32}
_DTYPE_NAMES = {value: name for name, value in _DTYPES.items()}


def layout_to_wire(layout: KvLayout) -> kv_cache_pb2.KvLayout:
    return kv_cache_pb2.KvLayout(
        dtype=_DTYPES[layout.dtype],
        order=kv_cache_pb2.KV_ORDER_TOKEN_HEAD_DIM,
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
    )


def layout_from_wire(message: kv_cache_pb2.KvLayout) -> KvLayout:
    """Raises ModelMismatchError for a dtype or order that this version does not know."""
    if message.order != kv_cache_pb2.KV_ORDER_TOKEN_HEAD_DIM or message.dtype not in _DTYPE_NAMES:
        raise ModelMismatchError(
            f"KV layout has dtype {message.dtype} and order {message.order}; this version knows dtypes "
            f"{sorted(_DTYPE_NAMES)} and order {kv_cache_pb2.KV_ORDER_TOKEN_HEAD_DIM}"
        )
    return KvLayout(_DTYPE_NAMES[message.dtype], message.layers, message.kv_heads, message.head_dim)


def frame_to_wire(frame: Frame) -> prefill_pb2.PrefillResponse:
    # Filled in place: a message that is given to another one's constructor is copied twice on its way.
    response = prefill_pb2.PrefillResponse()
    message = response.frame
    message.sequence_number = frame.sequence_number
    message.layer = frame.layer
    message.first_token = frame.first_token
    message.token_count = frame.token_count
    message.keys, message.values = frame.keys, frame.values
    message.crc32 = frame.crc32
    return response


def frame_from_wire(message: kv_cache_pb2.KvFrame) -> Frame:
    return Frame(
        message.sequence_number,
        message.layer,
        message.first_token,
        message.token_count,
        message.keys,
        message.values,
        message.crc32,
    )


def outcome_to_wire(outcome: PrefillOutcome) -> prefill_pb2.PrefillResponse:
    return prefill_pb2.PrefillResponse(
        result=prefill_pb2.PrefillResult(
            last_hidden=outcome.last_hidden,
            frame_count=outcome.frame_count,
            queue_ms=outcome.queue_ms,
            compute_ms=outcome.compute_ms,
            batch_prompts=outcome.batch_prompts,
            batch_tokens=outcome.batch_tokens,
            cached_tokens=outcome.cached_tokens,
        )
    )


def outcome_from_wire(message: prefill_pb2.PrefillResult) -> PrefillOutcome:
    return PrefillOutcome(
        message.last_hidden,
        message.frame_count,
        message.queue_ms,
        message.compute_ms,
        message.batch_prompts,
        message.batch_tokens,
        message.cached_tokens,
    )


def logprobs_to_wire(places: Iterable[TokenLogprobs]) -> list[logprobs_pb2.TokenLogprobs]:
    return [
        logprobs_pb2.TokenLogprobs(
            logprob=place.logprob,
            top=[logprobs_pb2.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in place.top],
        )
        for place in places
    ]


def scores_to_wire(scores: Scores) -> prefill_pb2.ScoreResponse:
    return prefill_pb2.ScoreResponse(
        chunk=logprobs_pb2.ScoreChunk(
            first_token=scores.first_token, token_ids=scores.token_ids, logprobs=logprobs_to_wire(scores.places())
        )
    )


def score_outcome_to_wire(outcome: ScoreOutcome) -> prefill_pb2.ScoreResponse:
    return prefill_pb2.ScoreResponse(
        result=logprobs_pb2.ScoreResult(
            queue_ms=outcome.queue_ms,
            compute_ms=outcome.compute_ms,
            batch_prompts=outcome.batch_prompts,
            batch_tokens=outcome.batch_tokens,
        )
    )
