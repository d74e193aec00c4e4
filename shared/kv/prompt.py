"""Keys and values of a prefill pass: whole prompts, of which some may be in blocks already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kv.paged import BLOCK_TOKENS, PagedKeyValues, token_slots
from shared.model.attention import ALIGNED_CHUNK, aligned_attention
from shared.model.batch import Segment
from shared.model.spec import AttentionRule


@dataclass(frozen=True)
class _Prompt:
    """Where one prompt's keys and values lie."""

    segment: Segment
    read: Tensor
    """Slots of the tokens before the segment, int64 [context]."""
    written: Tensor
    """Slots of the segment's first tokens, int64: those that its blocks have room for."""


class PromptKeyValues:
    """Holds the current layer's keys and values of the pass's tokens, until the next layer replaces them.

    A prompt whose beginning lies in blocks of a pool reads it there; what it computes goes into the blocks that its
    table has besides. What a token comes to does not depend on any of this, to the last bit (`aligned_attention`).
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        pool: PagedKeyValues | None = None,
        tables: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Works out addresses, once for all layers.

        Args:
            pool: of blocks that outlive the pass.
            tables: each segment's blocks from its sequence's first token on, its context's at least.
        """
        self._pool = pool
        tables = [()] * len(segments) if tables is None else tables
        self._prompts = {s: _addresses(s, table) for s, table in zip(segments, tables, strict=True)}
        self.clear()

    def attend(self, layer: int, rule: AttentionRule, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Keeps the layer's keys and values, and attends within each prompt. See `shared.model.layers.KeyValues`."""
        self._layer, self._keys, self._values = layer, keys, values
        # All first: a prompt may read what another one of the same pass writes.
        for prompt in self._prompts.values():
            self._write(prompt)
        attended = torch.empty_like(queries)
        for segment, prompt in self._prompts.items():
            whole_keys, whole_values = self._tokens(prompt, 0, segment.total, -segment.total % ALIGNED_CHUNK)
            rows = segment.rows
            aligned_attention(rule, queries[rows], whole_keys, whole_values, segment.context, attended[rows])
        return attended

    def of(self, segment: Segment, first: int = 0, last: int | None = None) -> tuple[Tensor, Tensor]:
        """The layer's keys and values of a prompt's tokens `first` to `last`: [tokens, kv_heads, head_dim]."""
        return self._tokens(self._prompts[segment], first, segment.total if last is None else last, 0)

    def clear(self) -> None:
        """Lets go of the layer's keys and values: what computes the next ones has their memory."""
        self._layer = 0
        self._keys = self._values = torch.empty(0)

    def _write(self, prompt: _Prompt) -> None:
        if self._pool is not None and len(prompt.written):
            start = prompt.segment.start
            rows = slice(start, start + len(prompt.written))
            self._pool.keys[self._layer].index_copy_(0, prompt.written, self._keys[rows])
            self._pool.values[self._layer].index_copy_(0, prompt.written, self._values[rows])

    def _tokens(self, prompt: _Prompt, first: int, last: int, filling: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a range of tokens, with so many zeros behind them."""
        segment, read = prompt.segment, prompt.read[first:last]
        offset = segment.start - segment.context
        new = slice(offset + max(first, segment.context), offset + max(last, segment.context))
        if not (len(read) or filling):
            return self._keys[new], self._values[new]
        stored = (None, None) if self._pool is None else (self._pool.keys[self._layer], self._pool.values[self._layer])
        return (
            _joined(stored[0], read, self._keys[new], filling),
            _joined(stored[1], read, self._values[new], filling),
        )


def _addresses(segment: Segment, table: Sequence[int]) -> _Prompt:
    in_blocks = max(0, min(len(table) * BLOCK_TOKENS, segment.total) - segment.context)
    read, written = token_slots(table, 0, segment.context), token_slots(table, segment.context, in_blocks)
    return _Prompt(segment, torch.from_numpy(read), torch.from_numpy(written))


def _joined(stored: Tensor | None, read: Tensor, new: Tensor, filling: int) -> Tensor:
    """Stored tokens, new ones, and zeros: one tensor [tokens, kv_heads, head_dim]."""
    context = len(read)
    whole = new.new_empty(context + len(new) + filling, *new.shape[1:])
    if stored is not None and context:
        torch.index_select(stored, 0, read, out=whole[:context])
    whole[context : context + len(new)] = new
    whole[context + len(new) :] = 0
    return whole
