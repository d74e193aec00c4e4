"""Brings drafts and controller together: what each sequence proposes in a pass, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence as AnySequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from decode_service.sequence import Sequence
from decode_service.speculation.candidate import Candidate, Choice, Source
from decode_service.speculation.controller import DraftController
from decode_service.speculation.draft import Drafts
from decode_service.warm_up import warm_up
from shared.draft_metrics import NO_DRAFT, DraftMetrics


@dataclass(frozen=True)
class _Tried:
    """The current pass of one sequence."""

    kind: str
    """Of the draft whose proposal it is."""
    looked_up: list[int]
    """Judged whatever was proposed: it costs nothing, and tells how good lookups are here."""
    certainty: int
    computed: list[int]
    """What the draft's model proposed."""


class Proposer:
    """Proposes, and learns from what is accepted. Used by the engine's thread."""

    def __init__(self, drafts: Drafts, controller: DraftController, metrics: DraftMetrics | None = None) -> None:
        self._drafts = drafts
        self._controller = controller
        self._metrics = metrics or DraftMetrics()
        self._tried: dict[Sequence, _Tried] = {}

    def propose(
        self, sequences: list[Sequence], rooms: AnySequence[int], beside: AnySequence[int] = ()
    ) -> list[list[int]]:
        """Draft tokens to follow each sequence in the next pass.

        Args:
            rooms: most tokens for each of them.
            beside: how many tokens each of the other sequences in that pass brings.
        """
        rooms = [max(0, min(room, self._controller.longest)) for room in rooms]
        lookup, model = self._drafts.lookup, self._drafts.model
        found = lookup.propose(sequences, rooms) if lookup else [[] for _ in sequences]
        certain = [
            lookup.certainty(sequence) if lookup and tokens else 0
            for sequence, tokens in zip(sequences, found, strict=True)
        ]
        candidates = [
            Candidate(
                sequence=sequence,
                room=room,
                looked_up=len(tokens),
                certainty=certainty,
                missing=model.missing(sequence) if model else 0,
            )
            for sequence, room, tokens, certainty in zip(sequences, rooms, found, certain, strict=True)
        ]
        choices = self._controller.choose(candidates, beside)
        computed = self._compute(sequences, choices)
        self._tried = {
            sequence: _Tried(self._kind(choice), tokens, certainty, computed.get(sequence, []))
            for sequence, choice, tokens, certainty in zip(sequences, choices, found, certain, strict=True)
        }
        proposals = [
            tokens[: choice.length] if choice.source is Source.LOOKUP else computed.get(sequence, [])
            for sequence, choice, tokens in zip(sequences, choices, found, strict=True)
        ]
        for choice, proposal in zip(choices, proposals, strict=True):
            self._metrics.record_proposal(self._kind(choice), len(proposal))
        return proposals

    def warm_up(self, rows_limit: int) -> None:
        """Passes of the draft's model before the first request, from which its costs are learned."""
        if self._drafts.model:
            warm_up(self._drafts.model.warm, rows_limit, self._controller.draft_passed)

    def verified(self, sequence: Sequence, chosen: AnySequence[int]) -> None:
        """The target's own choices after a sequence: as many as were accepted, and one more."""
        tried = self._tried.pop(sequence, None)
        if tried is None:
            return
        self._metrics.record_accepted(tried.kind, len(chosen) - 1)
        judged = ((Source.LOOKUP, tried.looked_up, tried.certainty), (Source.MODEL, tried.computed, 0))
        for source, tokens, certainty in judged:
            compared = min(len(tokens), len(chosen))
            self._controller.verified(sequence, source, compared, _agreed(tokens, chosen), certainty)

    def pass_s(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Expected seconds of the target's passes over so many tokens; 0 while nothing is known. Any thread."""
        return self._controller.pass_s(rows)

    def passed(self, rows: int, elapsed_s: float) -> None:
        """The target's pass over so many tokens took that long."""
        self._controller.passed(rows, elapsed_s)

    def _compute(self, sequences: list[Sequence], choices: list[Choice]) -> dict[Sequence, list[int]]:
        """What the draft's model proposes, for those that it is asked for."""
        counts = {
            sequence: choice.length
            for sequence, choice in zip(sequences, choices, strict=True)
            if choice.source is Source.MODEL
        }
        if not counts or self._drafts.model is None:
            return {}
        proposals = self._drafts.model.propose(list(counts), list(counts.values()))
        for rows, elapsed_s in self._drafts.model.take_passes():
            self._controller.draft_passed(rows, elapsed_s)
            self._metrics.record_pass(elapsed_s)
        return dict(zip(counts, proposals, strict=True))

    def _kind(self, choice: Choice) -> str:
        used = {Source.LOOKUP: self._drafts.lookup, Source.MODEL: self._drafts.model}.get(choice.source)
        return used.kind if used else NO_DRAFT


def _agreed(tokens: AnySequence[int], chosen: AnySequence[int]) -> int:
    """Leading tokens that are the same."""
    return next(
        (place for place, (ours, theirs) in enumerate(zip(tokens, chosen, strict=False)) if ours != theirs),
        min(len(tokens), len(chosen)),
    )
