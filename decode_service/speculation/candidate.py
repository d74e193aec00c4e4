"""A sequence that may bring draft tokens to the next pass, and what it brings. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from decode_service.sequence import Sequence


class Source(Enum):
    """Where a proposal comes from."""

    NOTHING = "nothing"
    LOOKUP = "lookup"
    MODEL = "model"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """What is possible."""

    sequence: Sequence
    room: int
    """Most tokens that may be proposed."""
    looked_up: int = 0
    """Tokens that a lookup has found, for nothing."""
    certainty: int = 0
    """How good they are to be taken for: acceptance is measured for each value apart."""
    missing: int = 0
    """Tokens that the draft's model would have to take in first, at least 1; 0: there is no such model."""

    @property
    def has_offer(self) -> bool:
        """Something can be proposed."""
        return bool(self.room and (self.looked_up or self.missing))


@dataclass(frozen=True)
class Choice:
    """What is done."""

    source: Source
    length: int


NOTHING = Choice(Source.NOTHING, 0)
