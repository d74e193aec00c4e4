"""How long a free engine waits for more prompts before it starts a pass. Plain Python."""

from __future__ import annotations

SHARE = 0.05
"""Of the last pass's time: what a window that brings nothing may cost at most."""
MOST_S = 0.1
LEAST_PART = 1 / 16
"""A window that never brings anything shrinks to this part, and goes on trying."""


class GatheringWindow:
    """A short wait after each pass, for the callers that the pass has just served and whoever comes with them.

    A pass reads the layers once for all its prompts, so callers that take turns in two passes wait twice as long as if
    they shared one. The window opens when the engine becomes free, so a prompt that finds it idle never waits. It
    lasts a twentieth of the last pass at most, and ends once as many prompts have come as that pass served. One that
    brought nothing is half as long the next time; one that brought something is twice as long.
    """

    def __init__(self) -> None:
        self._ends_s = float("-inf")
        self._part = 1.0
        self._served = self._arrivals = 0

    def pass_ended(self, now_s: float, duration_s: float, prompts: int) -> None:
        """The engine is free again, after a pass that served some prompts."""
        self._ends_s = now_s + self._part * min(MOST_S, SHARE * duration_s)
        self._served, self._arrivals = prompts, 0

    def arrived(self) -> None:
        """A prompt has come."""
        self._arrivals += 1

    def left_s(self, now_s: float) -> float:
        """How much longer to wait for others, when there is a prompt already; 0 not at all."""
        return 0.0 if self._arrivals >= self._served else max(0.0, self._ends_s - now_s)

    def used(self, joined: int) -> None:
        """Prompts have waited for others, of which so many came."""
        self._part = min(1.0, self._part * 2) if joined > 0 else max(LEAST_PART, self._part / 2)
