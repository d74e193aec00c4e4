"""`headrace doctor`: whether this machine is ready, and what to change."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from headrace.cli import _options as options
from headrace.doctor import Finding, Level, examine
from headrace.errors import InputError

_STYLES: dict[Level, str] = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "red"}


def doctor(
    pack: Annotated[Path | None, typer.Argument(help="A pack to check as well; its disk is the one measured.")] = None,
    folder: Annotated[Path, typer.Option(help="Without a pack: the folder whose disk is measured.")] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine, and a pack: instructions, threads, memory, versions, ports, filesystem, disk.

    Takes a few seconds; writes 128 MB for a moment where no pack is given. Exit code 0: it will work, if perhaps slower
    than it could. 1: there is a problem. 2: there is no such folder.
    """
    with options.told_errors():
        place = pack or folder
        if not place.is_dir():
            raise InputError(f"{place} is no folder; name a pack, or --folder where packs are to lie")
        with options.messages.status("checking, and reading the disk for a moment …"):
            findings = list(examine(place, is_pack=pack is not None))
    problems = sum(finding.level == "problem" for finding in findings)
    if as_json:
        print(json.dumps({"problems": problems, "findings": list(map(dataclasses.asdict, findings))}, indent=2))
    else:
        Console(highlight=False).print(_table(findings))
    if problems:
        raise typer.Exit(1)


def _table(findings: list[Finding]) -> Table:
    table = Table("", "check", "found, and what to change", title="Doctor", title_justify="left", box=None)
    for finding in findings:
        style = _STYLES[finding.level]
        advice = f"\n[{style}]→ [/]{_plain(finding.advice)}" if finding.advice else ""
        table.add_row(f"[{style}]{finding.level}[/]", finding.check, _plain(finding.found) + advice)
    return table


def _plain(text: str) -> str:
    """So that brackets are not taken for styles."""
    return text.replace("[", "\\[")
