"""The pages about the command line and the client: they name everything, and what they show works."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import typer

from headrace.cli import app
from tests.headrace.fake_decode import FakeDecode, chunk, header, result, served

ROOT = Path(__file__).parents[2]
CLI, CLIENT = ROOT / "docs/cli.md", ROOT / "docs/client.md"
ADDRESS = "127.0.0.1:50051"
"""As the pages write it."""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


COMMANDS = [shlex.split(line)[1:] for block in blocks(CLI, "sh") for line in block.splitlines()]
OWN_SECTION = ("serve", "generate", "batch", "score", "doctor")
"""Commands that the page describes itself; others have pages of their own."""


async def headrace(request: Any, context: Any) -> AsyncIterator[Any]:
    """Knows one thing."""
    yield header(request)
    yield chunk("A channel that leads water to a mill.", 1, 2)
    yield result()


def test_the_page_names_every_command_and_the_options_of_those_it_describes() -> None:
    page, group = CLI.read_text(), typer.main.get_command(app)
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert set(OWN_SECTION) == set(sections)
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        assert f"`{name}`" in page, name
        if name in OWN_SECTION:
            # A batch starts services with the options of serve.
            text = sections[name] + (sections["serve"] if name == "batch" else "")
            options = [option.opts[0] for option in command.params if option.opts[0].startswith("--")]
            assert [option for option in options if option not in text and option != "--help"] == []


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_every_command_on_the_page_is_one(arguments: list[str]) -> None:
    command = typer.main.get_command(app).commands[arguments[0]]  # type: ignore[attr-defined]
    command.make_context(arguments[0], arguments[1:]).close()


CALLS = [arguments for arguments in COMMANDS if ADDRESS in arguments]


@pytest.mark.parametrize("arguments", CALLS, ids=" ".join)
async def test_commands_that_call_services_do_what_they_say(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    async with served(FakeDecode(headrace)) as address:
        given = [argument.replace(ADDRESS, address) for argument in arguments]
        program = [sys.executable, "-c", "from headrace.cli import main; main()", *given]
        process = await asyncio.create_subprocess_exec(*program, stdin=PIPE, stdout=PIPE, stderr=PIPE, cwd=tmp_path)
        stdout, stderr = await process.communicate(b"What is a headrace?\n")
    assert process.returncode == 0, stderr
    told = "perplexity" if arguments[0] == "score" else "A channel that leads water to a mill."
    assert told in stdout.decode() + written(tmp_path)


def written(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("out/answers.jsonl"))


@pytest.mark.parametrize("block", blocks(CLIENT, "python"), ids=lambda block: block.splitlines()[0])
async def test_programs_on_the_page_run(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    async with served(FakeDecode(headrace)) as address:
        await asyncio.to_thread(exec, block, {"target": address, "__name__": "page"})
    printed = capsys.readouterr().out
    shown = re.findall(r"print\(.*\)  # (.*)", block)
    assert all(text in printed for text in shown)
