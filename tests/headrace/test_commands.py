"""The commands, as processes of their own, against a scripted decode service."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from headrace.cli import app
from tests.headrace.fake_decode import FakeDecode, echo, failing, hanging, served


async def start(*arguments: str) -> Process:
    program = "from headrace.cli import main; main()"
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, *arguments, stdin=PIPE, stdout=PIPE, stderr=PIPE
    )


async def run(*arguments: str, stdin: str = "") -> tuple[int | None, str, str]:
    process = await start(*arguments)
    stdout, stderr = await process.communicate(stdin.encode())
    return process.returncode, stdout.decode(), stderr.decode()


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"id": f"j{n}", "prompt": f"Water {n}"}) + "\n" for n in range(12)))
    return path


def ids(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


async def test_batch_answers_a_file_prints_a_table_and_writes_it_as_json(jobs: Path, tmp_path: Path) -> None:
    out, report = tmp_path / "out.jsonl", tmp_path / "report.json"
    async with served(FakeDecode()) as address:
        code, stdout, stderr = await run("batch", str(jobs), str(out), "--target", address, "--json", str(report))
    assert (code, stderr) == (0, "")
    assert ids(out) == [f"j{n}" for n in range(12)]
    rows = ("reports done", "accepted draft tokens per pass", "bytes streamed", f"decode {address}", "per 8 h shift")
    assert all(row in stdout for row in rows)
    assert json.loads(report.read_text())["generated_tokens"] == 48


async def test_a_batch_never_writes_over_its_own_requests(jobs: Path, tmp_path: Path) -> None:
    other_name = tmp_path / "link.jsonl"
    other_name.symlink_to(jobs)
    for out in (jobs, other_name):
        code, _, stderr = await run("batch", str(jobs), str(out), "--target", "127.0.0.1:1")
        assert (code, ids(jobs)) == (2, [f"j{n}" for n in range(12)])
        assert "is the file of requests" in stderr.replace("\n", " ")


async def test_batch_exits_with_1_when_a_line_failed(jobs: Path, tmp_path: Path) -> None:
    async with served(FakeDecode(failing(grpc.StatusCode.DATA_LOSS))) as address:
        code, _, stderr = await run("batch", str(jobs), str(tmp_path / "out.jsonl"), "--target", address)
    assert code == 1
    assert "DATA_LOSS: as scripted" in stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give either --target"),
        (("--target", "127.0.0.1:1", "--pack", "."), "give either --target"),
        (("--pack", "."), "need --memory"),
        (("--pack", "absent", "--memory", "1GiB"), "absent is no pack"),
        (("--pack", ".", "--memory", "1GiB", "--draft", "self"), "needs a draft pack"),
        (("--target", "localhost"), "has no port"),
        (("--target", "127.0.0.1:1", "--shift", "0h"), "longer than nothing"),
        (("--target", "127.0.0.1:1", "--concurrency", "0"), "--concurrency"),
    ],
)
def test_batch_says_what_is_wrong_with_its_options(
    jobs: Path, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    result = CliRunner().invoke(app, ["batch", str(jobs), str(tmp_path / "out.jsonl"), *arguments])
    assert result.exit_code == 2
    assert says in result.stderr


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
async def test_an_interrupted_batch_continues_without_losing_or_repeating_a_line(
    jobs: Path, tmp_path: Path, how: signal.Signals
) -> None:
    out = tmp_path / "out.jsonl"
    proceed, stuck = asyncio.Event(), asyncio.Event()

    async def half(request: Any, context: Any) -> AsyncIterator[Any]:
        if len(fake.requests) > 6:
            stuck.set()
            await proceed.wait()
        async for event in echo(request, context):
            yield event

    fake = FakeDecode(half)
    async with served(fake) as address:
        command = ("batch", str(jobs), str(out), "--target", address, "--concurrency", "1")
        first = await start(*command)
        await stuck.wait()
        first.send_signal(how)
        _, stderr = await first.communicate()
        assert first.returncode == (-signal.SIGKILL if how is signal.SIGKILL else 130), stderr
        assert b"Traceback" not in stderr
        assert not out.exists()
        proceed.set()
        code, _, stderr_again = await run(*command)
    assert code == 0
    assert "6 of 12 reports were answered by an earlier run" in stderr_again
    assert ids(out) == [f"j{n}" for n in range(12)]
    assert [request.request_id for request in fake.requests] == [f"j{n}" for n in [*range(7), *range(6, 12)]]


async def test_generate_streams_to_the_terminal(tmp_path: Path) -> None:
    async with served(FakeDecode()) as address:
        assert (await run("generate", "Water", "--target", address))[:2] == (0, "Water\n")
        code, stdout, stderr = await run("generate", "-", "--target", address, "--chat", stdin="How high?")
    assert (code, stdout) == (0, "How high?\n")
    assert "3 prompt tokens, 4 generated (stop)" in stderr


async def test_generate_shows_a_chunk_before_the_answer_ends_and_ctrl_c_cancels_the_call() -> None:
    fake = FakeDecode(hanging)
    async with served(fake) as address:
        process = await start("generate", "Water", "--target", address)
        assert process.stdout is not None
        assert await process.stdout.readexactly(3) == b"Wat"
        process.send_signal(signal.SIGINT)
        _, stderr = await process.communicate()
        await fake.cancelled.wait()
    assert process.returncode == 130
    assert b"Traceback" not in stderr


async def test_serve_tells_why_a_service_did_not_start(tmp_path: Path) -> None:
    code, _, stderr = await run("serve", "--pack", str(tmp_path), "--memory", "1GiB")
    assert code == 2
    assert stderr.startswith("error: prefill-0: ")
