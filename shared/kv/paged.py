"""Paged storage of keys and values: one pool per model, addressed through block tables."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.device import CPU, beside_arithmetic
from shared.model.attention import additive_mask, attention, causal_attention, first_seen, visible
from shared.model.batch import Segment
from shared.model.spec import AttentionRule, ModelSpec
from shared.tensors import aligned_buffer, from_bytes

BLOCK_TOKENS = 16
SHORT_SEGMENT = 32
"""Segments up to this many new tokens are attended together, padded; longer ones alone."""
QUERY_ROWS = 8
"""Query rows of a key/value head, those of a group's heads together, are padded to a multiple of this."""
GATHERED_BYTES = 4 << 20
"""Keys and values gathered for one attention call on a CPU: what its caches hold until they are read."""
MOST_PADDING = 2.0
"""Sequences share one attention call while padding at most doubles the keys read."""


class PagedKeyValues:
    """Keys and values of all layers in fixed-size blocks of 16 tokens.

    A block holds each head's tokens one behind the other, so that what attention gathers of a head is whole pieces of
    memory, and lies as its kernels read it.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, block_count: int, device: torch.device = CPU) -> None:
        self.device = device
        self.heads, self.kv_heads = spec.heads, spec.kv_heads
        shape = (spec.layers, block_count, 2, spec.kv_heads, BLOCK_TOKENS, spec.head_dim)
        stored = _finite_memory(shape, dtype, device)
        self.keys, self.values = stored.unbind(2)
        """[layers, blocks, kv_heads, block tokens, head_dim] each."""
        self._layers = [_LayerMemory.of(layer) for layer in stored]
        self._token_bytes = spec.kv_size * dtype.itemsize
        self.gathered_tokens = GATHERED_BYTES // (2 * self._token_bytes) if device == CPU else sys.maxsize
        """Of keys and values that attention gathers at once."""
        if device == CPU:
            self._head_bytes = stored.view(spec.layers, -1, spec.head_dim).view(torch.uint8).numpy()

    @staticmethod
    def block_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
        """Bytes of one block over all layers, keys and values."""
        return 2 * spec.layers * BLOCK_TOKENS * spec.kv_size * dtype.itemsize

    def rows(self, table: Sequence[int], first: int, count: int) -> Tensor:
        """Where tokens `first` to `first + count` lie, for `store` and `read`: int64 [count, kv_heads]."""
        return torch.from_numpy(token_rows(table, first, count, self.kv_heads)).to(self.device)

    def store(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores keys and values of tokens, [tokens, kv_heads, head_dim] each."""
        memory, places = self._layers[layer], rows.flatten()
        memory.keys.index_copy_(0, places, keys.reshape(-1, keys.shape[-1]))
        memory.values.index_copy_(0, places, values.reshape(-1, values.shape[-1]))

    def read(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Copies keys and values of tokens into contiguous memory, [tokens, kv_heads, head_dim] each."""
        memory, places = self._layers[layer], rows.flatten()
        torch.index_select(memory.keys, 0, places, out=keys.view(-1, keys.shape[-1]))
        torch.index_select(memory.values, 0, places, out=values.view(-1, values.shape[-1]))

    def pieces(self, tables: np.ndarray) -> Tensor:
        """Where each head's pieces of the blocks in equally long tables lie, for `gather`.

        Args:
            tables: int64 [sequences, blocks].

        Returns:
            int64 [keys or values, sequences, kv_heads, blocks].
        """
        which, heads = np.arange(2)[:, None, None, None], np.arange(self.kv_heads)[:, None]
        pieces = (2 * tables[:, None] + which) * self.kv_heads + heads
        return torch.from_numpy(pieces).to(self.device)

    def gather(self, layer: int, pieces: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of whole blocks: [sequences, kv_heads, tokens, head_dim] each."""
        found = self._layers[layer].pieces.index_select(0, pieces.flatten())
        keys, values = found.view(*pieces.shape[:3], -1, self.keys.shape[-1]).unbind(0)
        return keys, values

    def write(self, table: Sequence[int], layer: int, first_token: int, keys: bytes, values: bytes) -> None:
        """Stores received keys and values, [tokens, kv_heads, head_dim] each as little-endian bytes.

        Plain numpy on the calling thread: safe while the engine computes, since a table's blocks have one owner. On a
        device it is beside the arithmetic, for the same reason.
        """
        count = len(keys) // self._token_bytes
        if self.device != CPU:
            with torch.inference_mode(), beside_arithmetic(self.device):
                shape = (count, self.kv_heads, -1)
                received = (from_bytes(part, self.keys.dtype).view(shape).to(self.device) for part in (keys, values))
                self.store(layer, self.rows(table, first_token, count), *received)
            return
        rows = token_rows(table, first_token, count, self.kv_heads)
        for place, part in ((rows, keys), (rows + self.kv_heads * BLOCK_TOKENS, values)):
            self._head_bytes[layer, place] = np.frombuffer(part, np.uint8).reshape(*rows.shape, -1)

    def for_pass(self, segments: Sequence[Segment], tables: Sequence[Sequence[int]]) -> PagedPass:
        """The view of one pass: each segment's sequence stores and reads through its own block table."""
        return PagedPass(self, segments, tables)


@dataclass(frozen=True)
class _LayerMemory:
    """Views of a layer's memory, made once."""

    keys: Tensor
    """[rows, head_dim]: a row is what one token has in one head."""
    values: Tensor
    """The same memory from where a row's number is that of the values which belong to the keys."""
    pieces: Tensor
    """[pieces, block tokens × head_dim]: a piece is what one block has in one head."""

    @classmethod
    def of(cls, stored: Tensor) -> _LayerMemory:
        """Of a layer's blocks, [blocks, keys or values, kv_heads, block tokens, head_dim]."""
        rows = stored.view(-1, stored.shape[-1])
        return cls(rows, rows[stored.shape[2] * stored.shape[3] :], stored.view(len(rows) // BLOCK_TOKENS, -1))


class PagedPass:
    """Keys and values as one pass sees them. Addresses are worked out once, not per layer."""

    def __init__(self, pool: PagedKeyValues, segments: Sequence[Segment], tables: Sequence[Sequence[int]]) -> None:
        self._pool = pool
        pairs = list(zip(segments, tables, strict=True))
        new = [(table, position) for segment, table in pairs for position in range(segment.context, segment.total)]
        blocks = np.array([table[position // BLOCK_TOKENS] for table, position in new])
        written = _rows_in(blocks, np.array([position for _, position in new]), pool.kv_heads)
        self._written = torch.from_numpy(written).to(pool.device)
        self._long = [_Alone(pool, *pair) for pair in pairs if pair[0].count > SHORT_SEGMENT]
        short = [pair for pair in pairs if pair[0].count <= SHORT_SEGMENT]
        self._groups = [_Group(pool, group) for group in _similar_lengths(short, pool.gathered_tokens)]

    def parts(self, tokens: int) -> Sequence[slice]:
        """All tokens at once. See `shared.model.layers.KeyValues`."""
        return [slice(0, tokens)]

    def attend(self, layer: int, rule: AttentionRule, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Stores the new keys and values in their blocks and attends. See `shared.model.layers.KeyValues`."""
        self._pool.store(layer, self._written, keys, values)
        attended = queries.new_empty(queries.shape)
        heads = queries.reshape(-1, queries.shape[-1])
        for group in self._groups:
            group.attend(layer, rule, heads, attended.view(heads.shape))
        for alone in self._long:
            alone.attend(layer, rule, queries, attended)
        return attended


class _Alone:
    """A segment of many tokens, attended by itself."""

    def __init__(self, pool: PagedKeyValues, segment: Segment, table: Sequence[int]) -> None:
        self._pool = pool
        self._segment = segment
        self._pieces = pool.pieces(np.asarray(table, np.int64)[None])

    def attend(self, layer: int, rule: AttentionRule, queries: Tensor, attended: Tensor) -> None:
        segment, first = self._segment, first_seen(rule, self._segment.context)
        blocks = slice(first // BLOCK_TOKENS, -(-segment.total // BLOCK_TOKENS))
        tokens = slice(first - blocks.start * BLOCK_TOKENS, segment.total - blocks.start * BLOCK_TOKENS)
        gathered = self._pool.gather(layer, self._pieces[..., blocks])
        keys, values = (part[0, :, tokens].transpose(0, 1) for part in gathered)
        attended[segment.rows] = causal_attention(rule, queries[segment.rows], keys, values, segment.context - first)


class _Group:
    """Short segments attended in one call: query rows padded to the longest chain's, keys to the longest table.

    Keys are padded to whole blocks and query rows to a multiple of `QUERY_ROWS`: remainders, which kernels sum in
    another order, do not occur, so that a result hardly ever depends on chain lengths and neighbours. Query rows are
    picked where they lie, padding included, and results put there: nothing else is moved.
    """

    def __init__(self, pool: PagedKeyValues, pairs: Sequence[tuple[Segment, Sequence[int]]]) -> None:
        self._pool = pool
        self._pairs = pairs
        self._heads_per_kv = pool.heads // pool.kv_heads
        new = max(segment.count for segment, _ in pairs)
        starts, counts, contexts = np.array([(s.start, s.count, s.context) for s, _ in pairs]).T[:, :, None]
        # Where chains are shorter, the last real query is repeated; the results are dropped.
        offsets = np.minimum(np.arange(new), counts - 1)
        self._positions = torch.from_numpy(contexts + offsets)
        # The heads of a group are rows of the key/value head that they share, with all their queries one by one.
        row = np.arange(-(-self._heads_per_kv * new // QUERY_ROWS) * QUERY_ROWS)
        head, query = np.divmod(np.minimum(row, self._heads_per_kv * new - 1), new)
        heads = np.arange(pool.kv_heads)[:, None] * self._heads_per_kv + head
        rows = (starts + offsets)[:, None, query] * pool.heads + heads  # [sequences, kv_heads, rows]
        real = np.broadcast_to(((row < self._heads_per_kv * new) & (query < counts))[:, None], rows.shape)
        self._shape = rows.shape
        # Kernels leave results row by row, and the heads of a row beside each other.
        results = real.transpose(0, 2, 1).ravel().nonzero()[0]
        places = rows.transpose(0, 2, 1).ravel()[results]
        self._rows, self._results, self._places = (
            torch.from_numpy(addresses).to(pool.device) for addresses in (rows.ravel(), results, places)
        )
        self._seen: dict[AttentionRule, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, rule: AttentionRule, queries: Tensor, attended: Tensor) -> None:
        """Queries and what they come to: [tokens × heads, head_dim]."""
        if rule not in self._seen:
            self._seen[rule] = self._blocks_and_mask(rule, queries.dtype)
        pieces, mask = self._seen[rule]
        picked = queries.index_select(0, self._rows).view(*self._shape, -1)
        found = attention(rule, picked, *self._pool.gather(layer, pieces), mask)
        found = found.transpose(1, 2).reshape(-1, found.shape[-1])
        attended.index_copy_(0, self._places, found.index_select(0, self._results))

    def _blocks_and_mask(self, rule: AttentionRule, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Where the blocks lie that hold what each sequence sees, and the mask of their padded tokens."""
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
        mask = additive_mask(seen.to(self._pool.device), self._heads_per_kv, dtype, QUERY_ROWS)
        return self._pool.pieces(tables), mask


def token_rows(table: Sequence[int], first: int, count: int, kv_heads: int) -> np.ndarray:
    """Which rows of a layer's memory hold the keys of tokens `first` to `first + count`: int64 [count, kv_heads]."""
    positions = np.arange(first, first + count)
    return _rows_in(np.asarray(table, np.int64)[positions // BLOCK_TOKENS], positions, kv_heads)


def _rows_in(blocks: np.ndarray, positions: np.ndarray, kv_heads: int) -> np.ndarray:
    """The same for tokens of any sequences: their blocks and positions, int64 [tokens] each."""
    heads = 2 * blocks[:, None] * kv_heads + np.arange(kv_heads)
    rows: np.ndarray = heads * BLOCK_TOKENS + positions[:, None] % BLOCK_TOKENS
    return rows


def _similar_lengths(
    pairs: list[tuple[Segment, Sequence[int]]], most_tokens: int
) -> Iterator[list[tuple[Segment, Sequence[int]]]]:
    """Splits segments, longest first, so that the tokens of a part and its padding to the longest stay bounded."""
    part: list[tuple[Segment, Sequence[int]]] = []
    for pair in sorted(pairs, key=lambda pair: -pair[0].total):
        real = sum(segment.total for segment, _ in part) + pair[0].total
        padded = part[0][0].total * (len(part) + 1) if part else 0
        if padded > min(MOST_PADDING * real, most_tokens):
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
