"""Scores of a text: how likely each of its tokens was after those before it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from headrace.chat import Document, Message, Tool, Variables


class ScoreOptions(TypedDict, total=False):
    """What `score` takes besides the text. See `headrace.request.RequestOptions`."""

    messages: Sequence[Message] | None
    """A conversation, scored with everything that the model's chat template adds; instead of a text."""
    tools: Sequence[Tool]
    documents: Sequence[Document]
    template_variables: Variables
    token_ids: Sequence[int] | None
    """A text that is tokenized already; instead of a text."""
    top_logprobs: int
    """Report so many of the likeliest tokens at each place besides; 0 (default) to 20."""
    request_id: str
    priority: int


@dataclass(frozen=True, kw_only=True)
class Score:
    """A text's tokens, and what the model thought of each: natural logarithms of probabilities."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    """One for each token; None for the first, before which there is nothing."""
    top: tuple[tuple[tuple[int, float], ...], ...]
    """For each token, (token id, log-probability) of the likeliest in its place, `top_logprobs` many."""
    request_id: str
    model_digest: str
    queue_ms: float
    """Waiting for a pass."""
    compute_ms: float

    @property
    def total_logprob(self) -> float:
        """Of the text after its first token: what candidates of equal beginning are ranked by."""
        return math.fsum(logprob for logprob in self.logprobs if logprob is not None)

    @property
    def perplexity(self) -> float | None:
        """Over all tokens but the first; None for a text of one token."""
        return perplexity([self])


def perplexity(scores: Sequence[Score]) -> float | None:
    """Of several texts together, each token counting once; None where no token has a score."""
    tokens = sum(len(score.token_ids) - 1 for score in scores)
    return math.exp(-math.fsum(score.total_logprob for score in scores) / tokens) if tokens else None
