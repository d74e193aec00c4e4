"""How much of a machine other programs took while something was measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

BUSY = (0, 1, 2, 5, 6, 7)
"""Columns of /proc/stat: user, nice, system, interrupts, and what the host took from a virtual machine."""


class Watch:
    """Starts with its making; tells in the end what share of all cores went to others than the processes it knows."""

    def __init__(self, own_s: Sequence[Callable[[], float]]) -> None:
        """Begins to watch.

        Args:
            own_s: each tells the processor seconds that a process of the measurement has taken so far; this one, with
                the children that it has waited for, is always counted.
        """
        self._own_s = own_s
        self._before = self._now()

    def others_share(self) -> float:
        """Share of all cores that others have had since, 0 to 1."""
        elapsed_s, busy_s, own_s = (now - before for now, before in zip(self._now(), self._before, strict=True))
        return max(0.0, min(1.0, (busy_s - own_s) / (elapsed_s * (os.cpu_count() or 1))))

    def _now(self) -> tuple[float, float, float]:
        columns = Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
        busy_s = sum(int(columns[column]) for column in BUSY) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), busy_s, sum(os.times()[:4]) + sum(own() for own in self._own_s)
