"""What the model itself thought of the chosen tokens, before a request's wishes were applied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of probabilities at one place."""

    logprob: float
    """Of the token that was chosen."""
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability) of the likeliest tokens, the best first, of equals the lowest id first."""


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
