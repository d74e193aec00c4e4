"""`headrace bench`: the benchmarks, each a program of its own."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import headrace
from shared.errors import ConfigurationError

FOLDER = Path(headrace.__file__).parents[1] / "bench"
"""Beside the package, in a clone as in an installation."""
PROGRAM = '\nif __name__ == "__main__":\n'
"""What the modules have that can be run."""
HELP = ("--help", "-h")


def bench(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Which benchmark; without one, all are listed.")] = None,
) -> None:
    """Run a benchmark: `headrace bench NAME …` is `python -m bench.NAME …`; without a name, list them.

    Everything behind the name goes to the benchmark: `headrace bench NAME --help` shows its options. Exit code: the
    benchmark's own. 2: there is no such benchmark, or a package that it needs is missing.
    """
    if name in HELP:
        print(context.get_help())
        return
    found = dict(_benchmarks())
    if not found:
        raise ConfigurationError(
            f"no benchmarks are installed: {FOLDER} is not there; install headrace from its wheel, or run in a clone"
        )
    if name is None:
        Console(highlight=False).print(_table(found))
    elif name not in found:
        raise ConfigurationError(f"there is no benchmark {name}; there are {', '.join(found)}")
    else:
        path = os.pathsep.join([str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "bench", name, *context.args]
        sys.stdout.flush()
        os.execve(sys.executable, command, os.environ | {"PYTHONPATH": path})


def _benchmarks() -> Iterator[tuple[str, str]]:
    """Names, and the first line of what each one says of itself."""
    for path in sorted(FOLDER.glob("[a-z]*.py")):
        source = path.read_text(encoding="utf-8")
        if PROGRAM in source:
            yield path.stem, (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def _table(found: dict[str, str]) -> Table:
    table = Table("name", "what it shows", title="Benchmarks: headrace bench NAME …", title_justify="left", box=None)
    for name, line in found.items():
        table.add_row(name, Text(line))
    return table
