"""How a batch looks on a terminal: the progress bar while it runs, the table at its end."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from headrace.answers import Answer
from headrace.report import BatchReport

_LINE_EVERY_S = 30.0


class BatchProgress:
    """A progress bar on a terminal; elsewhere, a line now and then, so that a night's log tells how it went."""

    def __init__(self, console: Console) -> None:
        self._console = console
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
        self._begin_s = self._told_s = time.monotonic()

    def started(self, jobs: int, kept: int) -> None:
        """Of so many jobs, so many were answered by an earlier run."""
        if kept:
            self._console.print(f"continuing: {kept} of {jobs} reports were answered by an earlier run")
        self._jobs, self._kept = jobs, kept
        self._begin_s = self._told_s = time.monotonic()
        self._bar.update(self._task, total=jobs - kept)

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
            error = answer["error"]
            self._console.print(f"{answer['id']}: {error['status']}: {error['message']}", style="red", markup=False)
        if not self._console.is_terminal and time.monotonic() - self._told_s >= _LINE_EVERY_S:
            self._told_s = time.monotonic()
            self._console.print(self._line(), markup=False)

    def __enter__(self) -> BatchProgress:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def _rate(self) -> str:
        return f"{self._tokens / max(time.monotonic() - self._begin_s, 1e-6):.1f} tokens/s"

    def _line(self) -> str:
        left = self._jobs - self._kept - self._done
        left_s = (time.monotonic() - self._begin_s) / self._done * left
        return f"{self._kept + self._done} of {self._jobs} reports, {self._rate()}, about {_duration(left_s)} left" + (
            f", {self._failed} failed" if self._failed else ""
        )


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
    yield "prompt tokens", f"{report.prompt_tokens:,}"
    yield "generated tokens", f"{report.generated_tokens:,}"
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
    "tokens_per_s",
    "accepted_per_pass",
    "acceptance_rate",
    "tokens_per_pass",
    "streamed_bytes",
    "reports_per_shift",
)
