"""Which sequences have blocks, and which share the next pass. Plain Python.

A sequence's life, and who moves it on:

    submit ─▶ waiting ─(blocks reserved)─▶ prefilling ─▶ start ─▶ running ─▶ ended
      RPC              scheduler                RPC                engine, or the RPC that leaves

Blocks are reserved for the prompt and everything that may be generated, before prefill is called: whoever has started
can finish. They are freed exactly once, and never while a pass or a handoff still writes to them.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from decode_service.sequence import Sequence
from shared.blocks import BlockPool
from shared.errors import CapacityError, InvalidRequestError, UnavailableError

STALLED_POLL_S = 0.02
"""How soon a sequence goes on after its slow reader has caught up, when nothing else runs."""


class DecodeScheduler:
    """Admission by blocks, first come first served; every running sequence takes part in every pass it can.

    Thread-safe: RPCs submit, start and leave; the engine takes batches.
    """

    def __init__(self, pool: BlockPool, *, batch_limit: int, queue_limit: int, unread_limit: int) -> None:
        """Makes an empty scheduler.

        Args:
            batch_limit: most sequences in a pass.
            queue_limit: most sequences waiting for blocks.
            unread_limit: a sequence with more unread tokens than this sits passes out.
        """
        self._pool = pool
        self._batch_limit = batch_limit
        self._queue_limit = queue_limit
        self._unread_limit = unread_limit
        self._waiting: deque[Sequence] = deque()
        self._prefilling: set[Sequence] = set()
        self._running: deque[Sequence] = deque()
        self._changed = threading.Condition()
        self._closed = False

    @property
    def queued(self) -> int:
        """Sequences waiting for blocks."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences with blocks."""
        return len(self._prefilling) + len(self._running)

    @property
    def blocks_used(self) -> int:
        return self._pool.used_count

    def submit(self, sequence: Sequence) -> None:
        """Adds a sequence; `on_admitted` is called once its blocks are reserved.

        Raises:
            InvalidRequestError: it could never fit.
            CapacityError: too many are waiting.
            UnavailableError: the service is draining.
        """
        needed = self._pool.blocks_for(sequence.most_tokens)
        if needed > self._pool.block_count:
            most = self._pool.block_count * self._pool.block_tokens
            raise InvalidRequestError(
                f"prompt and max_tokens make {sequence.most_tokens} tokens, this server's KV memory holds {most}; "
                "ask for less or give the service a larger budget"
            )
        with self._changed:
            if self._closed:
                raise UnavailableError("this decode replica is draining; use another")
            if len(self._waiting) >= self._queue_limit:
                raise CapacityError(f"{len(self._waiting)} requests are waiting already; try again later")
            self._waiting.append(sequence)
            self._admit()

    def start(self, sequence: Sequence, last_hidden: bytes | None) -> None:
        """The sequence takes part in passes from now on.

        Args:
            last_hidden: the prompt's final features, when its KV has arrived by a handoff; None when passes are to
                compute it.
        """
        with self._changed:
            sequence.kv_length = sequence.prompt_tokens if last_hidden is not None else 0
            sequence.last_hidden = last_hidden
            self._prefilling.discard(sequence)
            self._running.append(sequence)
            self._changed.notify()

    def leave(self, sequence: Sequence) -> None:
        """The RPC is over, for whatever reason; to be called after its handoff has ended."""
        with self._changed:
            sequence.ended = True
            if sequence in self._waiting:
                self._waiting.remove(sequence)
            self._prefilling.discard(sequence)
            if not sequence.in_pass:
                self._release(sequence)
                self._admit()
            self._changed.notify()

    def next_batch(self, timeout_s: float | None = None) -> list[Sequence] | None:
        """Waits for sequences that can go on, and takes up to `batch_limit`.

        Returns:
            The sequences; none after `timeout_s` without any; None once closed and all have ended.
        """
        with self._changed:
            while True:
                ready = [sequence for sequence in self._running if sequence.outlet.pending <= self._unread_limit]
                if ready:
                    batch = ready[: self._batch_limit]
                    for sequence in batch:
                        sequence.in_pass = True
                        # Whoever was in this pass goes behind those who were not.
                        self._running.remove(sequence)
                        self._running.append(sequence)
                    return batch
                if self._closed and not (self._running or self._prefilling or self._waiting):
                    return None
                if not self._changed.wait(STALLED_POLL_S if self._running else timeout_s) and not self._running:
                    return []

    def pass_done(self, batch: list[Sequence]) -> None:
        """The engine has let go of a batch: those that have ended give their blocks back."""
        with self._changed:
            for sequence in batch:
                sequence.in_pass = False
                if sequence.ended:
                    self._release(sequence)
            self._admit()

    def close(self) -> None:
        """Refuses new sequences; those that were submitted are still served."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def check_integrity(self) -> None:
        """Raises BlockIntegrityError unless every block is free or belongs to one living sequence."""
        with self._changed:
            self._pool.check_integrity([sequence.blocks for sequence in (*self._prefilling, *self._running)])

    def _admit(self) -> None:
        while self._waiting:
            needed = self._pool.blocks_for(self._waiting[0].most_tokens)
            if needed > self._pool.free_count:
                return
            sequence = self._waiting.popleft()
            sequence.blocks = self._pool.allocate(needed)
            sequence.admitted_s = time.monotonic()
            self._prefilling.add(sequence)
            sequence.on_admitted()

    def _release(self, sequence: Sequence) -> None:
        if sequence in self._running:
            self._running.remove(sequence)
        self._pool.release(sequence.blocks)
        sequence.blocks = []
