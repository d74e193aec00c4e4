"""What the controller knows: running estimates of acceptance and of times, all from measurements."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

FIRST_ACCEPTANCE = 0.7
"""Of a draft's model, assumed until there is evidence."""
MATCHED, FIRST_ACCEPTANCE_OF_MATCH = (2, 3, 4, 6), (0.4, 0.67, 0.7, 0.94)
"""Of a lookup, by how many tokens match: measured in greedy texts (docs/design.md, "Drafts: what pays")."""
FIRST_DOUBT = 2.0
"""What is assumed counts as much as so many verified tokens."""
EVIDENCE_KEPT = 0.97
"""Older evidence on acceptance fades by this factor with each verified token."""
LOAD_WEIGHT = 0.2
"""How much of a surprise is put down to the machine's load."""
COST_WEIGHT = 0.05
"""How much of it, at least, to the size that was measured; more as long as that was measured seldom."""
MEMORY = 256
"""A size that was measured in every n-th measurement is known by no more than the latest `MEMORY / n`."""
SHORTEST_S = 1e-7
"""Nothing is measured to take no time at all."""
SINGLE_TRUST = 256
"""A size that was measured only once is taken for unknown after so many other measurements: it may have been a hiccup,
which would keep the controller from ever measuring it again."""


class Acceptance:
    """A running estimate of the chance that the target chooses the drafted token."""

    def __init__(self) -> None:
        self._accepted = 0.0
        self._tried = 0.0
        self._doubt = FIRST_DOUBT

    @property
    def is_known(self) -> bool:
        """There is some evidence."""
        return self._tried > 0

    def rate(self, prior: float) -> float:
        """Between 0 and 1, both excluded.

        Args:
            prior: what would be assumed without any evidence; counts less and less.
        """
        return min(max((self._accepted + prior * self._doubt) / (self._tried + self._doubt), 0.001), 0.999)

    def add(self, proposed: int, accepted: int) -> None:
        """Takes in a chain of which the first `accepted` of `proposed` tokens were right."""
        tried = accepted + (accepted < proposed)
        kept = EVIDENCE_KEPT**tried
        self._accepted = self._accepted * kept + accepted
        self._tried = self._tried * kept + tried
        self._doubt *= kept


class Load:
    """How much longer everything takes than usual: other programs, or a disk that others use."""

    def __init__(self) -> None:
        self.factor = 1.0


@dataclass
class _Mean:
    """Of the measurements of similar sizes, as they would be at a load of 1."""

    size: float
    elapsed_s: float
    count: int
    last: int
    """Number of the latest measurement in it."""


class Costs:
    """Measured times as a function of size: running means by powers of two, joined by straight lines.

    What is compared are times measured minutes apart, between which everything may have become slower or faster. So
    each measurement that surprises changes two estimates: of the load, which all sizes have in common, and of its own
    size. Both are changed by ratios, to which a hiccup does less than to sums.
    """

    def __init__(self, load: Load | None = None) -> None:
        """
        Args:
            load: of the machine, where other costs are measured on it, too.
        """
        self._load = load or Load()
        self._means: dict[int, _Mean] = {}
        """By the size's number of binary digits."""
        self._added = 0
        self._line: tuple[list[float], list[float]] = [], []
        """Sizes and times; replaced as a whole, so that other threads may read it."""

    @property
    def unknown(self) -> bool:
        """Nothing was measured so far."""
        return not self._line[0]

    def add(self, size: int, elapsed_s: float) -> None:
        """Takes a measurement in."""
        self._added += 1
        elapsed_s = max(elapsed_s, SHORTEST_S)
        mean = self._means.get(size.bit_length())
        if mean is None:
            self._means[size.bit_length()] = _Mean(size, elapsed_s / self._load.factor, 1, self._added)
        else:
            absence = self._added - mean.last
            mean.count, mean.last = min(mean.count, max(1, MEMORY // absence)) + 1, self._added
            own = max(1 / mean.count, COST_WEIGHT)
            surprise = elapsed_s / (mean.elapsed_s * self._load.factor)
            mean.size += own * (size - mean.size)
            mean.elapsed_s *= surprise**own
            self._load.factor *= surprise ** (LOAD_WEIGHT * (1 - own))
        self._line = self._rising()

    def _rising(self) -> tuple[list[float], list[float]]:
        """Sizes and times of the means that count; more never takes less, so means that say so are taken together."""
        trusted = sorted((m.size, m.elapsed_s, m.count) for m in self._means.values() if self._is_trusted(m))
        groups: list[list[tuple[float, float, int]]] = []
        for mean in trusted:
            groups.append([mean])
            while len(groups) > 1 and _weighted_s(groups[-2]) > _weighted_s(groups[-1]):
                later = groups.pop()
                groups[-1] += later
        sizes = [size for group in groups for size, _, _ in group]
        return sizes, [elapsed_s for group in groups for elapsed_s in [_weighted_s(group)] * len(group)]

    def of(self, sizes: ArrayLike) -> NDArray[np.float64]:
        """The expected times, guessed hopefully where nothing is known.

        Below the smallest known size time is taken to shrink with it, above the only known one to stay the same.
        """
        wanted = np.asarray(sizes, np.float64)
        known, usual_s = self._line
        if not known:
            return np.zeros_like(wanted)
        known_s = [elapsed_s * self._load.factor for elapsed_s in usual_s]
        times_s = np.interp(wanted, [0.0, *known], [0.0, *known_s])
        if len(known) > 1:
            slope = max(0.0, (known_s[-1] - known_s[-2]) / (known[-1] - known[-2]))
            times_s += slope * np.maximum(0.0, wanted - known[-1])
        return times_s

    def _is_trusted(self, mean: _Mean) -> bool:
        return mean.count > 1 or self._added - mean.last < SINGLE_TRUST


def _weighted_s(group: list[tuple[float, float, int]]) -> float:
    """The mean of some means, each by how much is known of it."""
    weights = [min(count, 1 / COST_WEIGHT) for _, _, count in group]
    return sum(weight * mean_s for weight, (_, mean_s, _) in zip(weights, group, strict=True)) / sum(weights)


def first_acceptance_of_match(matched: int) -> float:
    """What is assumed of a lookup until there is evidence.

    Args:
        matched: tokens at the end of the text that are the same as before what is proposed.
    """
    return float(np.interp(matched, MATCHED, FIRST_ACCEPTANCE_OF_MATCH))


def expected_tokens(acceptance: ArrayLike, length: ArrayLike) -> NDArray[np.float64]:
    """Tokens that a pass yields for a chain of `length` draft tokens, the target's own one included.

    (1 − aᵏ⁺¹) / (1 − a), Leviathan et al., arXiv 2211.17192, equation 1.
    """
    rate = np.asarray(acceptance, np.float64)
    tokens: NDArray[np.float64] = (1.0 - rate ** (np.asarray(length) + 1)) / (1.0 - rate)
    return tokens
