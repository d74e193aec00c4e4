"""What `bench.forecast` finds: jobs between forecasts, and which of them count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

STEADY = 1.15
"""A machine whose forecasts before and after a job differ by more has changed meanwhile."""


@dataclass(frozen=True)
class Pilot:
    """What depends on the text."""

    prompt_tokens: int
    shared_tokens: int
    draft_length: int
    """Tokens proposed in a pass, usually; 0 without a draft."""
    acceptance: float
    """The chance that one is right, were there always so many."""
    tokens_a_pass: float
    """Of one report."""


@dataclass(frozen=True)
class Repetition:
    """A job between two forecasts. Seconds are for one report."""

    before_s: float
    after_s: float
    measured_s: float
    tokens_a_pass: float
    others_share: float
    """Of all cores, that other programs had during the job."""

    @property
    def forecast_s(self) -> float:
        return (self.before_s + self.after_s) / 2

    @property
    def changed(self) -> float:
        """The greater forecast ÷ the smaller one."""
        return max(self.before_s, self.after_s) / min(self.before_s, self.after_s)

    @property
    def ratio(self) -> float:
        """What was measured ÷ what was foretold."""
        return self.measured_s / self.forecast_s


@dataclass(frozen=True)
class Result:
    """One case: forecasts, and what came of them."""

    arrangement: str
    draft: str
    memory: str
    reports: int
    output_tokens: int
    pilot: Pilot
    draft_length: int
    at_once: int
    resident_layers: int
    bound_by: str
    repetitions: Sequence[Repetition]

    @property
    def steady(self) -> list[Repetition]:
        """Those during which the machine did not change."""
        return [repetition for repetition in self.repetitions if repetition.changed <= STEADY]

    @property
    def middle(self) -> Repetition:
        """The one with the middle ratio of the steady ones, or of all where there are none."""
        ranked = sorted(self.steady or self.repetitions, key=lambda repetition: repetition.ratio)
        return ranked[(len(ranked) - 1) // 2]

    @property
    def changed(self) -> float:
        """The greatest forecast ÷ the smallest one of the case."""
        found = [s for repetition in self.repetitions for s in (repetition.before_s, repetition.after_s)]
        return max(found) / min(found)
