"""Which prompts share the next pass. Plain Python."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.errors import CapacityError, UnavailableError
from shared.kv.handoff import Frame, PrefillOutcome
from shared.outlet import Outlet


@dataclass(eq=False)
class PromptJob:
    """One prompt on its way through the service."""

    request_id: str
    token_ids: Sequence[int]
    outlet: Outlet[Frame | PrefillOutcome]
    arrived_s: float = field(default_factory=time.monotonic)
    cancelled: bool = False
    """Set by the RPC when nobody waits any more; seen at the next layer."""
    frame_count: int = 0
    priority: int = 0
    held_tokens: int = 0
    """Leading tokens whose keys and values the caller has: they are not sent."""
    cache_salt: str = ""
    """Keys and values are reused only between prompts of the same salt."""


class PromptScheduler:
    """Waiting prompts, oldest first. Thread-safe: RPCs submit and cancel, the engine takes."""

    def __init__(self, pass_tokens: int, queue_limit: int) -> None:
        """Makes an empty queue.

        Args:
            pass_tokens: most prompt tokens in a pass; a longer prompt goes alone.
            queue_limit: most waiting prompts.
        """
        self._pass_tokens = pass_tokens
        self._queue_limit = queue_limit
        self._waiting: deque[PromptJob] = deque()
        self._changed = threading.Condition()
        self._closed = False

    @property
    def queued(self) -> int:
        """Prompts waiting for a pass."""
        return len(self._waiting)

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
            self._waiting.append(job)
            self._changed.notify()

    def cancel(self, job: PromptJob) -> None:
        """Forgets a prompt that waits; one in a pass leaves it at the next layer."""
        with self._changed:
            job.cancelled = True
            if job in self._waiting:
                self._waiting.remove(job)

    def next_batch(self, timeout_s: float | None = None) -> list[PromptJob] | None:
        """Waits for prompts, and takes the oldest that fit a pass together.

        Returns:
            The prompts; none after `timeout_s` without any; None once closed and nothing waits.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed, timeout_s)
            if self._closed and not self._waiting:
                return None
            batch: list[PromptJob] = []
            tokens = 0
            while self._waiting and (not batch or tokens + len(self._waiting[0].token_ids) <= self._pass_tokens):
                batch.append(self._waiting.popleft())
                tokens += len(batch[-1].token_ids)
            return batch

    def close(self) -> None:
        """Refuses new prompts; those that wait are still served."""
        with self._changed:
            self._closed = True
            self._changed.notify()
