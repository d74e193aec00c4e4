"""What the client returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]
"""`stop`: an end-of-sequence token, a stop token or a stop string. `length`: max_tokens or the end of the context."""

Stage = Literal["prefill", "decode"]


@dataclass(frozen=True)
class TokenLogprobs:
    """What the model thought at one place, before sampling options: natural logarithms of probabilities."""

    logprob: float
    """Of the token that was chosen."""
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability) of the likeliest tokens, the best first; as many as `top_logprobs` asked for."""


@dataclass(frozen=True)
class Chunk:
    """New tokens and the text they complete. Text may lag behind tokens (split characters, undecided stop strings)."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `token_ids` where the request asked for them."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """What an answer is made with."""

    request_id: str
    model_digest: str
    prompt_tokens: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    draft_tokens: int
    """Tokens that the draft proposed."""
    accepted_tokens: int
    """Proposed tokens that the model chose itself."""
    passes: int
    """Decode passes that the request took part in."""
    cached_tokens: int = 0
    """Leading prompt tokens that were not computed again: their keys and values were in a prefix cache."""


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Wall-clock times of one request, as decode saw them."""

    queue_ms: float
    prefill_ms: float
    prefill_compute_ms: float
    first_token_ms: float
    decode_ms: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """Why an answer ended and what it took."""

    finish_reason: FinishReason
    usage: Usage
    timings: Timings


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    request_id: str
    seed: int
    model_digest: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `token_ids` where the request asked for them."""


@dataclass(frozen=True, kw_only=True)
class ServerStatus:
    """Identity, load and totals since start of one service process."""

    address: str
    stage: Stage
    model_digest: str
    scheme: str
    context_length: int
    queued: int
    running: int
    passes: int
    batched_requests: int
    streamed_bytes: int
    prompt_tokens: int
    generated_tokens: int
    draft_tokens: int
    accepted_tokens: int
    resident_layers: int
    layers: int
    budget_bytes: int
    peak_rss_bytes: int
    kv_blocks_used: int
    kv_blocks: int
    kv_blocks_cached: int = 0
    """Kept for prompts to come, and given up when memory is needed."""
    cached_tokens: int = 0
    """Prompt tokens that were not computed again."""
    preemptions: int = 0
    """Sequences that gave their blocks up and were computed again."""
    draining: bool = False
    """Told to stop: it finishes what runs and takes nothing new."""
