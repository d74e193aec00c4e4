"""A batch: many requests, answered side by side, none lost and none answered twice."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from headrace.answers import Answers
from headrace.client import AsyncClient
from headrace.client_status import async_statuses
from headrace.errors import CallError, InputError, ResourceExhausted, Unavailable
from headrace.job_input import JobFile
from headrace.job_line import Job
from headrace.job_output import Answer, output_line
from headrace.pace import Pace
from headrace.report import BatchReport, Tally, batch_report
from headrace.retry import RetryPolicy
from headrace.target import Target, name_of, replicas
from headrace.tls import Tls, metadata_of
from headrace.types import Chunk, ServerStatus

CONCURRENCY_PER_REPLICA = 8
"""Where the search for the best begins."""
SHIFT_S = 8 * 3600.0
TIMEOUT_S = 3600.0

Ask = Callable[[Sequence[str]], Awaitable[tuple[ServerStatus, ...]]]
"""Asks the services at some addresses how they are."""

PATIENCE = RetryPolicy(attempts=8, first_delay_s=1.0, longest_delay_s=30.0)
"""For a job whose answer broke off halfway or found the queue full: a batch can wait, and start a line anew."""


class Progress(Protocol):
    """Is told what happens, as it happens."""

    def started(self, jobs: int, kept: int, failed: int) -> None:
        """Of so many jobs, so many were answered by an earlier run, and so many failed there and are left alone."""

    def generated(self, tokens: int) -> None:
        """New tokens came, for any of the jobs."""

    def finished(self, answer: Answer) -> None:
        """A job is answered, or has failed for good."""


async def run_batch(
    jobs: JobFile,
    out: Path,
    *,
    target: Target,
    progress: Progress,
    tls: Tls | None = None,
    metadata: Mapping[str, str] | None = None,
    addresses: Sequence[str] | None = None,
    concurrency: int | None = None,
    timeout_s: float | None = TIMEOUT_S,
    shift_s: float = SHIFT_S,
    patience: RetryPolicy = PATIENCE,
    errors: Path | None = None,
    ordered: bool = True,
    retry_failed: bool = False,
) -> BatchReport:
    """Answers all jobs, and writes the answers to `out` and what failed to the file of errors.

    Interrupted at any moment, even killed, it continues when run again (see `headrace.answers`).

    Args:
        jobs: what to answer.
        out: the file to write.
        target: the decode services.
        progress: is told what happens.
        tls, metadata: as clients take them.
        addresses: all services to count in the report; by default the decode services.
        concurrency: jobs under way at a time; by default what turns out to be best (see `headrace.pace`).
        timeout_s: deadline of each try of a job; None sets none.
        shift_s: length of the shift that the report projects to.
        patience: how often a job that met a full queue or a dying replica is started anew.
        errors, ordered, retry_failed: as `Answers` takes them.

    Raises:
        InputError: a file cannot be written, the input changed, or the replicas serve different models.
        CallError: a service does not answer before the first job, or none answers any more.
    """
    decodes = replicas(target)
    addresses = addresses or decodes
    tls = tls.naming(name_of(target)) if tls else None
    ask = partial(async_statuses, tls=tls, metadata=metadata_of(metadata))
    before = await ask(addresses)
    digest = _one_digest(before)
    pace = Pace(concurrency or CONCURRENCY_PER_REPLICA * len(decodes), fixed=concurrency is not None)
    async with AsyncClient(target, timeout_s=timeout_s, tls=tls, metadata=metadata) as client:
        with Answers(out, jobs, digest, errors=errors, ordered=ordered, retry_failed=retry_failed) as answers:
            left_alone = answers.failures
            kept = len(answers) - left_alone
            progress.started(len(jobs), kept, left_alone)
            run = _Run(
                jobs, answers, answers.pending(), client, ask, decodes, digest, progress, patience, pace, Tally()
            )
            begin_s = time.monotonic()
            await run.to_the_end()
            wall_s = max(time.monotonic() - begin_s, 1e-6)
            answers.publish()
            return batch_report(
                run.tally,
                kept=kept,
                left_alone=left_alone,
                wall_s=wall_s,
                shift_s=shift_s,
                before=before,
                after=await _reachable(ask, addresses),
            )


@dataclass
class _Run:
    """The work of one batch: as many workers as the pace allows, each with one job at a time."""

    jobs: JobFile
    answers: Answers
    pending: Iterator[int]
    client: AsyncClient
    ask: Ask
    decodes: Sequence[str]
    model_digest: str
    progress: Progress
    patience: RetryPolicy
    pace: Pace
    tally: Tally = field(default_factory=Tally)
    workers: int = 0

    async def to_the_end(self) -> None:
        """Answers every pending job; the first error of the batch itself cancels the rest and is raised as it is."""
        try:
            async with asyncio.TaskGroup() as group:
                self._staff(group)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def _staff(self, group: asyncio.TaskGroup) -> None:
        while self.workers < self.pace.limit and (index := next(self.pending, None)) is not None:
            self.workers += 1
            group.create_task(self._work(group, index))

    async def _work(self, group: asyncio.TaskGroup, first: int) -> None:
        index: int | None = first
        while index is not None:
            job = self.jobs[index]
            self._keep(index, job, await self._answer(job))
            self.pace.finished()
            self._staff(group)
            index = next(self.pending, None) if self.workers <= self.pace.limit else None
        self.workers -= 1

    def _keep(self, index: int, job: Job, answer: Answer) -> None:
        line = output_line(
            job,
            answer,
            key=self.jobs.key(index, self.model_digest),
            model_digest=self.model_digest,
            created_s=int(time.time()),
        )
        self.answers.append(index, line, failed="error" in answer)
        self.tally.add(answer)
        self.progress.finished(answer)

    async def _answer(self, job: Job) -> Answer:
        failures = 0
        while True:
            try:
                return await self._stream(job)
            except CallError as error:
                failures += 1
                if isinstance(error, ResourceExhausted):
                    self.pace.refused()
                if not isinstance(error, Unavailable | ResourceExhausted) or failures >= self.patience.attempts:
                    await self._require_service(error)
                    return {"id": job.id, "error": {"status": error.status, "message": error.message}}
            await asyncio.sleep(self.patience.delay_s(failures))

    async def _require_service(self, error: CallError) -> None:
        """That no service is left is no fault of a job: it ends the batch, rather than failing what is left of it."""
        if isinstance(error, Unavailable) and not await _reachable(self.ask, self.decodes):
            raise Unavailable(f"no decode service answers any more, and this batch stops here: {error.message}")

    async def _stream(self, job: Job) -> Answer:
        """Streams, rather than completes, so that progress shows while long answers are on their way."""
        text: list[str] = []
        logprobs: list[Answer] = []
        async with self.client.generate(**job.options, request_id=job.id) as generation:
            async for chunk in generation:
                text.append(chunk.text)
                logprobs += _logprobs(chunk)
                self.pace.generated(len(chunk.token_ids))
                self.progress.generated(len(chunk.token_ids))
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


async def _reachable(ask: Ask, addresses: Sequence[str]) -> tuple[ServerStatus, ...]:
    """The status of those that still answer: the answers are safe, whatever became of a service since."""
    asked = await asyncio.gather(*(ask([address]) for address in addresses), return_exceptions=True)
    return tuple(status for answer in asked if not isinstance(answer, BaseException) for status in answer)
