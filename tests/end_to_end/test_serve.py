"""`headrace serve`: one colocated process, and an end that lets what runs finish."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from headrace.client import AsyncClient
from headrace.errors import Unavailable
from tests.end_to_end.stack import ONE_TRY

LONG = 200
"""Tokens of an answer that is still on its way when the services are told to stop."""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
async def test_a_colocated_service_answers_and_drains_when_it_is_told_to_stop(
    endless_pack: Path, how: signal.Signals
) -> None:
    program = "from headrace.cli import main; main()"
    arguments = ["serve", "--pack", str(endless_pack), "--memory", "1GiB", "--colocate", "--draft", "none", "--json"]
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, *arguments, stdout=PIPE, stderr=PIPE)
    assert process.stdout is not None
    found = json.loads(await process.stdout.readline())
    assert [service["stage"] for service in found["services"]] == ["decode"]
    async with AsyncClient(found["target"], retry=ONE_TRY) as client:
        stream = client.generate(token_ids=[5, 6, 7], max_tokens=LONG)
        tokens = len((await anext(stream)).token_ids)
        process.send_signal(how)
        async for chunk in stream:
            tokens += len(chunk.token_ids)
        _, stderr = await process.communicate()
        assert tokens == LONG
        with pytest.raises(Unavailable):
            await client.complete(token_ids=[5])
    assert process.returncode == 0, stderr
    assert b"Traceback" not in stderr
