"""The tokens of one pass: many sequences, flattened without padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segment:
    """The tokens of one sequence inside a batch: rows `start` to `start + count`, after `context` earlier tokens."""

    start: int
    count: int
    context: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.count)

    @property
    def last_row(self) -> int:
        return self.start + self.count - 1

    @property
    def total(self) -> int:
        """Length of the sequence once this segment is computed."""
        return self.context + self.count


@dataclass(frozen=True)
class TokenBatch:
    """Flattened tokens, their positions, and which sequence each belongs to."""

    token_ids: Tensor
    """int64 [tokens]."""
    positions: Tensor
    """int64 [tokens], counted from 0 in each sequence."""
    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, parts: Iterable[tuple[Sequence[int], int]]) -> TokenBatch:
        """From (new tokens, length of the context before them), one pair per sequence."""
        tokens: list[int] = []
        positions: list[Tensor] = []
        segments: list[Segment] = []
        for new_tokens, context in parts:
            segments.append(Segment(len(tokens), len(new_tokens), context))
            tokens.extend(new_tokens)
            positions.append(torch.arange(context, context + len(new_tokens)))
        return cls(torch.tensor(tokens, dtype=torch.int64), torch.cat(positions), tuple(segments))

    def keep(self, counts: Sequence[int]) -> tuple[TokenBatch, Tensor]:
        """A batch of the first tokens of each segment, and the rows [tokens kept] that they had here.

        Args:
            counts: how many tokens of each segment are kept; without any, the segment is dropped.
        """
        kept = [(segment, count) for segment, count in zip(self.segments, counts, strict=True) if count]
        rows = torch.cat([torch.arange(segment.start, segment.start + count) for segment, count in kept])
        segments, start = [], 0
        for segment, count in kept:
            segments.append(Segment(start, count, segment.context))
            start += count
        return TokenBatch(self.token_ids[rows], self.positions[rows], tuple(segments)), rows

    @property
    def last_rows(self) -> Tensor:
        """The row of each sequence's last token, int64 [segments]."""
        return torch.tensor([segment.last_row for segment in self.segments])
