"""When a failed call may be tried again: exponential backoff with jitter, inside the call's deadline."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from headrace.errors import CallError, DeadlineExceeded, Unavailable


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How often, and after what pause, a call that found no replica is tried again."""

    attempts: int = 6
    """Tries in all, 1 or more; 1 never retries."""
    first_delay_s: float = 0.1
    longest_delay_s: float = 5.0

    def delay_s(self, failures: int) -> float:
        """The pause after that many failures: doubled each time, then shortened at random by up to half, so that many
        callers that failed together do not come back together."""
        delay_s = min(self.longest_delay_s, self.first_delay_s * 2.0 ** (failures - 1))
        return delay_s * random.uniform(0.5, 1.0)


DEFAULT_RETRY = RetryPolicy()


class Attempts:
    """The tries of one call."""

    def __init__(
        self, policy: RetryPolicy, timeout_s: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._timeout_s = timeout_s
        self._deadline_s = None if timeout_s is None else clock() + timeout_s
        self._failures = 0

    def remaining_s(self) -> float | None:
        """Time left for the next try; None without a deadline.

        Raises:
            DeadlineExceeded: none is left.
        """
        if self._deadline_s is None:
            return None
        remaining_s = self._deadline_s - self._clock()
        if remaining_s <= 0:
            raise DeadlineExceeded(f"not finished within timeout_s={self._timeout_s:g}")
        return remaining_s

    def pause_after(self, error: CallError) -> float:
        """Seconds to wait before the next try.

        Raises:
            CallError: the error itself, where another try could not help or would come too late.
        """
        self._failures += 1
        pause_s = self._policy.delay_s(self._failures)
        if not isinstance(error, Unavailable) or self._failures >= self._policy.attempts:
            raise error
        if self._deadline_s is not None and self._clock() + pause_s >= self._deadline_s:
            raise error
        return pause_s
