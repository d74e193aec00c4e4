"""How benchmarks report: a table on the screen, JSON for good, and a plot drawn from the JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from bench.machine import Machine

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANEL_INCHES = (5.2, 3.9)
TABLE_CHARACTERS = 190
"""A wide table is better than one with squeezed names."""


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], machine: Machine) -> None:
    """Prints a table, with the machine below it; the first column is text, the others are numbers."""
    table = Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index > 0)
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.width = max(console.width, TABLE_CHARACTERS)
    console.print(table)
    console.print(str(machine), highlight=False)


def write_json(path: Path, machine: Machine, **results: Any) -> None:
    """Keeps results beside the machine that they were measured on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": asdict(machine), **results}, indent=1) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote."""
    content: dict[str, Any] = json.loads(path.read_text())
    return content


@contextmanager
def plot(path: Path, panels: int, caption: str) -> Iterator[list[Axes]]:
    """Axes side by side, to be drawn on while the context lasts; then the picture is written to `path`.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise SystemExit("plots need matplotlib; install the extra `bench`") from None
    mpl.use("agg")
    from matplotlib import pyplot

    width, height = PANEL_INCHES
    figure, axes = pyplot.subplots(1, panels, figsize=(width * panels, height), squeeze=False, layout="constrained")
    yield list(axes[0])
    figure.supxlabel(caption, fontsize=6)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
