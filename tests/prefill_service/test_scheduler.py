"""Which prompts share a pass."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import pytest

from prefill_service.scheduler import PromptJob, PromptScheduler
from shared.errors import CapacityError, UnavailableError
from shared.outlet import Outlet


class MakeJob(Protocol):
    """A job of so many tokens."""

    def __call__(self, tokens: int, **fields: Any) -> PromptJob: ...


@pytest.fixture
async def make_job() -> MakeJob:
    return lambda tokens, **fields: PromptJob(f"{tokens} tokens", range(tokens), Outlet(), **fields)


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def scheduler_with(
    *jobs: PromptJob, pass_tokens: int = 10, queue_limit: int = 8, clock: Clock | None = None
) -> PromptScheduler:
    scheduler = PromptScheduler(pass_tokens, queue_limit, clock or Clock())
    for job in jobs:
        scheduler.submit(job)
    return scheduler


async def test_the_oldest_prompts_that_fit_a_pass_together_share_it(make_job: MakeJob) -> None:
    jobs = [make_job(tokens) for tokens in (4, 6, 1, 9)]
    scheduler = scheduler_with(*jobs)
    assert scheduler.queued == 4
    assert scheduler.next_batch() == jobs[:2]
    assert scheduler.next_batch() == jobs[2:]
    assert scheduler.queued == 0


async def test_a_prompt_longer_than_a_pass_goes_alone_and_is_not_overtaken(make_job: MakeJob) -> None:
    short, long, later = make_job(2), make_job(30), make_job(1)
    scheduler = scheduler_with(short, long, later)
    assert [scheduler.next_batch() for _ in range(3)] == [[short], [long], [later]]


async def test_tokens_that_need_not_be_computed_take_no_room_in_a_pass(make_job: MakeJob) -> None:
    jobs = [make_job(tokens) for tokens in (30, 9, 8, 4)]
    known = {30: 28, 9: 0, 8: 7, 4: 0}
    scheduler = scheduler_with(*jobs)
    assert scheduler.next_batch(known_tokens=lambda job: known[len(job.token_ids)]) == jobs[:1]
    assert scheduler.next_batch(known_tokens=lambda job: known[len(job.token_ids)]) == jobs[1:3]


async def test_a_cancelled_prompt_that_waits_is_forgotten(make_job: MakeJob) -> None:
    first, second = make_job(6), make_job(6)
    scheduler = scheduler_with(first, second)
    scheduler.cancel(first)
    assert first.cancelled
    assert scheduler.queued == 1
    assert scheduler.next_batch() == [second]


async def test_a_full_queue_refuses_with_its_length(make_job: MakeJob) -> None:
    scheduler = scheduler_with(make_job(1), make_job(1), queue_limit=2)
    with pytest.raises(CapacityError, match="2 prompts are waiting already"):
        scheduler.submit(make_job(1))


async def test_a_closed_scheduler_refuses_serves_what_waits_and_then_ends(make_job: MakeJob) -> None:
    waiting = make_job(3)
    scheduler = scheduler_with(waiting)
    scheduler.close()
    with pytest.raises(UnavailableError, match="draining"):
        scheduler.submit(make_job(1))
    assert scheduler.next_batch() == [waiting]
    assert scheduler.next_batch() is None


async def test_a_wait_for_prompts_ends_with_the_first_one_or_with_its_time(make_job: MakeJob) -> None:
    scheduler = scheduler_with()
    assert scheduler.next_batch(timeout_s=0) == []
    taken = asyncio.create_task(asyncio.to_thread(scheduler.next_batch))
    job = make_job(2)
    scheduler.submit(job)
    assert await taken == [job]


async def test_a_higher_priority_goes_first_and_of_one_priority_the_oldest(make_job: MakeJob) -> None:
    jobs = [make_job(6, priority=priority) for priority in (0, -5, 7, 0, 7)]
    scheduler = scheduler_with(*jobs)
    assert [scheduler.next_batch() for _ in jobs] == [[jobs[index]] for index in (2, 4, 0, 3, 1)]


async def test_a_long_prompt_is_served_however_many_short_ones_keep_coming(make_job: MakeJob) -> None:
    long = make_job(30)
    scheduler = scheduler_with(make_job(4), long, queue_limit=100)
    taken = []
    for _ in range(3):
        for _ in range(5):
            scheduler.submit(make_job(2))
        taken.append(scheduler.next_batch())
    assert taken[1] == [long]


async def test_a_prompt_whose_deadline_has_passed_is_not_computed(make_job: MakeJob) -> None:
    clock = Clock()
    late, lasting = make_job(2, deadline_s=101.0), make_job(3, deadline_s=103.0)
    scheduler = scheduler_with(late, lasting, clock=clock)
    clock.now_s = 102.0
    assert scheduler.next_batch() == [lasting]
    assert (late.cancelled, scheduler.queued) == (True, 0)
    assert scheduler.still_wanted([lasting]) == [0]
    clock.now_s = 103.0
    assert scheduler.still_wanted([lasting]) == []
    assert lasting.cancelled


async def test_prompts_that_all_expire_leave_a_scheduler_that_goes_on_waiting(make_job: MakeJob) -> None:
    clock = Clock()
    scheduler = scheduler_with(make_job(2, deadline_s=99.0), clock=clock)
    assert scheduler.next_batch(timeout_s=0) == []
    scheduler.submit(make_job(2, deadline_s=99.0))
    scheduler.close()
    assert scheduler.next_batch() is None


async def test_queued_tokens_are_those_that_wait_or_are_being_computed(make_job: MakeJob) -> None:
    first, second, third = make_job(4), make_job(5), make_job(9)
    scheduler = scheduler_with(first, second, third)
    assert (scheduler.queued_tokens, scheduler.queued, scheduler.running) == (18, 3, 0)
    batch = scheduler.next_batch()
    assert batch == [first, second]
    assert (scheduler.queued_tokens, scheduler.queued, scheduler.running) == (18, 1, 2)
    scheduler.cancel(first)
    assert scheduler.still_wanted(batch) == [1]
    assert (scheduler.queued_tokens, scheduler.running) == (14, 1)
    scheduler.pass_done(batch)
    assert (scheduler.queued_tokens, scheduler.running) == (9, 0)


def after_a_pass(scheduler: PromptScheduler, clock: Clock, served: list[PromptJob]) -> None:
    """The scheduler's engine has just become free, after a pass of a second that served those."""
    for job in served:
        scheduler.submit(job)
    assert scheduler.next_batch() == served
    clock.now_s += 1.0
    scheduler.pass_done(served)


async def test_under_load_a_pass_waits_for_company_until_the_window_is_over(make_job: MakeJob) -> None:
    clock = Clock()
    scheduler = scheduler_with(clock=clock)
    after_a_pass(scheduler, clock, [make_job(1) for _ in range(3)])
    first, second = make_job(2), make_job(3)
    scheduler.submit(first)
    taken = asyncio.create_task(asyncio.to_thread(scheduler.next_batch))
    scheduler.submit(second)
    assert not taken.done()
    clock.now_s += 1.0
    assert await taken == [first, second]


async def test_a_pass_that_is_full_waits_for_nobody(make_job: MakeJob) -> None:
    clock = Clock()
    scheduler = scheduler_with(clock=clock)
    after_a_pass(scheduler, clock, [make_job(1) for _ in range(3)])
    jobs = [make_job(4), make_job(6)]
    for job in jobs:
        scheduler.submit(job)
    assert scheduler.next_batch() == jobs


async def test_draining_waits_for_nobody(make_job: MakeJob) -> None:
    clock = Clock()
    scheduler = scheduler_with(clock=clock)
    after_a_pass(scheduler, clock, [make_job(1) for _ in range(3)])
    job = make_job(2)
    scheduler.submit(job)
    taken = asyncio.create_task(asyncio.to_thread(scheduler.next_batch))
    scheduler.close()
    assert await taken == [job]


async def test_prompts_that_are_cancelled_while_others_are_waited_for_start_no_pass(make_job: MakeJob) -> None:
    clock = Clock()
    scheduler = scheduler_with(clock=clock)
    after_a_pass(scheduler, clock, [make_job(1) for _ in range(3)])
    job = make_job(2)
    scheduler.submit(job)
    taken = asyncio.create_task(asyncio.to_thread(scheduler.next_batch, 0))
    scheduler.cancel(job)
    clock.now_s += 1.0
    assert await taken == []
