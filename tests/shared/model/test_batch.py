"""Flattened batches: positions, segments, and batches of some of the sequences."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.model.batch import Segment, TokenBatch

PARTS = st.lists(st.tuples(st.lists(st.integers(0, 99), min_size=1, max_size=6), st.integers(0, 9)), min_size=1)


def test_tokens_lie_one_after_the_other_and_positions_count_on_from_the_context() -> None:
    batch = TokenBatch.of([([7, 8, 9], 0), ([5], 40), ([1, 2], 3)])
    assert batch.token_ids.tolist() == [7, 8, 9, 5, 1, 2]
    assert batch.positions.tolist() == [0, 1, 2, 40, 3, 4]
    assert batch.segments == (Segment(0, 3, 0), Segment(3, 1, 40), Segment(4, 2, 3))
    assert [segment.total for segment in batch.segments] == [3, 41, 5]
    assert batch.last_rows.tolist() == [2, 3, 5]


@given(PARTS, st.data())
def test_keeping_the_first_tokens_of_some_sequences_is_a_batch_of_those_alone(
    parts: list[tuple[list[int], int]], data: st.DataObject
) -> None:
    batch = TokenBatch.of(parts)
    counts = [data.draw(st.integers(0, len(tokens))) for tokens, _ in parts]
    counts[data.draw(st.integers(0, len(parts) - 1))] = 1
    smaller, rows = batch.keep(counts)
    alone = TokenBatch.of(
        (tokens[:count], context) for (tokens, context), count in zip(parts, counts, strict=True) if count
    )
    assert smaller.segments == alone.segments
    assert torch.equal(smaller.token_ids, alone.token_ids)
    assert torch.equal(smaller.positions, alone.positions)
    assert torch.equal(batch.token_ids[rows], alone.token_ids)
