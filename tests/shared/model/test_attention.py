"""Attention of prompts: masks that a whole pass shares."""

from __future__ import annotations

import pytest
import torch

from shared.device import CPU
from shared.model.attention import ALIGNED_CHUNK, LONG_CONTEXT, ChunkMasks, additive_mask, first_seen, visible_in
from shared.model.spec import AttentionRule

QUERIES = torch.empty(0, dtype=torch.bfloat16)


@pytest.mark.parametrize("window", [None, 1, 100, 4000, 5000])
@pytest.mark.parametrize("heads_per_kv", [1, 3])
def test_every_chunk_has_the_mask_that_its_positions_ask_for(window: int | None, heads_per_kv: int) -> None:
    rule, longest = AttentionRule(scale=1.0, window=window), LONG_CONTEXT + 130
    masks = ChunkMasks(longest)
    for first in range(0, longest, ALIGNED_CHUNK):
        chunk = slice(first, first + ALIGNED_CHUNK)
        seen = slice(first_seen(rule, first), chunk.stop)
        keys = seen.stop - seen.start
        if heads_per_kv > 1 and keys > LONG_CONTEXT:
            continue  # their heads take turns
        expected = additive_mask(visible_in(rule, chunk, seen, CPU)[None], heads_per_kv, QUERIES.dtype)
        assert torch.equal(masks.of(rule, keys, heads_per_kv, QUERIES), expected)


def test_chunks_of_a_pass_share_one_mask() -> None:
    masks, rule = ChunkMasks(1000), AttentionRule(scale=1.0)
    memory = {masks.of(rule, keys, 3, QUERIES).untyped_storage().data_ptr() for keys in range(64, 1025, 64)}
    assert len(memory) == 1
