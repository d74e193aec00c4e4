"""Which sequences have blocks, and which share the next pass. Plain Python.

A sequence's life (`Phase`), and who moves it on:

    submit ─▶ WAITING ─(blocks)─▶ FILLING ─▶ start ─▶ RUNNING ─▶ ENDED
      RPC        ▲    scheduler             RPC          │   engine, or the RPC that leaves
                 └───────────(preempted: scheduler)──────┘

Everybody is ranked: readers that keep up before slow ones, then by priority, then by arrival. Whoever waits is
admitted in that order, nobody past another. A running sequence that needs a block takes it from those ranked below it,
the lowest first, or sits the pass out: so the highest always goes on, and everybody is the highest some day. Blocks are
freed exactly once, and never while a pass or a handoff still writes to them.
"""

from __future__ import annotations

import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Callable

from decode_service.sequence import Phase, Sequence
from decode_service.tables import BlockTables
from shared.errors import CapacityError, UnavailableError

STALLED_POLL_S = 0.02
"""How soon a sequence goes on after its slow reader has caught up, when nothing else runs."""


class DecodeScheduler:
    """Admits by priority and arrival, and gives those who run their turn in passes.

    Thread-safe: RPCs submit, start and leave; the engine takes batches.
    """

    def __init__(
        self,
        tables: BlockTables,
        *,
        batch_limit: int,
        queue_limit: int,
        unread_limit: int,
        draft_tokens: int = 0,
        on_preempted: Callable[[], None] = lambda: None,
    ) -> None:
        """Makes an empty scheduler.

        Args:
            batch_limit: most sequences in a pass. Blocks are over-committed to fill a pass, and not beyond.
            queue_limit: most sequences waiting for blocks.
            unread_limit: a sequence with more unread tokens than this is slow: it sits passes out, and is the first to
                be preempted; then it is not admitted again before its reader has caught up by half.
            draft_tokens: room that a sequence is given for its draft where there are blocks.
            on_preempted: called whenever a sequence has lost its blocks.
        """
        self._tables = tables
        self._batch_limit = batch_limit
        self._queue_limit = queue_limit
        self._unread_limit = unread_limit
        self._draft_tokens = draft_tokens
        self._on_preempted = on_preempted
        self._waiting: list[Sequence] = []
        """In the order of admission."""
        self._filling: set[Sequence] = set()
        self._running: deque[Sequence] = deque()
        """Whoever was in the last pass stands behind those who were not."""
        self._arrived = 0
        self._changed = threading.Condition()
        self._closed = False

    @property
    def queued(self) -> int:
        """Sequences waiting for blocks."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences with blocks."""
        return len(self._filling) + len(self._running)

    @property
    def blocks_used(self) -> int:
        """Blocks that sequences hold."""
        return self._tables.held_count

    @property
    def blocks_cached(self) -> int:
        """Blocks that are kept for prompts to come."""
        return self._tables.cached_count

    def submit(self, sequence: Sequence) -> None:
        """Adds a sequence; `on_admitted` is called once it has blocks.

        Raises:
            InvalidRequestError: it could never fit.
            CapacityError: too many are waiting.
            UnavailableError: the service is draining.
        """
        self._tables.require_possible(sequence)
        with self._changed:
            if self._closed:
                raise UnavailableError("this decode replica is draining; use another")
            if len(self._waiting) >= self._queue_limit:
                raise CapacityError(f"{len(self._waiting)} requests are waiting already; try again later")
            self._arrived += 1
            sequence.number = self._arrived
            self._enter(sequence, Phase.WAITING)
            self._admit()
            self._changed.notify()

    def start(self, sequence: Sequence, last_hidden: bytes | None) -> None:
        """The sequence takes part in passes from now on.

        Args:
            last_hidden: its last token's final features, when the keys and values of all its tokens have arrived by a
                handoff; None when passes are to compute what is missing.
        """
        with self._changed:
            if last_hidden is not None:
                sequence.kv_length = len(sequence.tokens)
                sequence.last_hidden = last_hidden
                self._tables.filled(sequence)
            self._enter(sequence, Phase.RUNNING)
            self._changed.notify()

    def leave(self, sequence: Sequence) -> None:
        """The RPC is over, for whatever reason; to be called after its handoff has ended."""
        with self._changed:
            sequence.ended = True
            if not sequence.in_pass:
                self._release(sequence)
                self._admit()
            self._changed.notify()

    def next_batch(self, timeout_s: float | None = None) -> list[Sequence] | None:
        """Waits for sequences that can go on, and takes up to `batch_limit`.

        Returns:
            The sequences; none after `timeout_s` without any; None once closed and all have ended.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._admit(preempting=True)
                if batch := self._seated():
                    return batch
                if self._closed and not (self._running or self._filling or self._waiting):
                    return None
                left_s = None if deadline_s is None else deadline_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return []
                if self._running or any(map(self._is_slow, self._waiting)):
                    left_s = min(left_s or STALLED_POLL_S, STALLED_POLL_S)
                self._changed.wait(left_s)

    def pass_done(self, batch: list[Sequence]) -> None:
        """The engine has let go of a batch: those that have ended give their blocks back."""
        with self._changed:
            for sequence in batch:
                sequence.in_pass = False
                if sequence.ended:
                    self._release(sequence)
                else:
                    self._tables.filled(sequence)
            self._admit()

    def close(self) -> None:
        """Refuses new sequences; those that were submitted are still served."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def check_integrity(self) -> None:
        """Raises BlockIntegrityError unless every block is free or has its owners, and only whole ones are shared."""
        with self._changed:
            self._tables.check_integrity()

    def _admit(self, *, preempting: bool = False) -> None:
        """Gives blocks to those who wait, in order.

        Args:
            preempting: take them from slow sequences and from those of a lower priority where that helps.
        """
        while head := next((sequence for sequence in self._waiting if not self._is_slow(sequence)), None):
            first_time = not head.admitted_s
            fitted = self._tables.admit(head, overcommits=self._overcommits)
            if not fitted and not (preempting and self._admit_in_place_of_others(head)):
                return
            if first_time:
                head.admitted_s = time.monotonic()
                head.cached_tokens = head.kv_length
            self._enter(head, Phase.FILLING)
            head.on_admitted()

    def _admit_in_place_of_others(self, head: Sequence) -> bool:
        """Preempts as few of them as it takes, or none if even all would not be enough."""
        lower = [other for other in self._running if self._is_slow(other) or other.priority < head.priority]
        lower = sorted((other for other in lower if not other.in_pass), key=self._rank)
        victims = self._tables.fewest_victims(head, lower, overcommits=self._overcommits) if lower else None
        if victims is None:
            return False
        for victim in victims:
            self._preempt(victim)
        return self._tables.admit(head, overcommits=self._overcommits)

    @property
    def _overcommits(self) -> bool:
        """Sequences beyond those that fill a pass would add nothing but pressure on memory."""
        return len(self._filling) + sum(not self._is_slow(other) for other in self._running) < self._batch_limit

    def _seated(self) -> list[Sequence]:
        """The next batch: by priority, then by turns; each with blocks for what it brings."""
        ready = [sequence for sequence in self._running if not self._is_slow(sequence)]
        ready.sort(key=lambda sequence: -sequence.priority)
        first = sorted(ready[: self._batch_limit], key=self._rank, reverse=True)
        seated: list[Sequence] = []
        for sequence in (*first, *ready[self._batch_limit :]):
            # Somebody before it may have taken its blocks.
            if sequence.phase is Phase.RUNNING and len(seated) < self._batch_limit and self._has_room(sequence, seated):
                seated.append(sequence)
        batch = [sequence for sequence in ready if sequence in seated]
        for sequence in batch:
            self._tables.stretch(sequence, min(sequence.needed_tokens + self._draft_tokens, sequence.most_tokens))
            sequence.in_pass = True
            self._running.remove(sequence)
            self._running.append(sequence)
        return batch

    def _has_room(self, sequence: Sequence, seated: list[Sequence]) -> bool:
        """Makes sure of the blocks that a sequence must have in the next pass, at the cost of those ranked below it."""
        if self._tables.cover(sequence, sequence.needed_tokens):
            return True
        others = [other for other in self._running if other is not sequence and not other.in_pass]
        for other in others:
            self._tables.trim(other)
        own_rank = self._rank(sequence)
        for victim in sorted((other for other in others if other not in seated), key=self._rank):
            if self._tables.cover(sequence, sequence.needed_tokens):
                return True
            if self._rank(victim) >= own_rank:
                return False
            self._preempt(victim)
        return self._tables.cover(sequence, sequence.needed_tokens)

    def _rank(self, sequence: Sequence) -> tuple[bool, int, int]:
        """Who goes first: the greater."""
        return not self._is_slow(sequence), sequence.priority, -sequence.number

    def _is_slow(self, sequence: Sequence) -> bool:
        limit = self._unread_limit // 2 if sequence.phase is Phase.WAITING else self._unread_limit
        return sequence.outlet.pending > limit

    def _preempt(self, sequence: Sequence) -> None:
        """Takes its blocks; what it has written so far stays, and it goes on once the rest is computed again."""
        self._tables.release(sequence)
        sequence.last_hidden = None
        sequence.preemptions += 1
        self._enter(sequence, Phase.WAITING)
        self._on_preempted()

    def _release(self, sequence: Sequence) -> None:
        self._tables.release(sequence, forget=sequence.failed)
        self._enter(sequence, Phase.ENDED)

    def _enter(self, sequence: Sequence, phase: Phase) -> None:
        for place in (self._waiting, self._filling, self._running):
            if sequence in place:
                place.remove(sequence)
        sequence.phase = phase
        if phase is Phase.WAITING:
            insort(self._waiting, sequence, key=lambda waiting: (-waiting.priority, waiting.number))
        elif phase is Phase.FILLING:
            self._filling.add(sequence)
        elif phase is Phase.RUNNING:
            self._running.append(sequence)
