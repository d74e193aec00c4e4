"""The progress bar of commands that read or write a pack, on stderr."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


@contextlib.contextmanager
def progress(what: str, *, in_bytes: bool = False) -> Iterator[tuple[Progress, TaskID]]:
    """A bar with the time left and, in bytes, the speed. Its task is shown once it is made visible."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    speed = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else ()
    columns = (TextColumn("{task.description}"), BarColumn(), *speed, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield bar, bar.add_task(what, total=None, visible=False)  # nothing to show where the work is refused
