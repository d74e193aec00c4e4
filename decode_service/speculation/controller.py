"""What to draft with, and how many tokens: as many as pay.

A pass is expected to yield Σ (1 − aᵢᵏ⁺¹) / (1 − aᵢ) tokens, where sequence i brings k draft tokens of which each is
right with a chance of aᵢ (`estimates.expected_tokens`). It takes the passes of the draft's model, if that is asked, and
one pass of the target over all rows. The controller keeps running estimates of all of these and takes the plan with the
most tokens a second (`plans`).

What can be looked up is free and used first; the draft's model is asked where that brings more, by the same measure:
for the sequences without a lookup only, or also for those that it is expected to bring further. Zero is a choice. Costs
that were never measured are guessed from those that were, at first hopefully: so a length is tried once, and the
measurement decides from then on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as AnySequence
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import ArrayLike, NDArray

from decode_service.sequence import Sequence
from decode_service.speculation.candidate import NOTHING, Candidate, Choice, Source
from decode_service.speculation.estimates import (
    FIRST_ACCEPTANCE,
    Acceptance,
    Costs,
    Load,
    first_acceptance_of_match,
)
from decode_service.speculation.plans import Estimates, Plan, best_plan

PROBE_PASSES = 64
"""After this many passes without the draft's model it is tried again, since text changes; lookups are judged always.
After as many with proposals that promise little, one goes without: what a pass takes alone is to be known well then."""
PROBE_SHARE = 0.01
"""Of the time of all these passes, trying it may take no more than this; otherwise it has to wait."""

_Kind = tuple[Source, int]
"""A source, and how certain it was."""


class DraftController:
    """Chooses source and length of all proposals of each pass."""

    def __init__(self, shortest: int, longest: int, rows_limit: int) -> None:
        """Chooses between `shortest` and `longest` tokens; the same number twice fixes it.

        Args:
            rows_limit: most tokens whose logits a pass may need.
        """
        self.longest = longest
        """Most tokens of a proposal."""
        self._shortest = shortest
        self._rows_limit = rows_limit
        load = Load()
        self._draft_costs = Costs(load)
        self._pass_costs = Costs(load)
        self._overall: defaultdict[_Kind, Acceptance] = defaultdict(Acceptance)
        self._by_sequence: WeakKeyDictionary[Sequence, dict[_Kind, Acceptance]] = WeakKeyDictionary()
        self._idle_passes = 0
        self._idle_s = 0.0
        self._doubtful_passes = 0.0

    def choose(self, candidates: AnySequence[Candidate], beside: AnySequence[int] = ()) -> list[Choice]:
        """What each of these sequences brings to the next pass.

        Args:
            beside: how many tokens each of the other sequences in that pass brings.
        """
        offered = sum(candidate.has_offer for candidate in candidates)
        if not offered:
            return [NOTHING for _ in candidates]
        spare_rows = self._rows_limit - len(candidates) - len(beside)
        longest = max(0, min(self.longest, spare_rows // offered))
        lengths = range(min(self._shortest, longest), longest + 1)
        plan = best_plan(candidates, self._estimates(candidates), lengths, beside)
        if not longest or self._shortest == self.longest:
            return plan.choices
        if self._goes_without(plan):
            return [NOTHING for _ in candidates]
        return self._probing(candidates, plan.choices)

    def draft_passed(self, rows: int, elapsed_s: float) -> None:
        """A pass of the draft's model over so many tokens took that long."""
        self._draft_costs.add(rows, elapsed_s)

    def passed(self, rows: int, elapsed_s: float) -> None:
        """A pass of the target over so many tokens took that long."""
        self._pass_costs.add(rows, elapsed_s)
        self._idle_s += elapsed_s

    def pass_s(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Expected seconds of the target's passes over so many tokens; 0 while nothing is known. Any thread."""
        return self._pass_costs.of(rows)

    def verified(self, sequence: Sequence, source: Source, proposed: int, accepted: int, certainty: int = 0) -> None:
        """The target has judged the first tokens that a source proposed, or would have proposed."""
        if proposed:
            known, kind = self._by_sequence.setdefault(sequence, {}), (source, certainty)
            for acceptance in (known.setdefault(kind, Acceptance()), self._overall[kind]):
                acceptance.add(proposed, accepted)

    def _acceptance(self, sequence: Sequence, source: Source, certainty: int = 0) -> float:
        """That of the sequence; as far as little is known of it, that of all sequences."""
        kind = (source, certainty)
        prior = first_acceptance_of_match(certainty) if source is Source.LOOKUP else FIRST_ACCEPTANCE
        overall = self._overall[kind].rate(prior)
        own = self._by_sequence.get(sequence, {}).get(kind)
        return own.rate(overall) if own else overall

    def _estimates(self, candidates: AnySequence[Candidate]) -> Estimates:
        lookup = [self._acceptance(each.sequence, Source.LOOKUP, each.certainty) for each in candidates]
        model = [self._acceptance(each.sequence, Source.MODEL) for each in candidates]
        model_is_known = self._overall[Source.MODEL, 0].is_known and not self._draft_costs.unknown
        return Estimates(np.array(lookup), np.array(model), model_is_known, self._draft_costs, self._pass_costs)

    def _goes_without(self, plan: Plan) -> bool:
        """Whether it is time to measure a pass without proposals."""
        self._doubtful_passes += min(1.0, plan.gain**-2)
        if not any(choice.length for choice in plan.choices):
            self._doubtful_passes = 0.0
        if self._doubtful_passes <= PROBE_PASSES or self._shortest:
            return False
        self._doubtful_passes = 0.0
        return True

    def _probing(self, candidates: AnySequence[Candidate], choices: list[Choice]) -> list[Choice]:
        """The same choices, but once in a while a token of the draft's model, where it costs least."""
        possible = [candidate for candidate in candidates if candidate.missing and candidate.room]
        if not possible or any(choice.source is Source.MODEL for choice in choices):
            self._idle_passes, self._idle_s = 0, 0.0
            return choices
        self._idle_passes += 1
        unhelped = {c.sequence for c, choice in zip(candidates, choices, strict=True) if not choice.length}
        probed = [candidate for candidate in possible if candidate.sequence in unhelped] or possible
        fewest = min(candidate.missing for candidate in probed)
        tried = {candidate.sequence for candidate in probed if candidate.missing == fewest}
        costs_s = float(self._draft_costs.of(fewest * len(tried)))
        if self._idle_passes <= PROBE_PASSES or costs_s > PROBE_SHARE * self._idle_s:
            return choices
        self._idle_passes, self._idle_s = 0, 0.0
        probe = Choice(Source.MODEL, 1)
        return [probe if c.sequence in tried else choice for c, choice in zip(candidates, choices, strict=True)]
