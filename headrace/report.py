"""What a batch achieved, and what it took."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.answers import Answer
from headrace.types import ServerStatus, Stage


@dataclass(frozen=True, kw_only=True)
class ServiceReport:
    """One service's part."""

    address: str
    stage: Stage
    scheme: str
    resident_layers: int
    layers: int
    streamed_bytes: int
    """Read during the batch."""
    passes: int
    """Made during the batch."""
    generated_tokens: int
    """Generated during the batch."""
    peak_rss_bytes: int
    """Highest since the service started."""
    budget_bytes: int


@dataclass(frozen=True, kw_only=True)
class BatchReport:
    """One run of a batch. Counts and rates are of this run alone; answers kept from an earlier one are `kept`."""

    done: int
    failed: int
    kept: int
    prompt_tokens: int
    generated_tokens: int
    draft_tokens: int
    accepted_tokens: int
    request_passes: int
    """Decode passes, counted once for each request that took part."""
    wall_s: float
    shift_s: float
    services: tuple[ServiceReport, ...]
    """Those whose addresses were known and that answered at the end."""

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of wall time."""
        return self.generated_tokens / self.wall_s

    @property
    def accepted_per_pass(self) -> float | None:
        """Accepted draft tokens per pass and request; None without passes."""
        return self.accepted_tokens / self.request_passes if self.request_passes else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted ÷ proposed draft tokens; None where nothing was proposed."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None

    @property
    def tokens_per_pass(self) -> float | None:
        """Tokens that one walk over the layers yields, all requests together; None where no walk was seen."""
        decodes = [service for service in self.services if service.stage == "decode"]
        passes = sum(service.passes for service in decodes)
        return sum(service.generated_tokens for service in decodes) / passes if passes else None

    @property
    def streamed_bytes(self) -> int:
        """Bytes of layers read by all services."""
        return sum(service.streamed_bytes for service in self.services)

    @property
    def reports_per_shift(self) -> float:
        """Reports that a shift would finish at this run's pace."""
        return self.done / self.wall_s * self.shift_s


def batch_report(
    answers: Iterable[Answer],
    *,
    kept: int,
    wall_s: float,
    shift_s: float,
    before: Sequence[ServerStatus],
    after: Sequence[ServerStatus],
) -> BatchReport:
    """Sums up the answers of this run and the difference that it made to each service's totals."""
    finished = list(answers)
    usages = [answer["usage"] for answer in finished if "usage" in answer]
    earlier = {status.address: status for status in before}
    return BatchReport(
        done=len(usages),
        failed=len(finished) - len(usages),
        kept=kept,
        prompt_tokens=_sum(usages, "prompt_tokens"),
        generated_tokens=_sum(usages, "completion_tokens"),
        draft_tokens=_sum(usages, "draft_tokens"),
        accepted_tokens=_sum(usages, "accepted_tokens"),
        request_passes=_sum(usages, "passes"),
        wall_s=wall_s,
        shift_s=shift_s,
        services=tuple(_service_report(status, earlier.get(status.address)) for status in after),
    )


def _sum(usages: Sequence[Mapping[str, Any]], name: str) -> int:
    return sum(usage[name] for usage in usages)


def _service_report(after: ServerStatus, before: ServerStatus | None) -> ServiceReport:
    # Totals start again at 0 where the service was restarted in between.
    restarted = before is None or before.passes > after.passes
    passes, streamed_bytes, generated_tokens = (
        (0, 0, 0) if restarted or before is None else (before.passes, before.streamed_bytes, before.generated_tokens)
    )
    return ServiceReport(
        address=after.address,
        stage=after.stage,
        scheme=after.scheme,
        resident_layers=after.resident_layers,
        layers=after.layers,
        streamed_bytes=after.streamed_bytes - streamed_bytes,
        passes=after.passes - passes,
        generated_tokens=after.generated_tokens - generated_tokens,
        peak_rss_bytes=after.peak_rss_bytes,
        budget_bytes=after.budget_bytes,
    )
