"""How many tokens to draft: as many as pay. Plain Python.

A pass over B sequences that each bring k draft tokens is expected to yield Σ (1 − aᵢᵏ⁺¹) / (1 − aᵢ) tokens, where aᵢ is
sequence i's acceptance rate (Leviathan et al., arXiv 2211.17192, equation 1), and takes k draft steps and one pass
over B·(k+1) rows. The controller keeps running estimates of all of these and takes the k with the most tokens a second.
Zero is a choice. Costs that were never measured are guessed from those that were, at first hopefully: so a length is
tried once, and the measurement decides from then on.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence as AnySequence
from weakref import WeakKeyDictionary

from decode_service.sequence import Sequence

FIRST_ACCEPTANCE = 0.7
"""Assumed until there is evidence."""
EVIDENCE_KEPT = 0.95
"""Older evidence on acceptance fades by this factor with each verified token."""
COST_WEIGHT = 0.25
"""Weight of the newest measurement in a running cost."""
PROBE_PASSES = 64
"""After this many passes without a draft one is tried again: text changes."""


class Costs:
    """Measured times as a function of size: running means by powers of two, joined by straight lines."""

    def __init__(self) -> None:
        self._points: dict[int, tuple[float, float]] = {}
        """Bucket -> mean size and mean seconds."""

    def add(self, size: int, elapsed_s: float) -> None:
        """Takes a measurement in."""
        bucket = size.bit_length()
        old_size, old_s = self._points.get(bucket, (size, elapsed_s))
        self._points[bucket] = (
            old_size + COST_WEIGHT * (size - old_size),
            old_s + COST_WEIGHT * (elapsed_s - old_s),
        )

    def of(self, size: int) -> float:
        """The expected time, guessed hopefully where nothing is known.

        Below the smallest known size time is taken to shrink with it, above the only known one to stay the same.
        """
        points = sorted(self._points.values())
        if not points:
            return 0.0
        smallest, smallest_s = points[0]
        if size <= smallest:
            return smallest_s * size / smallest
        if len(points) == 1:
            return smallest_s
        index = min(bisect.bisect([known for known, _ in points], size), len(points) - 1)
        (low, low_s), (high, high_s) = points[index - 1 : index + 1]
        return low_s + max(0.0, (high_s - low_s) / (high - low)) * (size - low)


class Acceptance:
    """A running estimate of the chance that the target chooses the drafted token."""

    def __init__(self, prior: float = FIRST_ACCEPTANCE, evidence: float = 2.0) -> None:
        self._accepted = prior * evidence
        self._tried = evidence

    @property
    def rate(self) -> float:
        """Between 0 and 1, both excluded."""
        return min(max(self._accepted / self._tried, 0.001), 0.999)

    def add(self, proposed: int, accepted: int) -> None:
        """Takes in a chain of which the first `accepted` of `proposed` tokens were right."""
        tried = accepted + (accepted < proposed)
        kept = EVIDENCE_KEPT**tried
        self._accepted = self._accepted * kept + accepted
        self._tried = self._tried * kept + tried


class DraftController:
    """Chooses the draft length of each pass."""

    def __init__(self, shortest: int, longest: int, rows_limit: int) -> None:
        """Chooses between `shortest` and `longest` tokens; the same number twice fixes it.

        Args:
            rows_limit: most tokens that a pass may verify.
        """
        self._shortest = shortest
        self._longest = longest
        self._rows_limit = rows_limit
        self._step_costs = Costs()
        self._pass_costs = Costs()
        self._overall = Acceptance()
        self._by_sequence: WeakKeyDictionary[Sequence, Acceptance] = WeakKeyDictionary()
        self._idle_passes = 0

    def length(self, sequences: AnySequence[Sequence]) -> int:
        """How many tokens to draft for each of these sequences in the next pass."""
        if not sequences:
            return 0
        longest = max(0, min(self._longest, self._rows_limit // len(sequences) - 1))
        lengths = range(min(self._shortest, longest), longest + 1)
        best = max(lengths, key=lambda length: self._rate(sequences, length))
        self._idle_passes = 0 if best else self._idle_passes + 1
        if self._idle_passes > PROBE_PASSES and longest > 0:
            self._idle_passes = 0
            return 1
        return best

    def drafted(self, sequences: int, length: int, elapsed_s: float) -> None:
        """Drafting `length` tokens for so many sequences took that long."""
        if length:
            self._step_costs.add(sequences, elapsed_s / length)

    def passed(self, rows: int, elapsed_s: float) -> None:
        """A pass over so many tokens took that long."""
        self._pass_costs.add(rows, elapsed_s)

    def verified(self, sequence: Sequence, proposed: int, accepted: int) -> None:
        """The target has judged a proposal."""
        if proposed:
            self._overall.add(proposed, accepted)
            self._acceptance(sequence).add(proposed, accepted)

    def _rate(self, sequences: AnySequence[Sequence], length: int) -> float:
        """Expected tokens a second."""
        tokens = sum(expected_tokens(self._acceptance(sequence).rate, length) for sequence in sequences)
        count = len(sequences)
        elapsed_s = length * self._step_costs.of(count) + self._pass_costs.of(count * (length + 1))
        return tokens / max(elapsed_s, 1e-9)

    def _acceptance(self, sequence: Sequence) -> Acceptance:
        found = self._by_sequence.get(sequence)
        if found is None:
            found = self._by_sequence[sequence] = Acceptance(self._overall.rate)
        return found


def expected_tokens(acceptance: float, length: int) -> float:
    """Tokens that a pass yields for a chain of `length` draft tokens, the target's own one included."""
    return float((1 - acceptance ** (length + 1)) / (1 - acceptance))
