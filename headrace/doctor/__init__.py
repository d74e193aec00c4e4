"""Checks of a machine, and of a pack on it: what was found, and what to change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Level = Literal["ok", "note", "warning", "problem"]
"""`note`: worth knowing; `warning`: slower, or less safe, than it could be; `problem`: it will not work."""


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    check: str
    """What was checked, in a word or two."""
    level: Level
    found: str
    advice: str = ""
    """What to change; empty where all is well."""


def examine(folder: Path, *, is_pack: bool) -> Iterator[Finding]:
    """Checks everything, the quick things first.

    Args:
        folder: a pack, or where packs are to lie; `is_pack` says which. Reading it is measured for about two seconds.
    """
    from headrace.doctor import machine, pack, software, storage

    yield machine.processor()
    yield machine.threads()
    yield machine.memory()
    yield from software.versions()
    yield software.ports()
    yield storage.filesystem(folder)
    if is_pack:
        yield from pack.health(folder)
    yield storage.direct_reading(folder)
