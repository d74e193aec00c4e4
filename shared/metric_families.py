"""Counters and histograms as Prometheus wants them, each labelled with the stage. Not thread safe."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily


class Histogram:
    """Counts values by size."""

    def __init__(self, upper_bounds: Sequence[float]) -> None:
        self._upper_bounds = tuple(upper_bounds)
        self._counts = [0] * (len(upper_bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Takes a value in."""
        self._counts[bisect.bisect_left(self._upper_bounds, value)] += 1
        self._sum += value

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative buckets as Prometheus wants them, and the sum."""
        buckets, below = [], 0
        for bound, count in zip((*self._upper_bounds, float("inf")), self._counts, strict=True):
            below += count
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), float(below)))
        return buckets, self._sum


def counter_family(name: str, text: str, label: str, stage: str, counts: Mapping[str, int]) -> Metric:
    """A counter with a value for each value of a label."""
    family = CounterMetricFamily(f"headrace_{name}", text, labels=["stage", label])
    for value, count in sorted(counts.items()):
        family.add_metric([stage, value], count)
    return family


def histogram_family(name: str, text: str, stage: str, buckets: Sequence[tuple[str, float]], total: float) -> Metric:
    """A histogram from its cumulative buckets."""
    family = HistogramMetricFamily(f"headrace_{name}", text, labels=["stage"])
    family.add_metric([stage], buckets, total)
    return family


def labelled_histogram_family(
    name: str, text: str, label: str, stage: str, histograms: Mapping[str, tuple[Sequence[tuple[str, float]], float]]
) -> Metric:
    """A histogram for each value of a label, from their cumulative buckets."""
    family = HistogramMetricFamily(f"headrace_{name}", text, labels=["stage", label])
    for value, (buckets, total) in sorted(histograms.items()):
        family.add_metric([stage, value], buckets, total)
    return family
