"""What a batch tells while it runs."""

from __future__ import annotations

import io
import threading

from rich.console import Console

from headrace.cli._batch_view import SHOWN_FAILURES, BatchProgress


class Told(io.StringIO):
    """A log file that says when something was written."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = {start: threading.Event() for start in ("3 of 30 reports", "4 of 30 reports")}

    def write(self, text: str) -> int:
        count = super().write(text)
        for start, seen in self.seen.items():
            if text.startswith(start):
                seen.set()
        return count


def test_a_log_gets_lines_by_the_clock_even_before_the_first_answer() -> None:
    log = Told()
    with BatchProgress(Console(file=log, width=200), shift_s=8 * 3600, line_every_s=0.01) as progress:
        progress.started(30, kept=2, failed=1)
        assert log.seen["3 of 30 reports"].wait(30)
        progress.generated(40)
        progress.finished({"id": "a", "text": "x"})
        assert log.seen["4 of 30 reports"].wait(30)
    text = log.getvalue()
    assert "3 of 30 reports, 0.00 reports/s, 0.0 tokens/s\n" in text
    assert "4 of 30 reports" in text.splitlines()[-1]
    assert all(part in text.splitlines()[-1] for part in ("reports/s", "tokens/s", "reports per 8 h", "left"))
    assert "--retry-failed" in text


def test_failures_are_shown_up_to_a_few() -> None:
    log = io.StringIO()
    with BatchProgress(Console(file=log, width=200), shift_s=1.0) as progress:
        progress.started(100, kept=0, failed=0)
        for number in range(50):
            progress.finished({"id": f"j{number}", "error": {"status": "DATA_LOSS", "message": "[damaged]"}})
    lines = log.getvalue().splitlines()
    assert lines[0] == "j0: DATA_LOSS: [damaged]"
    assert (len(lines), lines[-1]) == (SHOWN_FAILURES + 1, "further failures are in the file of errors only")
