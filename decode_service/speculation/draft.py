"""What drafts do: propose tokens. Whatever they propose, the target alone decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from decode_service.sequence import Sequence

DraftKind = Literal["ngram", "self", "model"]


class Draft(Protocol):
    """Proposes how sequences may go on."""

    @property
    def kind(self) -> DraftKind:
        """Its name for people."""
        ...

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
        """Up to `counts[i]` tokens to follow `sequences[i]`; fewer, or none, where it has no idea."""
        ...


class Lookup(Draft, Protocol):
    """A draft that costs nothing, and finds something for some sequences only."""

    def certainty(self, sequence: Sequence) -> int:
        """How good the proposal for a sequence is to be taken for; acceptance is measured for each value apart."""
        ...


class ComputingDraft(Draft, Protocol):
    """A draft that takes passes of its own. Knows how to go on with any sequence."""

    def missing(self, sequence: Sequence) -> int:
        """Tokens of a sequence that it would have to take in before it can propose any; at least 1."""
        ...

    def warm(self, rows: int) -> None:
        """A pass over so many tokens of nobody, before any sequence has blocks."""
        ...

    def take_passes(self) -> list[tuple[int, float]]:
        """Tokens and seconds of each pass that it has taken since it was last asked."""
        ...


@dataclass(frozen=True)
class Drafts:
    """Where proposals come from: nowhere, a lookup that costs nothing, a model, or whichever of the two pays."""

    lookup: Lookup | None = None
    model: ComputingDraft | None = None
