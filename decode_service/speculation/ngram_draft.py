"""Prompt lookup as a draft: free, and strong on text that quotes its input."""

from __future__ import annotations

from typing import Literal
from weakref import WeakKeyDictionary

from decode_service.sequence import Sequence
from decode_service.speculation.ngram import NgramIndex


class NgramDraft:
    """Proposes what followed the same n-gram earlier in the sequence."""

    kind: Literal["ngram"] = "ngram"

    def __init__(self) -> None:
        self._indexes: WeakKeyDictionary[Sequence, NgramIndex] = WeakKeyDictionary()

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
        """See `Draft`. Indexes what is new in each sequence first."""
        return [self._index(sequence).propose(count) for sequence, count in zip(sequences, counts, strict=True)]

    def certainty(self, sequence: Sequence) -> int:
        """See `Lookup`: how many tokens match."""
        return self._index(sequence).matched()

    def _index(self, sequence: Sequence) -> NgramIndex:
        index = self._indexes.setdefault(sequence, NgramIndex())
        index.extend(sequence.tokens[len(index) :])
        return index
