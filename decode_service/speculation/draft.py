"""What every draft does: propose tokens. Whatever it proposes, the target alone decides."""

from __future__ import annotations

from typing import Protocol

from decode_service.sequence import Sequence


class Draft(Protocol):
    """Proposes how sequences may go on."""

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
        """Up to `counts[i]` tokens to follow `sequences[i]`; fewer, or none, where it has no idea."""
        ...


class NoDraft:
    """Proposes nothing: plain decoding."""

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
        """An empty proposal for each sequence."""
        return [[] for _ in sequences]
