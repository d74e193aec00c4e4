"""What is measured once on a machine, and kept in the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FORMAT = 4
"""Of the cached files; a change in what is measured, or how, needs a new one."""
KERNEL_PACKAGES = ("torch", "bitsandbytes")


def cached(kind: str, key: Mapping[str, Any], measure: Callable[[], Any], *, again: bool = False) -> Any:
    """A measured JSON value, from the cache folder where it is known. A cache that cannot be written costs time only.

    Of processes that measure at the same time all get what the first one wrote.

    Args:
        kind: what is measured; part of the file's name.
        key: everything that the value depends on.
    """
    text = json.dumps({"format": FORMAT, "kind": kind} | dict(key), sort_keys=True)
    file = _cache_folder() / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    if not again:
        with contextlib.suppress(OSError, ValueError):  # there is none, or a damaged one
            return json.loads(file.read_text())
    value = json.loads(json.dumps(measure()))
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(value, indent=1))
        if again or _unreadable(file):
            partial.replace(file)
        else:
            partial.unlink()
            return json.loads(file.read_text())
    return value


def _unreadable(file: Path) -> bool:
    try:
        json.loads(file.read_text())
    except (OSError, ValueError):
        return True
    return False


def kernel_versions() -> dict[str, str]:
    """The installed packages whose kernels compute."""
    versions = {}
    for name in KERNEL_PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def machine_key() -> dict[str, Any]:
    """What the speed of arithmetic depends on: processor, cores, kernels."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text() if cpu.exists() else platform.processor()
    described = [
        re.search(rf"^{name}\s*:\s*(.*)$", lines, re.MULTILINE) for name in ("model name", "flags", "Features")
    ]
    return {
        "node": platform.node(),
        "cpu": [match[1] for match in described if match],
        "cores": os.cpu_count(),
        "kernels": kernel_versions(),
    }


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "headrace"
