"""Admission and batches: whatever requests do, and in whatever order, blocks have one owner and all get a turn."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decode_service.sampling import SamplingParams
from decode_service.scheduler import DecodeScheduler
from decode_service.sequence import Sequence
from decode_service.text.output import Emission
from shared.blocks import BlockPool
from shared.errors import CapacityError, InvalidRequestError, UnavailableError
from shared.outlet import Outlet

BLOCKS, BLOCK_TOKENS = 12, 4
BATCH_LIMIT, QUEUE_LIMIT, UNREAD_LIMIT = 3, 4, 5


class Reader:
    """The RPC's end of one sequence, on a loop of its own: it reads when it is told to."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self.outlet: Outlet[Emission] = self._loop.run_until_complete(self._open())
        self._reading: asyncio.Task[None] | None = None

    def catch_up(self) -> None:
        """Reads everything that waits."""
        self._reading = self._reading or self._loop.create_task(self._read())
        while self.outlet.pending:
            self._loop.run_until_complete(asyncio.sleep(0))

    def close(self) -> None:
        if self._reading:
            self._reading.cancel()
            self._loop.run_until_complete(asyncio.gather(self._reading, return_exceptions=True))
        self._loop.close()

    @staticmethod
    async def _open() -> Outlet[Emission]:
        return Outlet()

    async def _read(self) -> None:
        async for _ in self.outlet:
            pass


def make_scheduler(**changes: Any) -> DecodeScheduler:
    limits = {"batch_limit": BATCH_LIMIT, "queue_limit": QUEUE_LIMIT, "unread_limit": UNREAD_LIMIT}
    return DecodeScheduler(BlockPool(BLOCKS, BLOCK_TOKENS), **limits | changes)


def make_sequence(reader: Reader, tokens: int, admitted: list[Any], key: Any = None) -> Sequence:
    """A prompt of all those tokens but one, which may still be generated."""
    return Sequence(
        request_id=str(key),
        tokens=[0] * (tokens - 1),
        prompt_tokens=tokens - 1,
        max_tokens=1,
        sampling=SamplingParams(),
        output=None,  # type: ignore[arg-type]  # text is the engine's business
        outlet=reader.outlet,
        on_admitted=lambda: admitted.append(key),
    )


class Life(RuleBasedStateMachine):
    """Requests come, start, stall, end and leave at any moment; the engine takes and returns batches in between."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make_scheduler()
        self.readers: dict[Sequence, Reader] = {}
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.running: list[Sequence] = []
        self.batch: list[Sequence] | None = None
        self.admitted: list[int] = []
        self.submitted = 0
        self.closed = False

    @rule(tokens=st.integers(2, BLOCKS * BLOCK_TOKENS + 8))
    def submit(self, tokens: int) -> None:
        reader = Reader()
        sequence = make_sequence(reader, tokens, self.admitted, self.submitted)
        error: Any = None
        if tokens > BLOCKS * BLOCK_TOKENS:
            error = InvalidRequestError
        elif self.closed:
            error = UnavailableError
        elif len(self.waiting) >= QUEUE_LIMIT:
            error = CapacityError
        if error:
            with pytest.raises(error):
                self.scheduler.submit(sequence)
            reader.close()
            return
        self.submitted += 1
        self.readers[sequence] = reader
        self.waiting.append(sequence)
        self.scheduler.submit(sequence)
        self._note_admissions()

    @precondition(lambda self: self.prefilling)
    @rule(data=st.data())
    def handoff_arrives(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.prefilling))
        self.prefilling.remove(sequence)
        self.running.append(sequence)
        self.scheduler.start(sequence, b"")

    @precondition(lambda self: self.waiting or self.prefilling or self.running)
    @rule(data=st.data())
    def rpc_ends(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from([*self.waiting, *self.prefilling, *self.running]))
        for holder in (self.waiting, self.prefilling, self.running):
            if sequence in holder:
                holder.remove(sequence)
        self.scheduler.leave(sequence)
        self.readers.pop(sequence).close()
        self._note_admissions()

    @precondition(lambda self: self.batch is None and self._ready())
    @rule()
    def engine_takes_a_batch(self) -> None:
        ready = self._ready()
        self.batch = self.scheduler.next_batch()
        assert self.batch
        assert len(self.batch) == min(BATCH_LIMIT, len(ready))
        assert set(self.batch) <= set(ready)
        assert all(sequence.blocks for sequence in self.batch)

    @precondition(lambda self: self.batch is not None)
    @rule(data=st.data())
    def engine_is_done(self, data: st.DataObject) -> None:
        assert self.batch is not None
        for sequence in self.batch:
            assert sequence.blocks, "blocks were freed while the engine wrote to them"
            if not sequence.ended:
                sequence.outlet.put(Emission("", [1], None), data.draw(st.integers(1, UNREAD_LIMIT + 1)))
                sequence.ended = data.draw(st.booleans())
            if sequence.ended and sequence in self.running:
                self.running.remove(sequence)
        ended = [sequence for sequence in self.batch if sequence.ended]
        self.scheduler.pass_done(self.batch)
        self.batch = None
        assert not any(sequence.blocks for sequence in ended)
        self._note_admissions()

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def reader_catches_up(self, data: st.DataObject) -> None:
        self.readers[data.draw(st.sampled_from(list(self.readers)))].catch_up()

    @rule()
    def drain(self) -> None:
        self.scheduler.close()
        self.closed = True

    @invariant()
    def every_block_is_free_or_has_one_owner(self) -> None:
        self.scheduler.check_integrity()

    @invariant()
    def counts_agree(self) -> None:
        in_pass = [sequence for sequence in self.batch or () if sequence not in self.running]
        assert self.scheduler.queued == len(self.waiting)
        assert self.scheduler.running == len(self.prefilling) + len(self.running) + len(in_pass)

    @invariant()
    def admission_is_first_come_first_served(self) -> None:
        assert self.admitted == sorted(self.admitted)

    @invariant()
    def whoever_fits_is_not_kept_waiting(self) -> None:
        if self.waiting:
            needed = -(-self.waiting[0].most_tokens // BLOCK_TOKENS)
            assert needed > BLOCKS - self.scheduler.blocks_used

    def teardown(self) -> None:
        if self.batch is not None:
            self.scheduler.pass_done(self.batch)
        for sequence, reader in self.readers.items():
            self.scheduler.leave(sequence)
            reader.close()
        self.scheduler.check_integrity()
        assert (self.scheduler.blocks_used, self.scheduler.running, self.scheduler.queued) == (0, 0, 0)
        self.scheduler.close()
        assert self.scheduler.next_batch() is None

    def _ready(self) -> list[Sequence]:
        return [sequence for sequence in self.running if sequence.outlet.pending <= UNREAD_LIMIT]

    def _note_admissions(self) -> None:
        while self.waiting and self.waiting[0].blocks:
            self.prefilling.append(self.waiting.popleft())


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.fixture
def reader() -> Any:
    made = Reader()
    yield made
    made.close()


def running_sequences(scheduler: DecodeScheduler, reader: Reader, count: int) -> list[Sequence]:
    sequences = [make_sequence(reader, 2, []) for _ in range(count)]
    for sequence in sequences:
        scheduler.submit(sequence)
        scheduler.start(sequence, b"")
    return sequences


def test_everybody_takes_turns_where_a_pass_cannot_hold_all(reader: Reader) -> None:
    scheduler = make_scheduler()
    sequences = running_sequences(scheduler, reader, 7)
    turns = []
    for _ in range(7):
        batch = scheduler.next_batch()
        assert batch is not None
        turns += batch
        scheduler.pass_done(batch)
    assert {sequence: turns.count(sequence) for sequence in sequences} == dict.fromkeys(sequences, 3)


def test_a_small_request_does_not_overtake_a_large_one_that_waits_for_blocks(reader: Reader) -> None:
    scheduler, admitted = make_scheduler(), list[str]()
    first = make_sequence(reader, 8 * BLOCK_TOKENS, admitted, "first")
    scheduler.submit(first)
    scheduler.submit(make_sequence(reader, 6 * BLOCK_TOKENS, admitted, "large"))
    scheduler.submit(make_sequence(reader, 2, admitted, "small"))
    assert admitted == ["first"]
    scheduler.leave(first)
    assert admitted == ["first", "large", "small"]


def test_a_request_that_could_never_fit_is_refused_with_both_numbers(reader: Reader) -> None:
    with pytest.raises(InvalidRequestError, match="make 49 tokens, this server's KV memory holds 48"):
        make_scheduler().submit(make_sequence(reader, 49, []))


def test_leaving_twice_or_after_the_engine_ended_it_frees_once(reader: Reader) -> None:
    scheduler = make_scheduler()
    (sequence,) = running_sequences(scheduler, reader, 1)
    batch = scheduler.next_batch()
    assert batch == [sequence]
    sequence.ended = True
    scheduler.leave(sequence)
    assert scheduler.blocks_used == 1
    scheduler.pass_done(batch)
    scheduler.leave(sequence)
    assert scheduler.blocks_used == 0
    scheduler.check_integrity()


def test_a_closed_scheduler_serves_what_waits_before_it_ends(reader: Reader) -> None:
    scheduler = make_scheduler()
    waiting = make_sequence(reader, 2, [])
    scheduler.submit(waiting)
    scheduler.close()
    with pytest.raises(UnavailableError, match="draining"):
        scheduler.submit(make_sequence(reader, 2, []))
    scheduler.start(waiting, b"")
    batch = scheduler.next_batch()
    assert batch == [waiting]
    waiting.ended = True
    scheduler.pass_done(batch)
    assert scheduler.next_batch() is None


async def test_a_wait_for_work_ends_when_a_handoff_arrives(reader: Reader) -> None:
    scheduler = make_scheduler()
    assert scheduler.next_batch(timeout_s=0) == []
    taken = asyncio.create_task(asyncio.to_thread(scheduler.next_batch))
    (sequence,) = running_sequences(scheduler, reader, 1)
    assert await taken == [sequence]
