"""Which prompts share the next pass. Plain Python."""

from __future__ import annotations

import threading
import time
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefill_service.gathering import GatheringWindow
from shared.errors import CapacityError, UnavailableError
from shared.outlet import Outlet


@dataclass(eq=False)
class PromptJob:
    """One prompt on its way through the service."""

    request_id: str
    token_ids: Sequence[int]
    outlet: Outlet[Any]
    """Takes frames and a `PrefillOutcome`, or scores and a `ScoreOutcome`."""
    arrived_s: float = field(default_factory=time.monotonic)
    cancelled: bool = False
    """Nobody waits any more: set by the RPC, and seen at the next layer."""
    frame_count: int = 0
    priority: int = 0
    held_tokens: int = 0
    """Leading tokens whose keys and values the caller has: they are not sent."""
    cache_salt: str = ""
    """Keys and values are reused only between prompts of the same salt."""
    top_logprobs: int | None = None
    """Scores are wanted, not keys and values: with so many of the likeliest tokens at each place."""
    deadline_s: float | None = None
    """Nobody waits beyond this moment, on the clock of `arrived_s`."""


class PromptScheduler:
    """Waiting prompts, the highest priority first, of one priority the oldest; none is ever overtaken by a later one.

    Thread-safe: RPCs submit and cancel, the engine takes.
    """

    def __init__(self, pass_tokens: int, queue_limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Makes an empty queue.

        Args:
            pass_tokens: most prompt tokens computed in a pass; a longer prompt goes alone.
            queue_limit: most waiting prompts.
            clock: the time in seconds.
        """
        self._pass_tokens = pass_tokens
        self._queue_limit = queue_limit
        self._clock = clock
        self._waiting: list[PromptJob] = []
        self._in_pass: list[PromptJob] = []
        self._pass_began_s = 0.0
        self._window = GatheringWindow()
        self._changed = threading.Condition()
        self._closed = False

    @property
    def queued(self) -> int:
        """Prompts waiting for a pass."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Prompts in the current pass."""
        return len(self._in_pass)

    @property
    def queued_tokens(self) -> int:
        """Tokens of all prompts that wait or are in the current pass."""
        with self._changed:
            return sum(len(job.token_ids) for job in (*self._waiting, *self._in_pass))

    def submit(self, job: PromptJob) -> None:
        """Adds a prompt.

        Raises:
            CapacityError: too many are waiting.
            UnavailableError: the service is draining.
        """
        with self._changed:
            if self._closed:
                raise UnavailableError("this prefill replica is draining; use another")
            if len(self._waiting) >= self._queue_limit:
                raise CapacityError(f"{len(self._waiting)} prompts are waiting already; try again later")
            insort(self._waiting, job, key=lambda waiting: -waiting.priority)  # behind its equals, which are older
            self._window.arrived()
            self._changed.notify()

    def cancel(self, job: PromptJob) -> None:
        """Forgets a prompt that waits; one in a pass leaves it at the next layer."""
        with self._changed:
            job.cancelled = True
            if job in self._waiting:
                self._waiting.remove(job)

    def next_batch(
        self, timeout_s: float | None = None, known_tokens: Callable[[PromptJob], int] = lambda _: 0
    ) -> list[PromptJob] | None:
        """Waits for prompts, a little for more of them (`GatheringWindow`), and takes the first that share a pass.

        Args:
            known_tokens: how many tokens of a prompt the pass need not compute; they do not count.

        Returns:
            The prompts; none after `timeout_s` without any; None once closed and nothing waits.
        """
        with self._changed:
            while self._changed.wait_for(lambda: self._waiting or self._closed, timeout_s):
                self._gather()
                self._drop_expired()
                if self._waiting:
                    return self._take(known_tokens)
                if self._closed:
                    return None
            return []

    def still_wanted(self, jobs: Sequence[PromptJob]) -> list[int]:
        """Which of the prompts in a pass somebody still waits for, by index; the others are cancelled from now on.

        Nobody waits for a prompt whose stream has ended: its reader was too slow.
        """
        with self._changed:
            now_s = self._clock()
            for job in jobs:
                job.cancelled = job.cancelled or job.outlet.ended or _expired(job, now_s)
            self._in_pass = [job for job in self._in_pass if not job.cancelled]
            return [index for index, job in enumerate(jobs) if not job.cancelled]

    def pass_done(self, batch: Sequence[PromptJob]) -> None:
        """The engine has let go of a batch, well or not."""
        with self._changed:
            if batch:
                now_s = self._clock()
                self._window.pass_ended(now_s, now_s - self._pass_began_s, len(batch))
            self._in_pass = []

    def close(self) -> None:
        """Refuses new prompts; those that wait are still served."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _gather(self) -> None:
        present = len(self._waiting)
        if self._gathering_s() > 0:
            while (left_s := self._gathering_s()) > 0:
                self._changed.wait(left_s)
            self._window.used(len(self._waiting) - present)

    def _gathering_s(self) -> float:
        """How much longer to wait for prompts that could share the pass."""
        full = sum(len(job.token_ids) for job in self._waiting) >= self._pass_tokens
        return 0.0 if self._closed or full or not self._waiting else self._window.left_s(self._clock())

    def _drop_expired(self) -> None:
        now_s = self._clock()
        for job in [job for job in self._waiting if _expired(job, now_s)]:
            job.cancelled = True
            self._waiting.remove(job)

    def _take(self, known_tokens: Callable[[PromptJob], int]) -> list[PromptJob]:
        tokens = count = 0
        for job in self._waiting:
            tokens += len(job.token_ids) - known_tokens(job)
            if count and tokens > self._pass_tokens:
                break
            count += 1
        self._in_pass, self._waiting = self._waiting[:count], self._waiting[count:]
        self._pass_began_s = self._clock()
        return list(self._in_pass)


def _expired(job: PromptJob, now_s: float) -> bool:
    return job.deadline_s is not None and now_s >= job.deadline_s
