"""Which prompts share a pass."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from prefill_service.scheduler import PromptJob, PromptScheduler
from shared.errors import CapacityError, UnavailableError
from shared.outlet import Outlet

MakeJob = Callable[[int], PromptJob]


@pytest.fixture
async def make_job() -> MakeJob:
    return lambda tokens: PromptJob(f"{tokens} tokens", range(tokens), Outlet())


def scheduler_with(*jobs: PromptJob, pass_tokens: int = 10, queue_limit: int = 8) -> PromptScheduler:
    scheduler = PromptScheduler(pass_tokens, queue_limit)
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
