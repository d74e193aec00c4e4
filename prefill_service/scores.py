"""Scores of a text, from what a pass came to: how likely each token was after those before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from shared.limits import SCORED_ROWS
from shared.logprobs import Scores, scores_of
from shared.model.model import Model


def scores_of_text(model: Model, token_ids: Sequence[int], hidden: Tensor, top: int) -> Iterator[Scores]:
    """Scores all tokens but the first, in chunks of `SCORED_ROWS`, each computed when it is asked for.

    Args:
        hidden: the last layer's output for every token, [tokens, hidden_size].
        top: how many of the likeliest tokens to report at each place.
    """
    for first in range(1, len(token_ids), SCORED_ROWS):
        scored = token_ids[first : first + SCORED_ROWS]
        logits = model.logits(hidden[first - 1 : first - 1 + len(scored)])
        yield scores_of(logits.numpy(), first, scored, top)
