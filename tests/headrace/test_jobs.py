"""Batches against a scripted decode service."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace.errors import InputError, Unavailable
from headrace.job_input import JobFile, read_jobs
from headrace.job_line import Job
from headrace.job_output import Answer
from headrace.jobs import run_batch
from headrace.retry import RetryPolicy
from tests.headrace.fake_decode import DIGEST, FakeDecode, chunk, echo, failing, header, served

JOBS = tuple(Job(f"job-{number}", {"prompt": f"Water {number}"}) for number in range(20))
PATIENCE = RetryPolicy(attempts=3, first_delay_s=0.0)


class Seen:
    """A progress that remembers."""

    def __init__(self) -> None:
        self.kept = 0
        self.tokens = 0
        self.done: list[str] = []
        self.one_done = asyncio.Event()

    def started(self, jobs: int, kept: int, failed: int) -> None:
        self.kept = kept

    def generated(self, tokens: int) -> None:
        self.tokens += tokens

    def finished(self, answer: Answer) -> None:
        self.done.append(answer["id"])
        self.one_done.set()


def job_file(folder: Path, jobs: Sequence[Job] = JOBS) -> JobFile:
    """The jobs in a file of the simple form, checked."""
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps({"id": job.id, **job.options}) + "\n" for job in jobs))
    return read_jobs(path)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_every_job_is_answered_in_order_with_counts_and_times(tmp_path: Path) -> None:
    out, seen = tmp_path / "out.jsonl", Seen()
    async with served(FakeDecode()) as address:
        report = await run_batch(job_file(tmp_path), out, target=address, progress=seen)
    answers = read(out)
    assert [(answer["id"], answer["text"]) for answer in answers] == [(job.id, job.options["prompt"]) for job in JOBS]
    assert set(answers[0]) == {"id", "text", "finish_reason", "usage", "timings"}
    assert answers[0]["usage"]["completion_tokens"] == 4
    assert answers[0]["timings"]["first_token_ms"] == 3.0
    assert (seen.tokens, sorted(seen.done)) == (80, sorted(job.id for job in JOBS))
    assert (report.done, report.failed, report.kept) == (20, 0, 0)


async def test_log_probabilities_are_written_where_a_job_asks_for_them(tmp_path: Path) -> None:
    out, asking = tmp_path / "out.jsonl", {"prompt": "Water", "logprobs": True, "top_logprobs": 1}
    async with served(FakeDecode()) as address:
        await run_batch(job_file(tmp_path, (Job("a", asking), JOBS[0])), out, target=address, progress=Seen())
    with_them, without = read(out)
    assert with_them["logprobs"] == [{"token_id": n, "logprob": -0.5, "top": [[9, -0.25]]} for n in (1, 2, 3, 4)]
    assert "logprobs" not in without


async def test_the_report_sums_requests_and_what_the_run_added_to_the_services_totals(tmp_path: Path) -> None:
    async with served(FakeDecode()) as address:
        report = await run_batch(
            job_file(tmp_path), tmp_path / "out.jsonl", target=address, progress=Seen(), shift_s=3600
        )
    assert (report.prompt_tokens, report.generated_tokens) == (60, 80)
    assert report.accepted_per_pass == pytest.approx(1.0)
    assert report.acceptance_rate == pytest.approx(1 / 3)
    (service,) = report.services
    assert (service.address, service.passes, service.generated_tokens, service.streamed_bytes) == (
        address,
        20,
        80,
        20_000,
    )
    assert report.tokens_per_pass == pytest.approx(4.0)
    assert report.streamed_bytes == 20_000
    assert report.reports_per_shift == pytest.approx(20 / report.wall_s * 3600)


async def test_no_more_jobs_are_under_way_than_allowed(tmp_path: Path) -> None:
    under_way = most = 0

    async def counting(request: Any, context: Any) -> AsyncIterator[Any]:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        async for event in echo(request, context):
            yield event
            await asyncio.sleep(0)
        under_way -= 1

    async with served(FakeDecode(counting)) as address:
        await run_batch(job_file(tmp_path), tmp_path / "out.jsonl", target=address, progress=Seen(), concurrency=3)
    assert 1 < most <= 3


async def test_a_failed_job_goes_to_the_errors_and_is_tried_again_when_that_is_asked_for(tmp_path: Path) -> None:
    out, errors = tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl"
    fake = FakeDecode(failing(grpc.StatusCode.INVALID_ARGUMENT))
    async with served(fake) as address:
        report = await run_batch(job_file(tmp_path), out, target=address, progress=Seen())
        assert (report.done, report.failed) == (19, 1)
        (failed,) = read(errors)
        assert failed == {"id": failed["id"], "error": {"status": "INVALID_ARGUMENT", "message": "as scripted"}}
        assert [answer["id"] for answer in read(out)] == [job.id for job in JOBS if job.id != failed["id"]]
        left = await run_batch(job_file(tmp_path), out, target=address, progress=Seen())
        assert (left.done, left.failed, left.kept, left.left_alone, len(fake.requests)) == (0, 0, 19, 1, 20)
        assert read(errors) == [failed]
        again = await run_batch(job_file(tmp_path), out, target=address, progress=Seen(), retry_failed=True)
    assert (again.done, again.failed, again.kept, again.left_alone) == (1, 0, 19, 0)
    assert [answer["id"] for answer in read(out)] == [job.id for job in JOBS]
    assert not errors.exists()


async def test_answers_come_in_the_order_they_were_finished_where_that_is_asked_for(tmp_path: Path) -> None:
    out, seen, others_done = tmp_path / "out.jsonl", Seen(), asyncio.Event()

    async def first_one_last(request: Any, context: Any) -> AsyncIterator[Any]:
        if request.request_id == "job-0":
            await others_done.wait()
        elif len(seen.done) == len(JOBS) - 2:
            others_done.set()
        async for event in echo(request, context):
            yield event

    async with served(FakeDecode(first_one_last)) as address:
        await run_batch(job_file(tmp_path), out, target=address, progress=seen, concurrency=2, ordered=False)
    assert [answer["id"] for answer in read(out)] == seen.done
    assert seen.done[0] != "job-0"


async def test_a_service_that_dies_for_good_ends_the_batch_and_fails_no_job(tmp_path: Path) -> None:
    out, dead = tmp_path / "out.jsonl", asyncio.Event()

    async def dying(request: Any, context: Any) -> AsyncIterator[Any]:
        if len(fake.requests) > 5:
            dead.set()
            await asyncio.Event().wait()
        async for event in echo(request, context):
            yield event

    fake = FakeDecode(dying)
    async with served(fake) as address:
        arguments = {"target": address, "progress": Seen(), "concurrency": 1, "patience": RetryPolicy(attempts=1)}
        batch = asyncio.create_task(run_batch(job_file(tmp_path), out, **arguments))
        await dead.wait()
    with pytest.raises(Unavailable, match="no decode service answers any more"):
        await batch
    assert not out.exists()
    assert not any(record["failed"] for record in read(tmp_path / "out.jsonl.partial"))
    async with served(FakeDecode()) as address:
        report = await run_batch(job_file(tmp_path), out, target=address, progress=Seen())
    assert (report.done, report.kept) == (15, 5)


async def test_openai_lines_are_answered_in_the_shape_of_openais_batches(tmp_path: Path) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = {"model": "m", "messages": [{"role": "user", "content": "Water"}], "logprobs": True, "top_logprobs": 1}
    lines = [
        {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"custom_id": "t", "method": "POST", "url": "/v1/completions", "body": {"prompt": "River", "logprobs": 1}},
        {"custom_id": "f", "method": "POST", "url": "/v1/completions", "body": {"prompt": "fails"}},
        {"id": "s", "prompt": "Simple"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    async def one_fails(request: Any, context: Any) -> AsyncIterator[Any]:
        if request.request_id == "f":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "as scripted")
        async for event in echo(request, context):
            yield event

    async with served(FakeDecode(one_fails)) as address:
        await run_batch(read_jobs(path), out, target=address, progress=Seen())
    chat_line, text_line, simple_line = read(out)
    assert (simple_line["id"], simple_line["text"]) == ("s", "Simple")
    assert [(line["custom_id"], line["error"]) for line in (chat_line, text_line)] == [("c", None), ("t", None)]
    assert [line["response"]["status_code"] for line in (chat_line, text_line)] == [200, 200]
    body = chat_line["response"]["body"]
    assert (body["object"], body["model"], body["usage"]["total_tokens"]) == ("chat.completion", "m", 7)
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Water"}
    assert choice["finish_reason"] == "stop"
    place = choice["logprobs"]["content"][3]
    assert (place["token"], place["logprob"], place["top_logprobs"][0]["token"]) == ("token_id:4", -0.5, "token_id:9")
    body = text_line["response"]["body"]
    assert (body["object"], body["model"], body["choices"][0]["text"]) == ("text_completion", DIGEST, "River")
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [{"token_id:9": -0.25}] * 4
    (failed,) = read(tmp_path / "out.errors.jsonl")
    assert (failed["custom_id"], failed["response"]) == ("f", None)
    assert failed["error"] == {"code": "INVALID_ARGUMENT", "message": "as scripted"}


async def test_a_full_queue_and_an_answer_that_broke_off_are_tried_again(tmp_path: Path) -> None:
    codes = [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE]
    out = tmp_path / "out.jsonl"
    script = failing(*codes, after=lambda request: [header(request), chunk("Wa", 1)])
    async with served(FakeDecode(script)) as address:
        report = await run_batch(job_file(tmp_path, JOBS[:1]), out, target=address, progress=Seen(), patience=PATIENCE)
    assert report.failed == 0
    assert [answer["text"] for answer in read(out)] == ["Water 0"]


async def test_a_cancelled_batch_goes_on_where_it_stopped(tmp_path: Path) -> None:
    out, seen = tmp_path / "out.jsonl", Seen()
    proceed = asyncio.Event()

    async def first_one_only(request: Any, context: Any) -> AsyncIterator[Any]:
        if request.request_id != "job-0":
            await proceed.wait()
        async for event in echo(request, context):
            yield event

    fake = FakeDecode(first_one_only)
    async with served(fake) as address:
        batch = asyncio.create_task(run_batch(job_file(tmp_path), out, target=address, progress=seen, concurrency=4))
        await seen.one_done.wait()
        batch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await batch
        await fake.cancelled.wait()
        assert not out.exists()
        proceed.set()
        fake.requests.clear()
        report = await run_batch(job_file(tmp_path), out, target=address, progress=seen)
    assert (report.done, report.kept, seen.kept) == (19, 1, 1)
    assert "job-0" not in {request.request_id for request in fake.requests}
    assert [answer["id"] for answer in read(out)] == [job.id for job in JOBS]


async def test_answers_of_another_model_are_not_kept(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    async with served(FakeDecode(failing(grpc.StatusCode.INTERNAL))) as address:
        await run_batch(job_file(tmp_path), out, target=address, progress=Seen())
    async with served(FakeDecode(digest="another")) as address:
        assert (await run_batch(job_file(tmp_path), out, target=address, progress=Seen())).kept == 0


async def test_replicas_of_different_models_are_refused(tmp_path: Path) -> None:
    async with served(FakeDecode()) as one, served(FakeDecode(digest="another")) as two:
        with pytest.raises(InputError, match="different models"):
            await run_batch(job_file(tmp_path), tmp_path / "out.jsonl", target=[one, two], progress=Seen())


async def test_a_service_that_does_not_answer_is_told_before_any_work(tmp_path: Path) -> None:
    async with served(FakeDecode()) as gone:
        pass
    with pytest.raises(Unavailable, match=gone):
        await run_batch(job_file(tmp_path), tmp_path / "out.jsonl", target=gone, progress=Seen())
    assert "out.jsonl.partial" not in os.listdir(tmp_path)
