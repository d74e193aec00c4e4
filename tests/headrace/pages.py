"""The pages of the documentation, and the commands and programs that they show."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


@dataclass(frozen=True)
class Shown:
    """A command on a page."""

    page: Path
    words: tuple[str, ...]
    exit_code: int = 0
    """As a comment behind it says."""

    def __str__(self) -> str:
        return f"{self.page.name}: {shlex.join(self.words)}"

    @property
    def program(self) -> str:
        """What kind of command it is: `headrace`, `python -m NAME`, or the first word."""
        if self.words[:2] == ("python", "-m"):
            return f"python -m {self.words[2].partition('.')[0]}"
        return self.words[0]

    @property
    def arguments(self) -> list[str]:
        """Behind the program; of a benchmark, behind its name."""
        return list(self.words[3:] if self.program.startswith("python -m") else self.words[1:])


def blocks(page: Path, language: str) -> list[str]:
    """The blocks of code of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[Shown]:
    """Every command of a page, in its order."""
    found = []
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                told = re.search(r"#.*exit code (\d)", line)
                found.append(Shown(page, tuple(words), int(told[1]) if told else 0))
    return found


ALL = [shown for page in PAGES for shown in commands(page)]
ADDRESS = "127.0.0.1:50051"
"""Of services that are called, as the pages write it."""
ONLY_SHOWN: Mapping[str, str] = {
    "make": "installs, or is what runs the tests; its targets are looked up",
    ".": "enters the environment that the tests run in",
    "python -m bench": "takes minutes and a quiet machine; its options are looked up",
}
"""Kinds of commands that no test runs, and why."""
CALLS = [shown for shown in ALL if shown.program == "headrace" and ADDRESS in shown.words]
"""Commands that call services which run already."""
WALKED = [shown for shown in ALL if shown not in CALLS and shown.program not in ONLY_SHOWN]
"""Commands that work on files, or start services."""
