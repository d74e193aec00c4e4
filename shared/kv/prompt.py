"""Keys and values of a prefill pass: whole prompts, of which some may be in blocks already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from shared.kv.paged import BLOCK_TOKENS, PagedKeyValues
from shared.model.attention import ALIGNED_CHUNK, PART_TOKENS, ChunkMasks, aligned_attention
from shared.model.batch import Segment
from shared.model.spec import AttentionRule


@dataclass(frozen=True)
class _Prompt:
    """Where one prompt's keys and values lie."""

    segment: Segment
    read: Tensor
    """Where the tokens before the segment lie, int64 [tokens, kv_heads]: those not put before the pass's own."""
    written: Tensor
    """Where the segment's first tokens go, those that its blocks have room for: int64 [tokens, kv_heads]."""


class PromptKeyValues:
    """Holds the current layer's keys and values of the pass's tokens, until the next layer replaces them.

    A prompt whose beginning lies in blocks of a pool reads it there; what it computes goes into the blocks that its
    table has besides. What a token comes to does not depend on any of this, to the last bit (`aligned_attention`).

    What the first prompt reads is put before its own tokens, so that a long prompt, which has a pass of its own, is
    never there twice. What another prompt reads is put together with its own tokens while these attend.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        pool: PagedKeyValues | None = None,
        tables: Sequence[Sequence[int]] | None = None,
        part_tokens: int = PART_TOKENS,
    ) -> None:
        """Works out addresses, once for all layers.

        Args:
            pool: of blocks that outlive the pass.
            tables: each segment's blocks from its sequence's first token on, its context's at least.
            part_tokens: most tokens that attend at once, a multiple of `ALIGNED_CHUNK`.
        """
        self._pool = pool
        self._part_tokens = part_tokens
        tables = [()] * len(segments) if tables is None else tables
        self._prompts = {s: _addresses(s, table, pool) for s, table in zip(segments, tables, strict=True)}
        first = self._prompts[segments[0]]
        self._before = first.read
        """Where that lies which is put before the pass's own tokens, int64 [tokens, kv_heads]."""
        self._prompts[segments[0]] = replace(first, read=first.read[:0])
        self._masks = ChunkMasks(max(segment.total for segment in segments))
        self.clear()

    def parts(self, tokens: int) -> Sequence[slice]:
        """So many at a time, cut where chunks of attention are. See `shared.model.layers.KeyValues`."""
        parts, start = [], 0
        for cut, following in pairwise([*self._cuts(), tokens]):
            if following - start > self._part_tokens:
                parts.append(slice(start, cut))
                start = cut
        return [*parts, slice(start, tokens)]

    def attend(self, layer: int, rule: AttentionRule, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Keeps the layer's keys and values, and attends within each prompt. See `shared.model.layers.KeyValues`."""
        self._layer = layer
        part = self._keep(keys, values)
        shares = [(segment, within) for segment in self._prompts if (within := _overlap(segment, part))]
        # All first: a prompt may read what another one of the same pass writes.
        for segment, within in shares:
            self._write(self._prompts[segment], within)
        before = len(self._before)
        if self._pool is not None and before and not part.start:
            self._pool.read(layer, self._before, self._keys[:before], self._values[:before])
        attended = torch.empty_like(queries)
        for segment, within in shares:
            last = segment.context + within.stop
            whole_keys, whole_values = self._tokens(self._prompts[segment], 0, last, -last % ALIGNED_CHUNK)
            rows = slice(segment.start + within.start - part.start, segment.start + within.stop - part.start)
            context = segment.context + within.start
            aligned_attention(rule, queries[rows], whole_keys, whole_values, context, attended[rows], self._masks)
        return attended

    def of(self, segment: Segment, first: int = 0, last: int | None = None) -> tuple[Tensor, Tensor]:
        """The layer's keys and values of a prompt's tokens `first` to `last`: [tokens, kv_heads, head_dim]."""
        return self._tokens(self._prompts[segment], first, segment.total if last is None else last, 0)

    def clear(self) -> None:
        """Lets go of the layer's keys and values: what computes the next ones has their memory."""
        self._layer = self._kept = 0
        self._keys = self._values = torch.empty(0)

    def _cuts(self) -> Iterator[int]:
        """Rows before which a part may end: where a prompt begins, or one of its chunks of attention does."""
        for segment in self._prompts:
            yield segment.start
            first = segment.start + (-segment.context % ALIGNED_CHUNK or ALIGNED_CHUNK)
            yield from range(first, segment.start + segment.count, ALIGNED_CHUNK)

    def _keep(self, keys: Tensor, values: Tensor) -> slice:
        """Puts a part's keys and values behind those of the parts before it, and returns its rows."""
        tokens = max(segment.start + segment.count for segment in self._prompts)
        start = self._kept % tokens  # after the last part comes the next layer
        part, before = slice(start, start + len(keys)), len(self._before)
        if len(keys) == tokens and not before:
            self._keys, self._values = keys, values
        else:
            if not start:
                # Zeros: attention reads a little behind what is there, masked, but it must be finite.
                shape = (before + tokens + ALIGNED_CHUNK, *keys.shape[1:])
                self._keys, self._values = keys.new_zeros(shape), values.new_zeros(shape)
            rows = slice(before + part.start, before + part.stop)
            self._keys[rows], self._values[rows] = keys, values
        self._kept = part.stop
        return part

    def _write(self, prompt: _Prompt, within: slice) -> None:
        """Puts the keys and values of some of a prompt's tokens, counted from its first new one, into its blocks."""
        written = prompt.written[within]
        if self._pool is not None and len(written):
            start = len(self._before) + prompt.segment.start + within.start
            rows = slice(start, start + len(written))
            self._pool.store(self._layer, written, self._keys[rows], self._values[rows])

    def _tokens(self, prompt: _Prompt, first: int, last: int, filling: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a range of tokens, with so many zeros behind them."""
        context, read = len(prompt.read), prompt.read[first:last]
        # Where its first token is, or would be.
        offset = len(self._before) + prompt.segment.start - prompt.segment.context
        new = slice(offset + max(first, context), offset + max(last, context))
        kept = len(self._before) + self._kept
        if not len(read) and (not filling or kept == new.stop <= len(self._keys) - filling):
            # Zeros are there already, since nothing is behind these tokens.
            filled = slice(new.start, new.stop + filling)
            return self._keys[filled], self._values[filled]
        found, end = len(read), len(read) + new.stop - new.start
        keys, values = (kept.new_empty(end + filling, *kept.shape[1:]) for kept in (self._keys, self._values))
        if self._pool is not None and found:
            self._pool.read(self._layer, read, keys[:found], values[:found])
        for joined, own in ((keys, self._keys), (values, self._values)):
            joined[found:end] = own[new]
            joined[end:] = 0
        return keys, values


def _overlap(segment: Segment, part: slice) -> slice | None:
    """Which of a segment's tokens are among the rows of a part, counted from its first one."""
    start, stop = max(segment.start, part.start), min(segment.start + segment.count, part.stop)
    return slice(start - segment.start, stop - segment.start) if start < stop else None


def _addresses(segment: Segment, table: Sequence[int], pool: PagedKeyValues | None) -> _Prompt:
    if pool is None:
        nowhere = torch.empty(0, 0, dtype=torch.int64)
        return _Prompt(segment, nowhere, nowhere)
    in_blocks = max(0, min(len(table) * BLOCK_TOKENS, segment.total) - segment.context)
    return _Prompt(segment, pool.rows(table, 0, segment.context), pool.rows(table, segment.context, in_blocks))
