"""How many requests to have under way: found by trying, as long as more of them bring more tokens a second."""

from __future__ import annotations

import time
from collections.abc import Callable

GAIN = 1.05
"""More requests must bring at least 5 % more tokens a second; less is noise."""
MOST = 1024
PATIENT_ROUNDS = 16
"""So long a limit that no longer paid to raise, or that met a full queue, is kept before it is tried again."""


class Pace:
    """The limit on requests under way.

    A *round* is as many finished requests as the limit. After a change of the limit one round passes in which the
    service fills or empties; the next is measured, in tokens per second. Where it beats the best round so far by
    `GAIN`, the limit is doubled; where it does not, the limit goes back to the best one and stays there for
    `PATIENT_ROUNDS`, since what others ask of the service changes. RESOURCE_EXHAUSTED lowers the limit by a quarter at
    once.
    """

    def __init__(
        self, start: int, *, fixed: bool = False, most: int = MOST, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            start: the first limit, 1 or more.
            fixed: keep it, whatever happens.
            most: never go beyond it.
        """
        self.limit = start
        """Requests that may be under way now."""
        self._fixed = fixed
        self._most = most
        self._clock = clock
        self._best_limit, self._best_rate = start, 0.0
        self._rounds_kept = 0
        self._settled = False
        self._lowered = False
        self._begin_round(filling=True)

    def generated(self, tokens: int) -> None:
        """New tokens came, for any request."""
        self._tokens += tokens

    def finished(self) -> None:
        """A request has ended."""
        self._lowered = False
        self._left -= 1
        if self._left > 0 or self._fixed:
            return
        if self._filling:
            self._begin_round(filling=False)
        else:
            self._judge(self._tokens / max(self._clock() - self._begin_s, 1e-9))

    def refused(self) -> None:
        """The service's queue is full. Many requests meet that at once: until one ends they count as one."""
        if self._fixed or self._lowered:
            return
        self._lowered = True
        self._settle(max(1, self.limit * 3 // 4))

    def _judge(self, rate: float) -> None:
        if self._settled:
            self._rounds_kept += 1
            self._best_rate = rate
            if self._rounds_kept < PATIENT_ROUNDS:
                return self._begin_round(filling=False)
        elif rate < self._best_rate * GAIN:
            return self._settle(self._best_limit)
        self._settled = False
        self._best_limit, self._best_rate = self.limit, rate
        if self.limit >= self._most:
            return self._settle(self._most)
        self.limit = min(self._most, self.limit * 2)
        self._begin_round(filling=True)

    def _settle(self, limit: int) -> None:
        self.limit = self._best_limit = limit
        self._settled, self._rounds_kept = True, 0
        self._begin_round(filling=True)

    def _begin_round(self, *, filling: bool) -> None:
        self._filling = filling
        self._left = self.limit
        self._tokens = 0
        self._begin_s = self._clock()
