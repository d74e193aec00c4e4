"""Paged storage of keys and values: one pool per model, addressed through block tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from shared.device import CPU, beside_arithmetic
from shared.model.attention import additive_mask, causal_attention, first_seen, grouped_attention, visible
from shared.model.batch import Segment
from shared.model.spec import AttentionRule, ModelSpec
from shared.tensors import aligned_buffer, from_bytes

BLOCK_TOKENS = 16
SHORT_SEGMENT = 32
"""Segments up to this many new tokens are attended together, padded; longer ones alone."""
QUERY_ROWS = 8
"""Query rows of a key/value head, those of a group's heads together, are padded to a multiple of this."""
MOST_PADDING = 2.0
"""Sequences share one attention call while padding at most doubles the keys read."""


class PagedKeyValues:
    """Keys and values of all layers in fixed-size blocks of 16 tokens."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, block_count: int, device: torch.device = CPU) -> None:
        self.device = device
        self.heads_per_kv = spec.heads // spec.kv_heads
        shape = (spec.layers, block_count * BLOCK_TOKENS, spec.kv_heads, spec.head_dim)
        self.keys, self.values = (_finite_memory(shape, dtype, device) for _ in range(2))
        if device == CPU:
            self._key_bytes, self._value_bytes = (_as_bytes(tensor) for tensor in (self.keys, self.values))

    @staticmethod
    def block_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
        """Bytes of one block over all layers, keys and values."""
        return 2 * spec.layers * BLOCK_TOKENS * spec.kv_size * dtype.itemsize

    def write(self, table: Sequence[int], layer: int, first_token: int, keys: bytes, values: bytes) -> None:
        """Stores received keys and values, [tokens, kv_heads, head_dim] each as little-endian bytes.

        Plain numpy on the calling thread: safe while the engine computes, since a table's blocks have one owner. On a
        device it is beside the arithmetic, for the same reason.
        """
        if self.device != CPU:
            return self._write_to_device(table, layer, first_token, keys, values)
        per_token = self._key_bytes.shape[-1]
        slots = token_slots(table, first_token, len(keys) // per_token)
        self._key_bytes[layer, slots] = np.frombuffer(keys, np.uint8).reshape(-1, per_token)
        self._value_bytes[layer, slots] = np.frombuffer(values, np.uint8).reshape(-1, per_token)

    def _write_to_device(self, table: Sequence[int], layer: int, first_token: int, keys: bytes, values: bytes) -> None:
        with torch.inference_mode(), beside_arithmetic(self.device):
            for stored, written in ((self.keys[layer], keys), (self.values[layer], values)):
                tokens = from_bytes(written, stored.dtype).view(-1, *stored.shape[1:])
                slots = torch.from_numpy(token_slots(table, first_token, len(tokens)))
                stored.index_copy_(0, slots.to(self.device), tokens.to(self.device))

    def for_pass(self, segments: Sequence[Segment], tables: Sequence[Sequence[int]]) -> PagedPass:
        """The view of one pass: each segment's sequence stores and reads through its own block table."""
        return PagedPass(self, segments, tables)


class PagedPass:
    """Keys and values as one pass sees them. Addresses are worked out once, not per layer."""

    def __init__(self, pool: PagedKeyValues, segments: Sequence[Segment], tables: Sequence[Sequence[int]]) -> None:
        self._pool = pool
        written = [token_slots(table, s.context, s.count) for s, table in zip(segments, tables, strict=True)]
        self._written = torch.from_numpy(np.concatenate(written)).to(pool.device)
        pairs = list(zip(segments, tables, strict=True))
        self._long = [
            (segment, torch.from_numpy(token_slots(table, 0, segment.total)).to(pool.device))
            for segment, table in pairs
            if segment.count > SHORT_SEGMENT
        ]
        short = [(segment, table) for segment, table in pairs if segment.count <= SHORT_SEGMENT]
        self._groups = [_Group(group, pool.heads_per_kv, pool.device) for group in _similar_lengths(short)]

    def parts(self, tokens: int) -> Sequence[slice]:
        """All tokens at once. See `shared.model.layers.KeyValues`."""
        return [slice(0, tokens)]

    def attend(self, layer: int, rule: AttentionRule, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Stores the new keys and values in their blocks and attends. See `shared.model.layers.KeyValues`."""
        layer_keys, layer_values = self._pool.keys[layer], self._pool.values[layer]
        layer_keys[self._written] = keys
        layer_values[self._written] = values
        attended = torch.empty_like(queries)
        for group in self._groups:
            group.attend(rule, layer_keys, layer_values, queries, attended)
        for segment, slots in self._long:
            first = first_seen(rule, segment.context)
            attended[segment.rows] = causal_attention(
                rule,
                queries[segment.rows],
                layer_keys[slots[first:]],
                layer_values[slots[first:]],
                segment.context - first,
            )
        return attended


class _Group:
    """Short segments attended in one call: queries padded to the longest chain, keys to the longest table.

    Keys are padded to whole blocks and query rows to a multiple of `QUERY_ROWS`: remainders, which kernels sum in
    another order, do not occur, so that a result hardly ever depends on chain lengths and neighbours.
    """

    def __init__(
        self, pairs: Sequence[tuple[Segment, Sequence[int]]], heads_per_kv: int, device: torch.device = CPU
    ) -> None:
        new = max(segment.count for segment, _ in pairs)
        starts, counts, contexts = (
            torch.tensor([getattr(segment, name) for segment, _ in pairs])[:, None]
            for name in ("start", "count", "context")
        )
        # Where chains are shorter, the last real query is repeated; the results are dropped.
        offsets = torch.minimum(torch.arange(new)[None], counts - 1)
        self._pairs = pairs
        self._heads_per_kv = heads_per_kv
        self._device = device
        rows = starts + offsets
        real = (torch.arange(new)[None] < counts).flatten().nonzero().flatten()
        self._positions = contexts + offsets
        self._rows, self._real, self._real_rows = (
            addresses.to(device) for addresses in (rows, real, rows.flatten()[real])
        )
        self._seen: dict[AttentionRule, tuple[Tensor, Tensor]] = {}

    def attend(
        self, rule: AttentionRule, layer_keys: Tensor, layer_values: Tensor, queries: Tensor, attended: Tensor
    ) -> None:
        if rule not in self._seen:
            self._seen[rule] = self._blocks_and_mask(rule, queries.dtype)
        blocks, mask = self._seen[rule]
        keys, values = (self._gather(tensor, blocks) for tensor in (layer_keys, layer_values))
        result = grouped_attention(rule, queries[self._rows], keys, values, mask)
        attended[self._real_rows] = result.flatten(0, 1)[self._real]

    def _blocks_and_mask(self, rule: AttentionRule, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The blocks that hold what each sequence sees, flattened, and the mask of their padded tokens."""
        firsts = [first_seen(rule, segment.context) // BLOCK_TOKENS for segment, _ in self._pairs]
        owns = [
            -(-segment.total // BLOCK_TOKENS) - first for (segment, _), first in zip(self._pairs, firsts, strict=True)
        ]
        tables = np.zeros((len(self._pairs), max(owns)), np.int64)
        for row, (_, table), first, own in zip(tables, self._pairs, firsts, owns, strict=True):
            row[:own] = table[first : first + own]
            row[own:] = row[0]  # padding repeats a block of its own: masked, but it must be finite
        key_positions = torch.tensor(firsts)[:, None, None] * BLOCK_TOKENS + torch.arange(max(owns) * BLOCK_TOKENS)
        seen = visible(rule, self._positions[:, :, None], key_positions)
        blocks = torch.from_numpy(tables).flatten().to(self._device)
        return blocks, additive_mask(seen.to(self._device), self._heads_per_kv, dtype, QUERY_ROWS)

    def _gather(self, layer: Tensor, blocks: Tensor) -> Tensor:
        """[sequences, padded tokens, kv_heads, head_dim]."""
        found: Tensor = layer.unflatten(0, (-1, BLOCK_TOKENS)).index_select(0, blocks)
        return found.view(len(self._rows), -1, *layer.shape[1:])


def token_slots(table: Sequence[int], first: int, count: int) -> np.ndarray:
    """Where tokens `first` to `first + count` of a sequence lie in the pool: int64 [count]."""
    positions = np.arange(first, first + count)
    blocks = np.asarray(table, np.int64)[positions // BLOCK_TOKENS]
    return blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS


def _similar_lengths(
    pairs: list[tuple[Segment, Sequence[int]]],
) -> Iterator[list[tuple[Segment, Sequence[int]]]]:
    """Splits segments, longest first, so that padding to the longest of a part stays bounded."""
    part: list[tuple[Segment, Sequence[int]]] = []
    for pair in sorted(pairs, key=lambda pair: -pair[0].total):
        real = sum(segment.total for segment, _ in part) + pair[0].total
        if part and part[0][0].total * (len(part) + 1) > MOST_PADDING * real:
            yield part
            part = []
        part.append(pair)
    if part:
        yield part


def _finite_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, whose pages count once they are touched: what is masked is multiplied by 0, and 0 × NaN is NaN."""
    if device != CPU:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    return aligned_buffer(math.prod(shape) * dtype.itemsize, lazily=True).view(dtype).view(*shape)


def _as_bytes(tensor: Tensor) -> np.ndarray:
    """The same memory as uint8 [layers, slots, bytes per token]."""
    return tensor.view(torch.uint8).flatten(2).numpy()
