"""What the processor is, as Linux tells it. Plain Python."""

from __future__ import annotations

import platform
import re
from pathlib import Path

NOTABLE_INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
"""Those that kernels choose between."""


def processor_name(root: Path = Path("/")) -> str:
    """The model's name; the architecture where the system tells none. `root` is where /proc is found."""
    return _field("model name", root) or platform.machine()


def instructions(root: Path = Path("/")) -> frozenset[str]:
    """All instruction sets of the processor, in Linux's names; empty where the system tells none."""
    return frozenset((_field("flags", root) or _field("Features", root) or "").split())


def _field(name: str, root: Path) -> str | None:
    try:
        text = (root / "proc/cpuinfo").read_text()
    except OSError:
        return None
    match = re.search(rf"^{name}\s*:\s*(.*)$", text, re.MULTILINE)
    return match[1] if match else None
