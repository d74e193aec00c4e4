"""A batch: many requests, answered side by side, none lost and none answered twice."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from headrace.answers import Answer, Answers
from headrace.client import AsyncClient
from headrace.client_status import async_statuses
from headrace.errors import CallError, InputError, ResourceExhausted, Unavailable
from headrace.job_input import Job
from headrace.report import BatchReport, batch_report
from headrace.retry import RetryPolicy
from headrace.target import Target, replicas
from headrace.types import Chunk, ServerStatus

CONCURRENCY_PER_REPLICA = 8
SHIFT_S = 8 * 3600.0
TIMEOUT_S = 3600.0

PATIENCE = RetryPolicy(attempts=8, first_delay_s=1.0, longest_delay_s=30.0)
"""For a job whose answer broke off halfway or found the queue full: a batch can wait, and start a line anew."""


class Progress(Protocol):
    """Is told what happens, as it happens."""

    def started(self, jobs: int, kept: int) -> None:
        """Of so many jobs, so many were answered by an earlier run."""

    def generated(self, tokens: int) -> None:
        """New tokens came, for any of the jobs."""

    def finished(self, answer: Answer) -> None:
        """A job is answered, or has failed for good."""


async def run_batch(
    jobs: Sequence[Job],
    out: Path,
    *,
    target: Target,
    progress: Progress,
    addresses: Sequence[str] | None = None,
    concurrency: int | None = None,
    timeout_s: float | None = TIMEOUT_S,
    shift_s: float = SHIFT_S,
    patience: RetryPolicy = PATIENCE,
) -> BatchReport:
    """Answers all jobs and writes the answers to `out`, in the order of the jobs.

    Interrupted at any moment, even killed, it continues when run again (see `headrace.answers`).

    Args:
        jobs: what to answer, ids unique.
        out: the file to write.
        target: the decode services.
        progress: is told what happens.
        addresses: all services to count in the report; by default the decode services.
        concurrency: jobs under way at a time; by default 8 for each decode service.
        timeout_s: deadline of each try of a job; None sets none.
        shift_s: length of the shift that the report projects to.
        patience: how often a job that met a full queue or a dying replica is started anew.

    Raises:
        InputError: `out` cannot be written, or the replicas serve different models.
        CallError: a service does not answer before the first job.
    """
    decodes = replicas(target)
    addresses = addresses or decodes
    before = await async_statuses(addresses)
    digest = _one_digest(before)
    async with AsyncClient(target, timeout_s=timeout_s) as client:
        with Answers(out, {job.id: job.key(digest) for job in jobs}) as answers:
            kept = {answer["id"] for answer in answers}
            progress.started(len(jobs), len(kept))
            begin_s = time.monotonic()
            waiting = iter([job for job in jobs if job.id not in kept])
            workers = concurrency or CONCURRENCY_PER_REPLICA * len(decodes)
            await _all(_work(waiting, client, answers, progress, patience) for _ in range(workers))
            wall_s = max(time.monotonic() - begin_s, 1e-6)
            answers.publish()
            return batch_report(
                [answer for answer in answers if answer["id"] not in kept],
                kept=len(kept),
                wall_s=wall_s,
                shift_s=shift_s,
                before=before,
                after=await _reachable(addresses),
            )


async def _all(work: Iterable[Coroutine[None, None, None]]) -> None:
    """Runs all to their end; the first error cancels the rest and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(one)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _work(
    waiting: Iterator[Job], client: AsyncClient, answers: Answers, progress: Progress, patience: RetryPolicy
) -> None:
    for job in waiting:
        answer = await _answer(job, client, progress, patience)
        answers.append(answer)
        progress.finished(answer)


async def _answer(job: Job, client: AsyncClient, progress: Progress, patience: RetryPolicy) -> Answer:
    failures = 0
    while True:
        try:
            return await _stream(job, client, progress)
        except CallError as error:
            failures += 1
            if not isinstance(error, Unavailable | ResourceExhausted) or failures >= patience.attempts:
                return {"id": job.id, "error": {"status": error.status, "message": error.message}}
        await asyncio.sleep(patience.delay_s(failures))


async def _stream(job: Job, client: AsyncClient, progress: Progress) -> Answer:
    """Streams, rather than completes, so that progress shows while long answers are on their way."""
    text: list[str] = []
    logprobs: list[Answer] = []
    async with client.generate(**job.options, request_id=job.id) as generation:
        async for chunk in generation:
            text.append(chunk.text)
            logprobs += _logprobs(chunk)
            progress.generated(len(chunk.token_ids))
    result = generation.result
    assert result is not None  # a stream without one raises
    return {
        "id": job.id,
        "text": "".join(text),
        "finish_reason": result.finish_reason,
        "usage": dataclasses.asdict(result.usage),
        "timings": {name: round(ms, 3) for name, ms in dataclasses.asdict(result.timings).items()},
        **({"logprobs": logprobs} if job.options.get("logprobs") else {}),
    }


def _logprobs(chunk: Chunk) -> list[Answer]:
    return [
        {
            "token_id": token_id,
            "logprob": round(place.logprob, 6),
            "top": [[other, round(logprob, 6)] for other, logprob in place.top],
        }
        for token_id, place in zip(chunk.token_ids, chunk.logprobs, strict=False)
    ]


def _one_digest(services: Sequence[ServerStatus]) -> str:
    digests = {service.model_digest for service in services}
    if len(digests) > 1:
        found = ", ".join(f"{service.address}: {service.model_digest[:12]}" for service in services)
        raise InputError(f"the services serve different models ({found}); answers would mix; give one model's replicas")
    return digests.pop()


async def _reachable(addresses: Sequence[str]) -> tuple[ServerStatus, ...]:
    """The status of those that still answer: the answers are safe, whatever became of a service since."""
    asked = await asyncio.gather(*(async_statuses([address]) for address in addresses), return_exceptions=True)
    return tuple(status for answer in asked if not isinstance(answer, BaseException) for status in answer)
