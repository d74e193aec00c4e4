"""Paged keys and values: every block table reads back what was written through it, and nothing of anybody else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shared.kv.paged import BLOCK_TOKENS, SHORT_SEGMENT, PagedKeyValues, token_rows
from shared.model.batch import TokenBatch
from shared.model.spec import ModelSpec
from shared.tensors import to_bytes

BLOCKS = 64
SPEC = ModelSpec(
    hidden_size=32,
    intermediate_size=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    vocab_size=100,
    context_length=512,
    norm_epsilon=1e-5,
    rope_theta=1e4,
    tied_embeddings=True,
)

TABLES = st.permutations(range(BLOCKS)).map(lambda order: order[: BLOCKS // 2])


@given(TABLES, st.data())
def test_rows_are_where_the_table_says(table: list[int], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(table) * BLOCK_TOKENS))
    count = data.draw(st.integers(0, len(table) * BLOCK_TOKENS - first))
    expected = [
        [((2 * table[token // BLOCK_TOKENS] * 3) + head) * BLOCK_TOKENS + token % BLOCK_TOKENS for head in range(3)]
        for token in range(first, first + count)
    ]
    assert token_rows(table, first, count, kv_heads=3).tolist() == expected


@settings(deadline=None)
@given(TABLES, st.integers(0, 40), st.integers(1, 60), st.sampled_from([torch.float32, torch.bfloat16]))
def test_what_is_written_lies_in_its_blocks_and_nothing_else_changes(
    table: list[int], first: int, count: int, dtype: torch.dtype
) -> None:
    pool = PagedKeyValues(SPEC, dtype, BLOCKS)
    keys, values = (random_heads(count, SPEC.kv_heads, seed).to(dtype) for seed in (1, 2))
    pool.write(table, 1, first, to_bytes(keys), to_bytes(values))
    expected = torch.zeros(2, 2, BLOCKS, BLOCK_TOKENS, SPEC.kv_heads, SPEC.head_dim, dtype=dtype)
    for token in range(first, first + count):
        for written, part in zip(expected, (keys, values), strict=True):
            written[1, table[token // BLOCK_TOKENS], token % BLOCK_TOKENS] = part[token - first]
    for stored, written in zip((pool.keys, pool.values), expected, strict=True):
        assert torch.equal(stored.transpose(2, 3), written)


def test_received_and_computed_keys_and_values_are_the_same_to_a_pass() -> None:
    """A prompt that came as bytes is continued as one that was computed here."""
    count, new = 37, 3
    keys, values = random_heads(count + new, SPEC.kv_heads, 1), random_heads(count + new, SPEC.kv_heads, 2)
    queries = random_heads(count + new, SPEC.heads, 3)
    computed, received = PagedKeyValues(SPEC, torch.float32, BLOCKS), PagedKeyValues(SPEC, torch.float32, BLOCKS)
    attend(computed, [(0, count)], [[9, 4, 11]], queries[:count], keys[:count], values[:count])
    for first, last in ((0, 16), (16, 30), (30, count)):
        received.write([7, 1, 3], 0, first, to_bytes(keys[first:last]), to_bytes(values[first:last]))
    found = [
        attend(pool, [(count, new)], [table], queries[count:], keys[count:], values[count:])
        for pool, table in ((computed, [9, 4, 11]), (received, [7, 1, 3]))
    ]
    assert torch.equal(*found)
    assert_close(found[0], reference(queries, keys, values)[count:])


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 70), st.integers(1, SHORT_SEGMENT + 10)), min_size=1, max_size=7),
    st.permutations(range(BLOCKS)),
)
def test_each_sequence_sees_its_own_tokens_only(parts: list[tuple[int, int]], free: list[int]) -> None:
    """Lengths and blocks are arbitrary, and everything that belongs to nobody in the pass is NaN."""
    pool = PagedKeyValues(SPEC, torch.float32, BLOCKS)
    tables, queries, keys, values, expected = [], [], [], [], []
    for seed, (context, new) in enumerate(parts):
        total = context + new
        tables.append([free.pop() for _ in range(-(-total // BLOCK_TOKENS))])
        sequence = [random_heads(total, heads, 10 * seed + i) for i, heads in enumerate((SPEC.heads, 2, 2))]
        for new_tokens, part in zip((queries, keys, values), sequence, strict=True):
            new_tokens.append(part[context:])
        if context:
            pool.write(tables[-1], 0, 0, to_bytes(sequence[1][:context]), to_bytes(sequence[2][:context]))
        expected.append(reference(*sequence)[context:])
    for layer_tensor in (pool.keys[0], pool.values[0]):
        layer_tensor[free] = torch.nan
    found = attend(pool, parts, tables, *map(torch.cat, (queries, keys, values)))
    assert_close(found, torch.cat(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sequences_too_many_to_be_gathered_at_once_are_attended_some_at_a_time(dtype: torch.dtype) -> None:
    """Each comes to what it comes to alone, in whichever part it is."""
    spec = replace(SPEC, head_dim=512)
    contexts, new, blocks = (500, 180, 500, 170, 500, 500, 175), 2, 32
    pool = PagedKeyValues(spec, dtype, blocks * len(contexts))
    assert sum(contexts) > 2 * pool.gathered_tokens
    tables = [list(range(first, pool.keys.shape[1], len(contexts))) for first in range(len(contexts))]
    sequences = [
        [random_heads(context + new, heads, 10 * seed + i, 512).to(dtype) for i, heads in enumerate((SPEC.heads, 2, 2))]
        for seed, context in enumerate(contexts)
    ]
    for table, context, (_, keys, values) in zip(tables, contexts, sequences, strict=True):
        pool.write(table, 0, 0, to_bytes(keys[:context]), to_bytes(values[:context]))
    parts = [(context, new) for context in contexts]
    tails = [[part[-new:] for part in sequence] for sequence in sequences]
    together = attend(pool, parts, tables, *(torch.cat(part) for part in zip(*tails, strict=True)))
    for part, table, tail, found in zip(parts, tables, tails, together.split(new), strict=True):
        assert torch.equal(attend(pool, [part], [table], *tail), found)


def test_a_block_costs_what_it_holds() -> None:
    pool = PagedKeyValues(SPEC, torch.bfloat16, 3)
    assert pool.keys.nbytes + pool.values.nbytes == 3 * PagedKeyValues.block_bytes(SPEC, torch.bfloat16)


def test_a_table_that_is_too_short_is_refused() -> None:
    pool = PagedKeyValues(SPEC, torch.float32, BLOCKS)
    keys = to_bytes(random_heads(17, SPEC.kv_heads, 0))
    with pytest.raises(IndexError):
        pool.write([5], 0, 0, keys, keys)


def attend(
    pool: PagedKeyValues,
    parts: Sequence[tuple[int, int]],
    tables: Sequence[Sequence[int]],
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Layer 0 of a pass over parts of (context, new tokens)."""
    segments = TokenBatch.of(([0] * new, context) for context, new in parts).segments
    return pool.for_pass(segments, tables).attend(0, SPEC.attention_rules[0], queries, keys, values)


def reference(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of one whole sequence in float64, head by head."""
    group = queries.shape[1] // keys.shape[1]
    wide_keys, wide_values = (t.double().repeat_interleave(group, dim=1) for t in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries.double(), wide_keys) / queries.shape[2] ** 0.5
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, wide_values)


def random_heads(tokens: int, heads: int, seed: int, head_dim: int = SPEC.head_dim) -> Tensor:
    """float32 [tokens, heads, head_dim]."""
    return torch.randn(tokens, heads, head_dim, generator=torch.Generator().manual_seed(seed))


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert (found.double() - expected).abs().max() <= 1e-5
