"""The documentation: every command on a page is one, and does what the page says; programs run; links lead somewhere.

Commands that call services run here, against a service that knows a single answer. Those that work on packs, or start
services, are walked through page by page (`test_walks.py`, slow). The kinds that no test runs are `pages.ONLY_SHOWN`.
"""

from __future__ import annotations

import asyncio
import re
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import typer

from docs.plots_from_results import mark
from headrace.cli import app
from shared.metrics import Identity, Telemetry
from tests.headrace.fake_decode import FakeDecode, chunk, header, result, served
from tests.headrace.pages import ADDRESS, ALL, CALLS, ONLY_SHOWN, PAGES, ROOT, Shown, blocks, commands

CLI, CLIENT = ROOT / "docs/cli.md", ROOT / "docs/client.md"
OWN_SECTION = ("serve", "generate", "batch", "score", "status", "doctor")
"""Commands that the page describes itself; others have pages of their own."""


async def headrace(request: Any, context: Any) -> AsyncIterator[Any]:
    """Knows one thing."""
    yield header(request)
    yield chunk("A channel that leads water to a mill.", 1, 2)
    yield result()


def test_the_page_names_every_command_and_the_options_of_those_it_describes() -> None:
    page, group = CLI.read_text(), typer.main.get_command(app)
    sections = dict(re.findall(r"^## (.+)\n((?s:.*?))(?=^## |\Z)", page, re.MULTILINE))
    connection = sections.pop("Calling services")
    assert set(OWN_SECTION) == set(sections)
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        assert f"`{name}`" in page, name
        if name in OWN_SECTION:
            # A batch starts services with the options of serve.
            text = sections[name] + (sections["serve"] if name == "batch" else "")
            text += connection if f"`{name}`" in connection else ""
            options = [option.opts[0] for option in command.params if option.opts[0].startswith("--")]
            assert [option for option in options if option not in text and option != "--help"] == []


@pytest.mark.parametrize("shown", [shown for shown in ALL if shown.program == "headrace"], ids=str)
def test_every_command_on_a_page_is_one(shown: Shown) -> None:
    name, *arguments = shown.arguments
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    command.make_context(name, arguments).close()


@pytest.mark.parametrize("shown", CALLS, ids=str)
async def test_commands_that_call_services_do_what_they_say(shown: Shown, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    async with served(FakeDecode(headrace)) as address:
        given = [argument.replace(ADDRESS, address) for argument in shown.arguments]
        program = [sys.executable, "-c", "from headrace.cli import main; main()", *given]
        process = await asyncio.create_subprocess_exec(*program, stdin=PIPE, stdout=PIPE, stderr=PIPE, cwd=tmp_path)
        stdout, stderr = await process.communicate(b"What is a headrace?\n")
    assert process.returncode == 0, stderr
    told = {"score": "perplexity", "status": "serving"}.get(given[0], "A channel that leads water to a mill.")
    assert told in stdout.decode() + written(tmp_path)


def written(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("out/answers.jsonl"))


@pytest.mark.parametrize("shown", [shown for shown in ALL if shown.program in ONLY_SHOWN], ids=str)
def test_what_is_only_shown_is_there(shown: Shown) -> None:
    if shown.program == "make":
        targets = [word for word in shown.words[1:] if "=" not in word]
        assert [target for target in targets if f"\n{target}:" not in (ROOT / "Makefile").read_text()] == []
    elif shown.program == "python -m bench":
        source = (ROOT / f"{shown.words[2].replace('.', '/')}.py").read_text()
        options = [argument for argument in shown.arguments if argument.startswith("--")]
        assert [option for option in options if f'"{option}"' not in source] == []
    else:
        assert shown.words == (".", ".venv/bin/activate")


@pytest.mark.parametrize("block", blocks(CLIENT, "python"), ids=lambda block: block.splitlines()[0])
async def test_programs_on_the_page_run(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    async with served(FakeDecode(headrace)) as address:
        await asyncio.to_thread(exec, block, {"target": address, "__name__": "page"})
    printed = capsys.readouterr().out
    shown = re.findall(r"print\(.*\)  # (.*)", block)
    assert all(text in printed for text in shown)


def test_the_bengali_quickstart_has_the_commands_and_programs_of_the_english_one() -> None:
    english, bengali = ROOT / "docs/quickstart.md", ROOT / "docs/quickstart.bn.md"
    assert [shown.words for shown in commands(english)] == [shown.words for shown in commands(bengali)]
    assert blocks(english, "python") == blocks(bengali, "python")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith("http"):
            path, _, anchor = target.partition("#")
            linked = (page.parent / path).resolve() if path else page
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), target


def anchors(page: Path) -> set[str]:
    """Of headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "README.md").read_text()
    assert [page.name for page in PAGES[1:] if f"docs/{page.name}" not in index] == []


def test_every_metric_is_explained() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    identity = Identity(stage="decode", model_digest="d", scheme="int8", context_length=1, layers=1, budget_bytes=1)
    telemetry = Telemetry(identity)
    telemetry.record_request("completed")
    telemetry.record_failure("CapacityError")
    kinds = {"counter": "_total", "info": "_info"}
    names = [family.name + kinds.get(family.type, "") for family in telemetry.collect()]
    assert len(names) > 20
    assert [name for name in names if f"`{name}`" not in page] == []


def test_pictures_are_drawn_from_the_results_as_they_are_and_shown() -> None:
    shown = set(re.findall(r"\]\((plots/[^)]+)\)", (ROOT / "docs/performance.md").read_text()))
    drawn = sorted((ROOT / "docs/plots").glob("*.svg"))
    assert {f"plots/{picture.name}" for picture in drawn} == shown
    for picture in drawn:
        begin = picture.read_text().partition("<svg")[0]
        sources = [ROOT / name for name in re.findall(r"made from (\S+)", begin)]
        assert begin == "".join(f"{mark(source)}\n" for source in sources), f"{picture.name} is stale: run make plots"
        assert sources
