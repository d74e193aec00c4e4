"""What the model itself thinks of tokens, before a request's wishes are applied. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of probabilities at one place."""

    logprob: float
    """Of the token that stands there."""
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability) of the likeliest tokens, the best first, of equals the lowest id first."""


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of consecutive tokens, each given all before it; compact, since long texts have many."""

    first_token: int
    """Position of the first of them."""
    token_ids: tuple[int, ...]
    logprobs: bytes
    """float32 [tokens]."""
    top_ids: bytes
    """int32 [tokens, top]."""
    top_logprobs: bytes
    """float32 [tokens, top]."""

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.payload))

    @property
    def payload(self) -> tuple[bytes, bytes, bytes]:
        """What may wait on disk (`shared.spool`)."""
        return self.logprobs, self.top_ids, self.top_logprobs

    def with_payload(self, payload: Sequence[bytes]) -> Scores:
        """The same tokens with other bytes."""
        logprobs, top_ids, top_logprobs = payload
        return replace(self, logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs)

    def places(self) -> Iterator[TokenLogprobs]:
        """One for each token."""
        count = len(self.token_ids)
        logprobs = np.frombuffer(self.logprobs, np.float32).tolist()
        ids = np.frombuffer(self.top_ids, np.int32).reshape(count, -1).tolist()
        tops = np.frombuffer(self.top_logprobs, np.float32).reshape(count, -1).tolist()
        for logprob, row_ids, row_logprobs in zip(logprobs, ids, tops, strict=True):
            yield TokenLogprobs(logprob, tuple(zip(row_ids, row_logprobs, strict=True)))


@dataclass(frozen=True)
class ScoreOutcome:
    """What ends a text's scores: where the time went."""

    queue_ms: float
    compute_ms: float
    batch_prompts: int
    batch_tokens: int


def token_logprobs(logits: NDArray[np.float32], token_ids: Sequence[int], top: int) -> tuple[TokenLogprobs, ...]:
    """Log-softmax of unprocessed logits, at chosen tokens and at the likeliest ones.

    Args:
        logits: [rows, vocabulary], one row for each token at least.
        token_ids: the token chosen from each row.
        top: how many of the likeliest to report for each; 0 for none.
    """
    return tuple(_of_row(row, token_id, top) for row, token_id in zip(logits, token_ids, strict=False))


def _of_row(logits: NDArray[np.float32], token_id: int, top: int) -> TokenLogprobs:
    shifted = logits - logits.max()
    logprobs = shifted - np.float32(np.log(np.exp(shifted).sum()))
    likeliest = [(int(other), float(logprobs[other])) for other in _likeliest(logprobs, top)]
    return TokenLogprobs(float(logprobs[token_id]), tuple(likeliest))


def _likeliest(logprobs: NDArray[np.float32], top: int) -> NDArray[np.intp]:
    top = min(top, logprobs.size)
    if not top:
        return np.empty(0, dtype=np.intp)
    cutoff = np.partition(logprobs, logprobs.size - top)[logprobs.size - top]
    candidates = np.flatnonzero(logprobs >= cutoff)
    return candidates[np.argsort(-logprobs[candidates], kind="stable")][:top]


def scores_of(logits: NDArray[np.float32], first_token: int, token_ids: Sequence[int], top: int) -> Scores:
    """Scores of consecutive tokens.

    Args:
        logits: [tokens, vocabulary], after the token before each.
        first_token: position of the first.
        top: how many of the likeliest to report for each; 0 for none.
    """
    places = token_logprobs(logits, token_ids, top)
    return Scores(
        first_token,
        tuple(token_ids),
        np.array([place.logprob for place in places], np.float32).tobytes(),
        np.array([[token_id for token_id, _ in place.top] for place in places], np.int32).tobytes(),
        np.array([[logprob for _, logprob in place.top] for place in places], np.float32).tobytes(),
    )
