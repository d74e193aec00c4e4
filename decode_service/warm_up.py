"""Passes before the first request: it should pay for nothing that is done once, and find costs known.

What is done once: memory touched for the first time, kernels chosen and compiled by number of rows, digests of streamed
layers compared. And the controller would otherwise have to try proposals on somebody's answer to learn what they cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from shared.kv.paged import BLOCK_TOKENS, PagedKeyValues
from shared.model.batch import TokenBatch
from shared.model.model import Model

WARM_UP_S = 3.0
"""Of one model, no pass but the first begins later than this. A pass that is streamed takes seconds, and about the same
for any number of rows, so that little is left to learn."""


@dataclass(frozen=True)
class MostRows:
    """How large passes become."""

    target: int
    """Rows of a pass of the target whose logits are needed."""
    draft: int
    """Rows of a pass of the draft's model: one for each sequence."""


def warm_up(
    run: Callable[[int], None],
    most_rows: int,
    learn: Callable[[int, float], None],
    clock_s: Callable[[], float] = time.monotonic,
) -> None:
    """Runs passes of 1, 2, 4, … rows for about `WARM_UP_S` at most, and one in any case.

    Args:
        run: a pass over so many rows.
        learn: told the rows and seconds of a pass; not of the first of its size, which does what is done once.
    """
    sizes = [1 << power for power in range(most_rows.bit_length())]
    once = [(rows, learned) for rows in sizes for learned in (False, True)]
    again = [(rows, True) for rows in reversed(sizes)]
    begun_s = started_s = clock_s()
    for rows, learned in once + again:
        run(rows)
        ended_s = clock_s()
        if learned:
            learn(rows, ended_s - started_s)
        if ended_s - begun_s >= WARM_UP_S:
            return
        started_s = ended_s


def run_pass(model: Model, kv: PagedKeyValues, rows: int) -> None:
    """A pass as decode has them, over sequences of one block at most, and a choice for each row.

    Nobody may own a block yet: keys and values are written to the first ones, one for each 16 rows.
    """
    lengths = [min(BLOCK_TOKENS, rows - start) for start in range(0, rows, BLOCK_TOKENS)]
    # Tokens that differ, since experts are read as tokens ask for them.
    batch = TokenBatch.of(([token % model.spec.vocab_size for token in range(length)], 0) for length in lengths)
    hidden = model.forward(batch, kv.for_pass(batch.segments, [[block] for block in range(len(lengths))]))
    for scores in model.logits(hidden).numpy():
        scores.argmax()
