"""How a batch looks on a terminal: the progress bar while it runs, the table at its end."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from headrace.job_output import Answer
from headrace.report import BatchReport

LINE_EVERY_S = 30.0
SHOWN_FAILURES = 10


class BatchProgress:
    """A progress bar on a terminal; elsewhere a line every so often, so that a night's log tells how it went."""

    def __init__(self, console: Console, shift_s: float, line_every_s: float = LINE_EVERY_S) -> None:
        self._console = console
        self._shift_s = shift_s
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("reports"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("reports", total=None, rate="")
        self._jobs = self._kept = self._done = self._failed = self._tokens = 0
        self._begin_s = time.monotonic()
        self._line_every_s = line_every_s
        self._ended = threading.Event()
        self._teller = threading.Thread(target=self._tell, name="progress", daemon=True)

    def started(self, jobs: int, kept: int, failed: int) -> None:
        """Of so many jobs, so many were answered by an earlier run, and so many failed there and are left alone."""
        if kept:
            self._console.print(f"continuing: {kept} of {jobs} reports were answered by an earlier run")
        if failed:
            self._console.print(
                f"{failed} failed in an earlier run and are left alone; --retry-failed tries them again"
            )
        self._jobs, self._kept = jobs, kept + failed
        self._begin_s = time.monotonic()
        self._bar.update(self._task, total=self._jobs - self._kept)

    def generated(self, tokens: int) -> None:
        """New tokens came."""
        self._tokens += tokens
        self._bar.update(self._task, rate=self._rate())

    def finished(self, answer: Answer) -> None:
        """A job is answered, or has failed for good."""
        self._done += 1
        self._bar.advance(self._task)
        if "error" in answer:
            self._failed += 1
            self._show_failure(answer)

    def __enter__(self) -> BatchProgress:
        self._bar.start()
        if not self._console.is_terminal:
            self._teller.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._bar.stop()

    def _show_failure(self, answer: Answer) -> None:
        error = answer["error"]
        if self._failed <= SHOWN_FAILURES:
            self._console.print(f"{answer['id']}: {error['status']}: {error['message']}", style="red", markup=False)
        elif self._failed == SHOWN_FAILURES + 1:
            self._console.print("further failures are in the file of errors only", style="red")

    def _tell(self) -> None:
        """By the clock, not with each answer: a first answer may take long, and its log must not look dead."""
        while not self._ended.wait(self._line_every_s):
            self._console.print(self._line(), markup=False)

    @property
    def _elapsed_s(self) -> float:
        return max(time.monotonic() - self._begin_s, 1e-6)

    def _rate(self) -> str:
        reports_per_s = (self._done - self._failed) / self._elapsed_s
        rate = f"{reports_per_s:.2f} reports/s, {self._tokens / self._elapsed_s:.1f} tokens/s"
        if not reports_per_s:
            return rate
        return f"{rate}, {reports_per_s * self._shift_s:,.0f} reports per {_duration(self._shift_s)}"

    def _line(self) -> str:
        parts = [f"{self._kept + self._done} of {self._jobs} reports", self._rate()]
        if self._done:
            left = self._jobs - self._kept - self._done
            parts.append(f"about {_duration(self._elapsed_s / self._done * left)} left")
        if self._failed:
            parts.append(f"{self._failed} failed")
        return ", ".join(parts)


def report_table(report: BatchReport) -> Table:
    """The report for people."""
    table = Table(title="Batch", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in _rows(report):
        table.add_row(name, value)
    return table


def _rows(report: BatchReport) -> Iterator[tuple[str, str]]:
    yield "reports done", f"{report.done:,}" + (f" (and {report.kept:,} by an earlier run)" if report.kept else "")
    if report.failed:
        yield "reports failed", f"{report.failed:,}"
    if report.left_alone:
        yield "reports failed in an earlier run", f"{report.left_alone:,}"
    yield "prompt tokens", f"{report.prompt_tokens:,}"
    yield "generated tokens", f"{report.generated_tokens:,}"
    yield "reports/s", f"{report.reports_per_s:,.2f}"
    yield "tokens/s", f"{report.tokens_per_s:,.2f}"
    yield "accepted draft tokens per pass", _or_dash(report.accepted_per_pass, "{:.2f}")
    yield "acceptance rate", _or_dash(report.acceptance_rate, "{:.1%}")
    yield "tokens per walk over the layers", _or_dash(report.tokens_per_pass, "{:.2f}")
    yield "bytes streamed", _bytes(report.streamed_bytes)
    for service in report.services:
        yield (
            f"peak memory, {service.stage} {service.address}",
            f"{_bytes(service.peak_rss_bytes)} of {_bytes(service.budget_bytes)}",
        )
    yield "wall time", _duration(report.wall_s)
    yield f"reports per {_duration(report.shift_s)} shift", f"{report.reports_per_shift:,.0f}"


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _bytes(count: int) -> str:
    """In the binary units in which budgets are usually stated."""
    scaled, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if scaled < 1024:
            break
        scaled, unit = scaled / 1024, larger
    return f"{scaled:,.0f} {unit}" if scaled >= 100 or unit == "B" else f"{scaled:.1f} {unit}"


def _duration(seconds: float) -> str:
    """`7.3 s`, `4 min 10 s`, `8 h`, `7 h 30 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, left_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "min"), (0 if hours else left_s, "s")]
    return " ".join(f"{value} {unit}" for value, unit in parts if value)


def report_json(report: BatchReport) -> dict[str, Any]:
    """The report for programs: every field and every derived number, units in the names."""
    return {**dataclasses.asdict(report), **{name: getattr(report, name) for name in _DERIVED}}


_DERIVED = (
    "reports_per_s",
    "tokens_per_s",
    "accepted_per_pass",
    "acceptance_rate",
    "tokens_per_pass",
    "streamed_bytes",
    "reports_per_shift",
)
