"""The examples, run as a reader would run them, against a scripted decode service."""

from __future__ import annotations

import asyncio
import shutil
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import grpc
import pytest

from tests.headrace.fake_decode import FakeDecode, failing, served

EXAMPLES = Path(__file__).parents[2] / "examples"


async def run(*command: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE, cwd=EXAMPLES)
    stdout, stderr = await process.communicate()
    return process.returncode, stdout.decode(), stderr.decode()


@pytest.fixture(params=["stream.py", "stub_client.py", "node/client.js"])
def example(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The command that runs it."""
    if request.param.endswith(".py"):
        return sys.executable, request.param
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node is not installed")
    if not (EXAMPLES / "node/node_modules").is_dir():
        pytest.skip("the packages of the Node example are missing; run npm ci in examples/node, as .ci/run does")
    return node, request.param


async def test_it_streams_an_answer_and_tells_what_it_took(example: tuple[str, ...]) -> None:
    fake = FakeDecode()
    async with served(fake) as address:
        code, stdout, stderr = await run(*example, address, "How high is the water?")
    assert (code, stderr) == (0, "")
    answer, took = stdout.splitlines()
    assert answer == "How high is the water?"  # the service echoes
    assert "4" in took
    (asked,) = fake.requests
    assert [(turn.role, turn.content) for turn in asked.prompt.chat.messages] == [("user", "How high is the water?")]
    assert asked.stopping.max_tokens == 128


async def test_it_tells_why_there_is_no_answer(example: tuple[str, ...]) -> None:
    async with served(FakeDecode(failing(grpc.StatusCode.DATA_LOSS))) as address:
        code, _, stderr = await run(*example, address, "How high is the water?")
    assert code == 1
    assert "as scripted" in stderr
    assert "Traceback" not in stderr
