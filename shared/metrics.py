"""The one place that counts. Prometheus and `StatusService` read the same numbers from it."""

from __future__ import annotations

import dataclasses
import resource
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from shared.draft_metrics import DraftMetrics
from shared.metric_families import Histogram, counter_family, histogram_family

PASS_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
FIRST_TOKEN_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What a process serves; fixed for its life."""

    stage: Literal["prefill", "decode"]
    model_digest: str
    scheme: str
    context_length: int
    """Tokens."""
    layers: int
    budget_bytes: int


def _zero() -> int:
    return 0


@dataclass(frozen=True, kw_only=True)
class Gauges:
    """Numbers that go up and down, read where they live. Each is called from other threads, and must only read."""

    queued: Callable[[], int] = _zero
    """Requests waiting for work."""
    running: Callable[[], int] = _zero
    """Requests being worked on."""
    queued_tokens: Callable[[], int] = _zero
    """Prompt tokens that wait or are being computed."""
    resident_layers: Callable[[], int] = _zero
    kv_blocks_used: Callable[[], int] = _zero
    kv_blocks: Callable[[], int] = _zero
    kv_blocks_cached: Callable[[], int] = _zero
    """Blocks kept for prompts to come, given up when memory is needed."""


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums since the process started."""

    passes: int = 0
    batched_requests: int = 0
    """Sum over passes of the requests in each."""
    streamed_bytes: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True, kw_only=True)
class StatusSnapshot(Totals):
    """The fields of `GetStatusResponse`, read at one moment."""

    stage: Literal["prefill", "decode"]
    model_digest: str
    scheme: str
    context_length: int
    layers: int
    budget_bytes: int
    queued: int
    running: int
    queued_tokens: int
    resident_layers: int
    kv_blocks_used: int
    kv_blocks: int
    kv_blocks_cached: int
    peak_rss_bytes: int


class Telemetry(Collector):
    """Totals, gauges and histograms of one process; written by any thread, and a Prometheus collector."""

    def __init__(self, identity: Identity, gauges: Gauges | None = None) -> None:
        self.identity = identity
        self.drafts = DraftMetrics()
        """Of speculation; Prometheus alone shows them."""
        self._gauges = gauges or Gauges()
        self._shown: dict[str, tuple[str, Callable[[], int]]] = {}
        self._lock = threading.Lock()
        self._totals = Totals()
        self._requests: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._pass_s = Histogram(PASS_BUCKETS_S)
        self._first_token_s = Histogram(FIRST_TOKEN_BUCKETS_S)

    def record_pass(
        self,
        duration_s: float,
        *,
        requests: int,
        streamed_bytes: int = 0,
        prompt_tokens: int = 0,
        generated_tokens: int = 0,
        draft_tokens: int = 0,
        accepted_tokens: int = 0,
    ) -> None:
        """Counts one walk over the layers, the requests that shared it, and what came of it."""
        with self._lock:
            self._pass_s.observe(duration_s)
        self.add(
            passes=1,
            batched_requests=requests,
            streamed_bytes=streamed_bytes,
            prompt_tokens=prompt_tokens,
            generated_tokens=generated_tokens,
            draft_tokens=draft_tokens,
            accepted_tokens=accepted_tokens,
        )

    def show(self, name: str, meaning: str, read: Callable[[], int]) -> None:
        """Adds a number that goes up and down, which Prometheus alone shows; called from other threads."""
        self._shown[name] = meaning, read

    def add(self, **amounts: int) -> None:
        """Adds to totals by name, as in `add(prompt_tokens=17)`. The names are the fields of `Totals`."""
        with self._lock:
            raised = {name: getattr(self._totals, name) + amount for name, amount in amounts.items()}
            self._totals = dataclasses.replace(self._totals, **raised)

    def record_request(self, outcome: str) -> None:
        """Counts a request that has ended: "stop", "length", "cancelled", "failed" …"""
        with self._lock:
            self._requests[outcome] += 1

    def record_failure(self, kind: str) -> None:
        """Counts a call answered with an error, by the error's class name. `shared.server` does this for every call."""
        with self._lock:
            self._failures[kind] += 1

    def record_first_token(self, duration_s: float) -> None:
        """Counts the time from a request's arrival to its first token."""
        with self._lock:
            self._first_token_s.observe(duration_s)

    @property
    def totals(self) -> Totals:
        """The sums as they are now."""
        return self._totals

    def snapshot(self) -> StatusSnapshot:
        """Everything `StatusService` reports."""
        gauges = {field.name: getattr(self._gauges, field.name)() for field in dataclasses.fields(self._gauges)}
        fields: dict[str, Any] = dataclasses.asdict(self.identity) | dataclasses.asdict(self._totals) | gauges
        return StatusSnapshot(**fields, peak_rss_bytes=peak_rss_bytes())

    def collect(self) -> Iterator[Metric]:
        """The same numbers for Prometheus, each labelled with the stage."""
        stage = self.identity.stage
        with self._lock:
            totals, requests, failures = self._totals, dict(self._requests), dict(self._failures)
            pass_s, first_token_s = self._pass_s.cumulative(), self._first_token_s.cumulative()
        yield self._info()
        for name, value in dataclasses.asdict(totals).items():
            counter = CounterMetricFamily(f"headrace_{name}", _HELP[name], labels=["stage"])
            counter.add_metric([stage], value)
            yield counter
        for name, value in self._current().items():
            gauge = GaugeMetricFamily(f"headrace_{name}", _HELP[name], labels=["stage"])
            gauge.add_metric([stage], value)
            yield gauge
        for name, (meaning, read) in self._shown.items():
            gauge = GaugeMetricFamily(f"headrace_{name}", meaning, labels=["stage"])
            gauge.add_metric([stage], read())
            yield gauge
        yield counter_family("requests", _HELP["requests"], "outcome", stage, requests)
        yield counter_family("failures", _HELP["failures"], "kind", stage, failures)
        yield histogram_family("pass_seconds", _HELP["pass_seconds"], stage, *pass_s)
        yield histogram_family("first_token_seconds", _HELP["first_token_seconds"], stage, *first_token_s)
        yield from self.drafts.collect(stage)

    def _info(self) -> Metric:
        family = InfoMetricFamily("headrace_model", "What is served.", labels=["stage"])
        family.add_metric([self.identity.stage], {"digest": self.identity.model_digest, "scheme": self.identity.scheme})
        return family

    def _current(self) -> dict[str, int]:
        identity = self.identity
        return {
            "queued_requests": self._gauges.queued(),
            "running_requests": self._gauges.running(),
            "queued_tokens": self._gauges.queued_tokens(),
            "kv_blocks_used": self._gauges.kv_blocks_used(),
            "kv_blocks": self._gauges.kv_blocks(),
            "kv_blocks_cached": self._gauges.kv_blocks_cached(),
            "resident_layers": self._gauges.resident_layers(),
            "layers": identity.layers,
            "context_tokens": identity.context_length,
            "budget_bytes": identity.budget_bytes,
            "rss_bytes": rss_bytes(),
            "peak_rss_bytes": peak_rss_bytes(),
        }


def rss_bytes() -> int:
    """Resident set size of this process now; where the system does not tell, its highest so far."""
    return _status_bytes("VmRSS") or _peak_from_usage()


def peak_rss_bytes() -> int:
    """Highest resident set size of this process so far."""
    return _status_bytes("VmHWM") or _peak_from_usage()


def _status_bytes(field: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)


def _peak_from_usage() -> int:
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


_HELP = {
    "passes": "Walks over the layers.",
    "batched_requests": "Sum over passes of the requests in each.",
    "streamed_bytes": "Bytes of streamed layers read.",
    "prompt_tokens": "Prompt tokens computed (prefill) or received (decode).",
    "generated_tokens": "Tokens generated.",
    "draft_tokens": "Draft tokens proposed.",
    "accepted_tokens": "Draft tokens that the target chose itself.",
    "cached_tokens": "Prompt tokens whose KV was found in the prefix cache.",
    "preemptions": "Sequences that gave their blocks up and were computed again.",
    "queued_requests": "Requests waiting for work.",
    "running_requests": "Requests being worked on.",
    "queued_tokens": "Prompt tokens that wait or are being computed.",
    "kv_blocks_used": "KV blocks in use.",
    "kv_blocks": "KV blocks in all.",
    "kv_blocks_cached": "KV blocks kept for prompts to come.",
    "resident_layers": "Layers kept in memory.",
    "layers": "Layers of the model.",
    "context_tokens": "Longest sequence in tokens.",
    "budget_bytes": "The memory budget.",
    "rss_bytes": "Resident set size.",
    "peak_rss_bytes": "Highest resident set size so far.",
    "requests": "Requests that have ended, by outcome.",
    "failures": "Calls answered with an error, by kind.",
    "pass_seconds": "Duration of a pass.",
    "first_token_seconds": "Time from a request's arrival to its first token.",
}
