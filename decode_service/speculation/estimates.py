"""What the controller knows: running estimates of acceptance and of times, all from measurements."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

FIRST_ACCEPTANCE = 0.7
"""Assumed until there is evidence."""
EVIDENCE_KEPT = 0.95
"""Older evidence on acceptance fades by this factor with each verified token."""
COST_WEIGHT = 0.25
"""Weight of the newest measurement in a running cost."""
SINGLE_TRUST = 256
"""A size that was measured only once is taken for unknown after so many other measurements: it may have been a hiccup,
which would keep the controller from ever measuring it again."""


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


@dataclass
class _Mean:
    size: float
    elapsed_s: float
    count: int
    last: int
    """Number of the latest measurement in it."""

    def add(self, size: int, elapsed_s: float, number: int) -> None:
        self.size += COST_WEIGHT * (size - self.size)
        self.elapsed_s += COST_WEIGHT * (elapsed_s - self.elapsed_s)
        self.count += 1
        self.last = number


class Costs:
    """Measured times as a function of size: running means by powers of two, joined by straight lines."""

    def __init__(self) -> None:
        self._means: dict[int, _Mean] = {}
        """By the size's number of binary digits."""
        self._added = 0
        self._sizes: list[float] = []
        self._times_s: list[float] = []

    def add(self, size: int, elapsed_s: float) -> None:
        """Takes a measurement in."""
        self._added += 1
        bucket = size.bit_length()
        if bucket in self._means:
            self._means[bucket].add(size, elapsed_s, self._added)
        else:
            self._means[bucket] = _Mean(size, elapsed_s, 1, self._added)
        known = sorted((mean.size, mean.elapsed_s) for mean in self._means.values() if self._is_trusted(mean))
        self._sizes, self._times_s = (list(column) for column in zip(*known, strict=True))

    def of(self, sizes: ArrayLike) -> NDArray[np.float64]:
        """The expected times, guessed hopefully where nothing is known.

        Below the smallest known size time is taken to shrink with it, above the only known one to stay the same.
        """
        wanted = np.asarray(sizes, np.float64)
        if not self._sizes:
            return np.zeros_like(wanted)
        known, known_s = self._sizes, self._times_s
        times_s = np.interp(wanted, [0.0, *known], [0.0, *known_s])
        if len(known) > 1:
            slope = max(0.0, (known_s[-1] - known_s[-2]) / (known[-1] - known[-2]))
            times_s += slope * np.maximum(0.0, wanted - known[-1])
        return times_s

    def _is_trusted(self, mean: _Mean) -> bool:
        return mean.count > 1 or self._added - mean.last < SINGLE_TRUST


def expected_tokens(acceptance: ArrayLike, length: ArrayLike) -> NDArray[np.float64]:
    """Tokens that a pass yields for a chain of `length` draft tokens, the target's own one included.

    (1 − aᵏ⁺¹) / (1 − a), Leviathan et al., arXiv 2211.17192, equation 1.
    """
    rate = np.asarray(acceptance, np.float64)
    tokens: NDArray[np.float64] = (1.0 - rate ** (np.asarray(length) + 1)) / (1.0 - rate)
    return tokens
