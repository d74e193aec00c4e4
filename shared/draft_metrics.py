"""What speculation does, for Prometheus: how often each kind of draft is used, how far it goes, and what it costs."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator

from prometheus_client import Metric

from shared.metric_families import Histogram, counter_family, histogram_family, labelled_histogram_family

LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Tokens of a proposal."""
PASS_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
NO_DRAFT = "none"


class DraftMetrics:
    """Written by the engine, read by whoever collects."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lengths: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(LENGTHS))
        self._accepted: Counter[str] = Counter()
        self._pass_s = Histogram(PASS_BUCKETS_S)
        self._passes = 0

    def record_proposal(self, kind: str, length: int) -> None:
        """Counts what one sequence brings to a pass.

        Args:
            kind: of the draft; `NO_DRAFT` where nothing is proposed.
            length: tokens.
        """
        with self._lock:
            self._lengths[kind].observe(length)

    def record_accepted(self, kind: str, tokens: int) -> None:
        """Counts tokens of a proposal that the target chose itself."""
        with self._lock:
            self._accepted[kind] += tokens

    def record_pass(self, duration_s: float) -> None:
        """Counts a pass of the draft's model."""
        with self._lock:
            self._pass_s.observe(duration_s)
            self._passes += 1

    def collect(self, stage: str) -> Iterator[Metric]:
        """The same for Prometheus; nothing before anything was counted."""
        with self._lock:
            lengths = {kind: histogram.cumulative() for kind, histogram in self._lengths.items()}
            accepted, passes, pass_s = dict(self._accepted), self._passes, self._pass_s.cumulative()
        if lengths:
            yield labelled_histogram_family("draft_length", _HELP["draft_length"], "kind", stage, lengths)
        if accepted:
            yield counter_family("draft_accepted_tokens", _HELP["draft_accepted_tokens"], "kind", stage, accepted)
        if passes:
            yield histogram_family("draft_pass_seconds", _HELP["draft_pass_seconds"], stage, *pass_s)


_HELP = {
    "draft_length": "Tokens proposed for a sequence in a pass, by kind of draft.",
    "draft_accepted_tokens": "Proposed tokens that the target chose itself, by kind of draft.",
    "draft_pass_seconds": "Duration of a pass of the draft's model.",
}
