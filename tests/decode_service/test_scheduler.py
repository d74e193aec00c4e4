"""Admission, batches, preemption: whatever requests do, and in whatever order, nothing is lost and all get a turn."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from decode_service.scheduler import DecodeScheduler
from decode_service.sequence import Phase, Sequence
from decode_service.tables import BlockTables
from decode_service.text.output import Emission
from shared.blocks import BlockPool
from shared.errors import CapacityError, InvalidRequestError, UnavailableError
from tests.decode_service.simulated import Reader, SimulatedEngine, sequence_of

BLOCKS, BLOCK_TOKENS = 12, 4
BATCH_LIMIT, QUEUE_LIMIT, UNREAD_LIMIT = 3, 4, 5

PROMPTS = st.builds(
    lambda head, length, tail: [head] * length + tail,
    st.integers(0, 1),
    st.integers(0, 16),
    st.lists(st.integers(0, 1), min_size=1, max_size=4),
)
"""Many begin alike."""


def make_scheduler(
    pool: BlockPool | None = None, *, overcommit: float = 1.0, shares_prefixes: bool = True, **changes: Any
) -> DecodeScheduler:
    limits = {"batch_limit": BATCH_LIMIT, "queue_limit": QUEUE_LIMIT, "unread_limit": UNREAD_LIMIT}
    pool = pool or BlockPool(BLOCKS, BLOCK_TOKENS)
    tables = BlockTables(pool, "digest", overcommit=overcommit, shares_prefixes=shares_prefixes)
    return DecodeScheduler(tables, **limits | changes)


def make_sequence(reader: Reader, tokens: int, admitted: list[Any], key: Any = None, **fields: Any) -> Sequence:
    """A prompt of all those tokens but one, which may still be generated."""
    return sequence_of([0] * (tokens - 1), 1, reader.outlet, lambda: admitted.append(key), **fields)


class Life(RuleBasedStateMachine):
    """Requests come, start, stall, end and leave at any moment; the engine takes and returns batches in between.

    Memory is so small that it runs out.
    """

    @initialize(
        overcommit=st.sampled_from([1.0, 1.5, 4.0]),
        shares_prefixes=st.booleans(),
        draft_tokens=st.sampled_from([0, 3]),
        seed=st.integers(0, 1 << 16),
    )
    def begin(self, overcommit: float, shares_prefixes: bool, draft_tokens: int, seed: int) -> None:
        self.chance = random.Random(seed)
        self.overcommit, self.shares_prefixes, self.draft_tokens = overcommit, shares_prefixes, draft_tokens
        self.preempted = 0
        self.pool = BlockPool(BLOCKS, BLOCK_TOKENS)
        self.scheduler = make_scheduler(
            self.pool,
            overcommit=overcommit,
            shares_prefixes=shares_prefixes,
            draft_tokens=draft_tokens,
            on_preempted=self.count_preemption,
        )
        self.engine = SimulatedEngine(self.pool, self.choose)
        self.readers: dict[Sequence, Reader] = {}
        self.batch: list[Sequence] | None = None
        self.closed = False

    def count_preemption(self) -> None:
        self.preempted += 1

    def choose(self, most: int) -> int:
        return self.chance.randint(0, most)

    @rule(
        prompts=st.lists(PROMPTS, min_size=1, max_size=3),
        max_tokens=st.integers(1, 30),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "", "tenant"]),
    )
    def submit(self, prompts: list[list[int]], max_tokens: int, priority: int, salt: str) -> None:
        for prompt in prompts:
            self.submit_one(prompt, max_tokens, priority, salt)

    def submit_one(self, prompt: list[int], max_tokens: int, priority: int, salt: str) -> None:
        reader = Reader()

        def on_admitted() -> None:
            self.nobody_was_passed_by(sequence)

        sequence = sequence_of(prompt, max_tokens, reader.outlet, on_admitted, priority=priority, cache_salt=salt)
        error: Any = None
        if len(prompt) + max_tokens > BLOCKS * BLOCK_TOKENS:
            error = InvalidRequestError
        elif self.closed:
            error = UnavailableError
        elif len(self.in_phase(Phase.WAITING)) >= QUEUE_LIMIT:
            error = CapacityError
        if error:
            with pytest.raises(error):
                self.scheduler.submit(sequence)
            reader.close()
            return
        self.readers[sequence] = reader
        self.scheduler.submit(sequence)

    def nobody_was_passed_by(self, admitted: Sequence) -> None:
        waiting = [other for other in self.in_phase(Phase.WAITING) if other.outlet.pending <= UNREAD_LIMIT // 2]
        assert all((other.priority, -other.number) < (admitted.priority, -admitted.number) for other in waiting)

    @precondition(lambda self: self.in_phase(Phase.FILLING))
    @rule(data=st.data(), arrives=st.booleans())
    def handoff_arrives_or_is_not_needed(self, data: st.DataObject, arrives: bool) -> None:
        sequence = data.draw(st.sampled_from(self.in_phase(Phase.FILLING)))
        self.start(sequence, arrives)

    def start(self, sequence: Sequence, arrives: bool) -> None:
        if arrives:
            self.engine.hand_off(sequence)
        self.scheduler.start(sequence, b"" if arrives else None)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def rpc_ends(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(list(self.readers)))
        self.readers.pop(sequence).close()
        self.scheduler.leave(sequence)
        assert sequence.phase is Phase.ENDED or sequence.in_pass

    @precondition(lambda self: self.batch is None and self.ready())
    @rule()
    def engine_takes_a_batch(self) -> None:
        before = self.preempted
        self.batch = self.scheduler.next_batch(timeout_s=0)
        ready = self.ready()
        assert self.batch is not None
        assert set(self.batch) <= set(ready)
        assert len(self.batch) <= BATCH_LIMIT
        if not self.in_phase(Phase.FILLING):
            assert self.batch, "somebody always goes on"
            if len(ready) <= BATCH_LIMIT:
                assert max(ready, key=lambda sequence: (sequence.priority, -sequence.number)) in self.batch
        if self.overcommit == 1.0:
            assert len(self.batch) == min(BATCH_LIMIT, len(ready)), "whoever was admitted has room"
            assert self.preempted == before or any(map(self.loses_to_others, self.in_phase(Phase.WAITING)))

    def loses_to_others(self, sequence: Sequence) -> bool:
        """Where nothing is over-committed, blocks are taken only from slow readers and for a higher priority."""
        slow = sequence.outlet.pending > UNREAD_LIMIT
        return slow or any(other.priority > sequence.priority for other in self.in_phase(Phase.FILLING))

    @precondition(lambda self: self.batch is not None)
    @rule(fails=st.sampled_from([False, False, False, True]))
    def engine_is_done(self, fails: bool) -> None:
        assert self.batch is not None
        assert all(sequence.blocks for sequence in self.batch), "blocks were freed while the engine wrote to them"
        if fails:
            for sequence in self.batch:
                sequence.fail(ValueError())
        else:
            self.engine.run(self.batch, self.draft_tokens, chunk_limit=6)
        ended = [sequence for sequence in self.batch if sequence.ended]
        self.scheduler.pass_done(self.batch)
        self.batch = None
        assert not any(sequence.blocks for sequence in ended)
        assert all(sequence.phase is Phase.ENDED for sequence in ended)

    @precondition(lambda self: self.batch is None and (self.in_phase(Phase.FILLING) or self.ready()))
    @rule(passes=st.integers(1, 6))
    def some_time_goes_by(self, passes: int) -> None:
        """Handoffs arrive, readers read, and passes succeed."""
        for _ in range(passes):
            for sequence in self.in_phase(Phase.FILLING):
                self.start(sequence, arrives=self.chance.random() < 0.5)
            if self.ready():
                self.engine_takes_a_batch()
                self.scheduler.check_integrity()
                self.engine_is_done(fails=False)
                self.scheduler.check_integrity()
            for reader in self.readers.values():
                if self.chance.random() < 0.8:
                    reader.catch_up()

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def reader_catches_up(self, data: st.DataObject) -> None:
        self.readers[data.draw(st.sampled_from(list(self.readers)))].catch_up()

    @precondition(lambda self: len(self.readers) > 5)
    @rule()
    def drain(self) -> None:
        self.scheduler.close()
        self.closed = True

    @invariant()
    def every_block_is_free_or_has_its_owners_and_none_that_is_shared_can_be_written(self) -> None:
        self.scheduler.check_integrity()

    @invariant()
    def counts_agree(self) -> None:
        held = {block for sequence in self.readers for block in sequence.blocks}
        held |= {block for sequence in self.batch or () for block in sequence.blocks}
        left = [sequence for sequence in self.batch or () if sequence not in self.readers]
        assert self.scheduler.queued == len(self.in_phase(Phase.WAITING))
        running = len(self.in_phase(Phase.FILLING)) + len(self.in_phase(Phase.RUNNING))
        assert self.scheduler.running == running + len(left)
        assert self.scheduler.blocks_used == len(held)
        assert self.scheduler.blocks_used + self.scheduler.blocks_cached <= BLOCKS

    @invariant()
    def whoever_waits_holds_nothing_and_whoever_runs_has_room_for_its_tokens(self) -> None:
        for sequence in self.readers:
            if sequence.phase in (Phase.WAITING, Phase.ENDED):
                assert (sequence.blocks, sequence.kv_length) == ([], 0)
            elif not sequence.in_pass:
                assert len(sequence.blocks) * BLOCK_TOKENS >= len(sequence.tokens) - 1
                assert sequence.kv_length <= len(sequence.tokens)

    @invariant()
    def whoever_fits_is_not_kept_waiting(self) -> None:
        waiting = [other for other in self.in_phase(Phase.WAITING) if other.outlet.pending <= UNREAD_LIMIT // 2]
        if self.overcommit == 1.0 and not self.shares_prefixes and self.batch is None and waiting:
            head = max(waiting, key=lambda sequence: (sequence.priority, -sequence.number))
            admitted = self.in_phase(Phase.FILLING) + self.in_phase(Phase.RUNNING)
            promised = sum(self.pool.blocks_for(sequence.most_tokens) for sequence in admitted)
            assert promised + self.pool.blocks_for(head.most_tokens) > BLOCKS

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

    def in_phase(self, phase: Phase) -> list[Sequence]:
        return [sequence for sequence in self.readers if sequence.phase is phase]

    def ready(self) -> list[Sequence]:
        running = self.in_phase(Phase.RUNNING)
        return [sequence for sequence in running if sequence.outlet.pending <= UNREAD_LIMIT]


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


def running_with(scheduler: DecodeScheduler, reader: Reader, prompt: list[int], max_tokens: int, **fields: Any) -> Any:
    """A sequence whose prompt is to be computed in passes, if it has been admitted."""
    sequence = sequence_of(prompt, max_tokens, reader.outlet, lambda: None, **fields)
    scheduler.submit(sequence)
    if sequence.phase is Phase.FILLING:
        scheduler.start(sequence, None)
    return sequence


def grow(scheduler: DecodeScheduler, tokens: int) -> list[Sequence]:
    """One pass that adds so many tokens to each sequence in it."""
    batch = scheduler.next_batch(timeout_s=0)
    assert batch
    for sequence in batch:
        sequence.kv_length = len(sequence.tokens)
        sequence.tokens += [7] * tokens
    scheduler.pass_done(batch)
    scheduler.check_integrity()
    return batch


def test_the_youngest_of_the_lowest_priority_gives_way_and_comes_back_where_it_was(reader: Reader) -> None:
    preempted: list[int] = []
    scheduler = make_scheduler(overcommit=4.0, batch_limit=4, on_preempted=lambda: preempted.append(1))
    sequences = [
        running_with(scheduler, reader, [number] * 8, 30, priority=priority)
        for number, priority in enumerate([0, 1, 0])
    ]
    grow(scheduler, 1)
    while not preempted:
        grow(scheduler, 4)
    youngest = sequences[2]
    assert (youngest.phase, youngest.blocks, youngest.preemptions) == (Phase.WAITING, [], 1)
    assert all(sequence.phase is Phase.RUNNING for sequence in sequences[:2])
    text = list(youngest.tokens)
    scheduler.leave(sequences[0])
    assert (youngest.phase, youngest.tokens) == (Phase.FILLING, text)
    assert youngest.kv_length >= 8, "what nobody else needed meanwhile is still there"
    assert youngest.cached_tokens == 0, "counted when it came, not when it came back"
    scheduler.start(youngest, None)
    assert youngest in grow(scheduler, 1)


def test_a_slow_reader_gives_way_before_a_lower_priority_and_waits_until_it_has_caught_up_by_half(
    reader: Reader,
) -> None:
    scheduler = make_scheduler(overcommit=4.0, unread_limit=4)
    slow_reader = Reader()
    slow = running_with(scheduler, slow_reader, [1] * 16, 20, priority=5)
    other = running_with(scheduler, reader, [2] * 16, 20)
    grow(scheduler, 1)
    slow.outlet.put(Emission("", [], None), 5)
    while slow.phase is Phase.RUNNING:
        assert grow(scheduler, 4) == [other]
    assert other.phase is Phase.RUNNING
    scheduler.leave(other)
    assert scheduler.next_batch(timeout_s=0) == []
    assert slow.phase is Phase.WAITING
    slow_reader.catch_up()
    assert scheduler.next_batch(timeout_s=0) == []
    assert slow.phase is Phase.FILLING
    slow_reader.close()


def test_whoever_gave_way_with_much_unread_waits_for_its_reader(reader: Reader) -> None:
    scheduler = make_scheduler(unread_limit=4)
    low_reader = Reader()
    low = running_with(scheduler, low_reader, [1] * 15, 8)
    low.outlet.put(Emission("", [], None), 3)
    assert grow(scheduler, 1) == [low]
    urgent = running_with(scheduler, reader, [2] * 30, 8, priority=1)
    scheduler.next_batch(timeout_s=0)
    scheduler.leave(urgent)
    assert scheduler.next_batch(timeout_s=0) == []
    assert low.phase is Phase.WAITING
    low_reader.catch_up()
    scheduler.next_batch(timeout_s=0)
    assert low.phase is Phase.FILLING
    low_reader.close()


def test_whoever_needs_a_block_and_is_the_lowest_sits_out_and_keeps_what_it_has(reader: Reader) -> None:
    scheduler = make_scheduler(overcommit=4.0)
    old = running_with(scheduler, reader, [1] * 22, 20)
    young = running_with(scheduler, reader, [2] * 16, 20)
    young.tokens += [7] * 8
    assert grow(scheduler, 0) == [old, young]
    assert scheduler.blocks_used == BLOCKS
    young.tokens.append(7)
    assert grow(scheduler, 0) == [old]
    assert (young.phase, len(young.blocks), young.preemptions) == (Phase.RUNNING, 6, 0)


def test_nobody_takes_blocks_from_those_above_it_not_even_when_it_is_its_turn(reader: Reader) -> None:
    scheduler, old_reader = make_scheduler(overcommit=4.0, batch_limit=1), Reader()
    old = running_with(scheduler, old_reader, [1] * 22, 20)
    old.outlet.put(Emission("", [], None), UNREAD_LIMIT + 1)
    young = running_with(scheduler, reader, [2] * 16, 20)  # fills the pass that a slow reader leaves empty
    young.tokens += [7] * 8
    assert grow(scheduler, 0) == [young]
    old_reader.catch_up()
    assert grow(scheduler, 0) == [old]
    young.tokens.append(7)
    assert grow(scheduler, 0) == [old]
    assert (old.preemptions, young.preemptions) == (0, 0)
    old_reader.close()


def test_a_handoff_after_a_preemption_brings_everything_that_was_written(reader: Reader) -> None:
    scheduler = make_scheduler()
    sequence = running_with(scheduler, reader, [1] * 15, 8)
    grow(scheduler, 3)
    urgent = running_with(scheduler, reader, [2] * 30, 8, priority=1)
    scheduler.next_batch(timeout_s=0)
    scheduler.leave(urgent)
    assert (sequence.phase, len(sequence.tokens)) == (Phase.FILLING, 18)
    scheduler.start(sequence, b"features")
    assert sequence.kv_length == 18
    scheduler.check_integrity()


def test_room_for_a_draft_is_taken_back_before_anybody_gives_way(reader: Reader) -> None:
    scheduler = make_scheduler(overcommit=4.0, draft_tokens=16)
    first = running_with(scheduler, reader, [1] * 20, 20)
    second = running_with(scheduler, reader, [2] * 20, 8)
    assert grow(scheduler, 0) == [first, second]
    assert (len(first.blocks), len(second.blocks)) == (7, 5), "the first got all there was"
    second.tokens.append(7)
    assert grow(scheduler, 0) == [first, second]
    assert (len(first.blocks), len(second.blocks)) == (6, 6)


def test_memory_is_taken_from_a_lower_priority_for_one_that_comes_and_not_from_an_equal(reader: Reader) -> None:
    scheduler = make_scheduler()
    low, middle = (running_with(scheduler, reader, [number] * 15, 8, priority=number) for number in (0, 1))
    grow(scheduler, 1)
    equal = running_with(scheduler, reader, [5] * 7, 8, priority=0)
    grow(scheduler, 1)
    assert (low.phase, equal.phase) == (Phase.RUNNING, Phase.WAITING)
    urgent = running_with(scheduler, reader, [9] * 15, 8, priority=2)
    assert urgent.phase is Phase.WAITING
    grow(scheduler, 1)
    assert (urgent.phase, middle.phase, low.phase) == (Phase.FILLING, Phase.RUNNING, Phase.WAITING)


def test_nobody_is_preempted_for_one_that_would_not_fit_even_then(reader: Reader) -> None:
    scheduler = make_scheduler()
    low = running_with(scheduler, reader, [1] * 7, 8, priority=0)
    high = running_with(scheduler, reader, [2] * 15, 16, priority=9)
    grow(scheduler, 1)
    middle = running_with(scheduler, reader, [3] * 15, 16, priority=5)
    grow(scheduler, 1)
    assert (low.phase, high.phase, middle.phase) == (Phase.RUNNING, Phase.RUNNING, Phase.WAITING)


def test_a_sequence_that_gives_way_before_its_first_token_is_computed_again(reader: Reader) -> None:
    scheduler = make_scheduler()
    sequence = sequence_of([1] * 15, 8, reader.outlet, lambda: None)
    scheduler.submit(sequence)
    scheduler.start(sequence, b"features")
    running_with(scheduler, reader, [2] * 30, 8, priority=1)
    assert scheduler.next_batch(timeout_s=0) == []
    assert (sequence.phase, sequence.last_hidden, sequence.kv_length) == (Phase.WAITING, None, 0)


@pytest.fixture
def readers() -> Iterator[list[Reader]]:
    made = [Reader() for _ in range(20)]
    yield made
    for reader in made:
        reader.close()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("overcommit", [1.0, 2.0, 8.0])
def test_everybody_is_served_in_a_bounded_number_of_passes(readers: list[Reader], overcommit: float, seed: int) -> None:
    chance = random.Random(seed)
    pool, preempted = BlockPool(BLOCKS, BLOCK_TOKENS), list[int]()
    scheduler = make_scheduler(
        pool, overcommit=overcommit, queue_limit=100, draft_tokens=3, on_preempted=lambda: preempted.append(1)
    )
    engine = SimulatedEngine(pool, lambda most: chance.randint(0, most))
    sequences = [
        sequence_of([chance.randint(0, 1)] * chance.randint(1, 16), chance.randint(8, 32), reader.outlet, lambda: None)
        for reader in readers
    ]
    for sequence in sequences:
        scheduler.submit(sequence)
    for _ in range(sum(sequence.most_tokens for sequence in sequences)):
        for sequence in sequences:
            if sequence.phase is Phase.FILLING:
                scheduler.start(sequence, None)
        if batch := scheduler.next_batch(timeout_s=0):
            engine.run(batch, 3, chunk_limit=6)
            scheduler.pass_done(batch)
            scheduler.check_integrity()
        for reader in readers:
            reader.catch_up()
    assert all(sequence.phase is Phase.ENDED for sequence in sequences)
    assert all(sequence.remaining_tokens == 0 for sequence in sequences)
    assert scheduler.blocks_used == 0
    if overcommit != 2.0:
        assert (len(preempted) > 0) == (overcommit > 1.0)
