"""What a batch achieved, and what it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from headrace.job_output import Answer
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


@dataclass
class Tally:
    """Sums over the answers of one run, so that none has to be held."""

    done: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    request_passes: int = 0

    def add(self, answer: Answer) -> None:
        """Counts an answer or a failure."""
        if "error" in answer:
            self.failed += 1
            return
        usage = answer["usage"]
        self.done += 1
        self.prompt_tokens += usage["prompt_tokens"]
        self.generated_tokens += usage["completion_tokens"]
        self.draft_tokens += usage["draft_tokens"]
        self.accepted_tokens += usage["accepted_tokens"]
        self.request_passes += usage["passes"]


@dataclass(frozen=True, kw_only=True)
class BatchReport:
    """One run of a batch. Counts and rates are of this run alone; answers kept from an earlier one are `kept`."""

    done: int
    failed: int
    kept: int
    left_alone: int
    """Failed in an earlier run, and not tried again."""
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
    def reports_per_s(self) -> float:
        """Answered jobs per second of wall time."""
        return self.done / self.wall_s

    @property
    def reports_per_shift(self) -> float:
        """Reports that a shift would finish at this run's pace."""
        return self.reports_per_s * self.shift_s


def batch_report(
    tally: Tally,
    *,
    kept: int,
    left_alone: int,
    wall_s: float,
    shift_s: float,
    before: Sequence[ServerStatus],
    after: Sequence[ServerStatus],
) -> BatchReport:
    """The sums over this run's answers, and the difference that it made to each service's totals."""
    earlier = {status.address: status for status in before}
    return BatchReport(
        **asdict(tally),
        kept=kept,
        left_alone=left_alone,
        wall_s=wall_s,
        shift_s=shift_s,
        services=tuple(_service_report(status, earlier.get(status.address)) for status in after),
    )


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
