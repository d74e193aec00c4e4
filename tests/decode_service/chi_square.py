"""Pearson's chi-square test, for draws whose exact probabilities are known."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

Outcome = TypeVar("Outcome", bound=Hashable)

SIGMAS = 4.0
"""A worse fit than this (1 in 30,000) is a defect. The seeds are fixed, so a test that passed once always does."""


def require_fit(draws: Sequence[Outcome], probabilities: Mapping[Outcome, float]) -> None:
    """Fails where the draws' frequencies do not fit the probabilities, or something impossible was drawn.

    The rarest outcomes are counted together until 5 are expected, as the test's approximation asks for.
    """
    counts = Counter(draws)
    impossible = [outcome for outcome in counts if not probabilities.get(outcome)]
    assert not impossible, f"drew {impossible}, which have no probability"

    cells: list[tuple[int, float]] = []
    observed, expected = 0, 0.0
    for outcome in sorted(probabilities, key=probabilities.__getitem__):
        observed += counts[outcome]
        expected += probabilities[outcome] * len(draws)
        if expected >= 5:
            cells.append((observed, expected))
            observed, expected = 0, 0.0
    assert len(cells) > 1, f"{len(draws)} draws are too few to test"
    statistic = sum((observed - expected) ** 2 / expected for observed, expected in cells)
    limit = _upper_limit(len(cells) - 1)
    assert statistic <= limit, f"chi-square {statistic:.1f} is above {limit:.1f} for {len(cells)} outcomes: {cells}"


def _upper_limit(degrees: int) -> float:
    """Quantile of the chi-square distribution at `SIGMAS` (Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + SIGMAS * math.sqrt(spread)) ** 3
