"""The commands as processes of their own."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process


async def start(*arguments: str) -> Process:
    """Starts `headrace ARGUMENTS`, with pipes to all its streams."""
    program = "from headrace.cli import main; main()"
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, *arguments, stdin=PIPE, stdout=PIPE, stderr=PIPE
    )


async def run(*arguments: str, stdin: str = "") -> tuple[int | None, str, str]:
    """Its exit code, and what it wrote to standard output and standard error."""
    process = await start(*arguments)
    stdout, stderr = await process.communicate(stdin.encode())
    return process.returncode, stdout.decode(), stderr.decode()
