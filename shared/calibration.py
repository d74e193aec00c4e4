"""How fast this machine is for a pack: measured once in a few seconds, and kept in the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shared.pack.reader import Pack
from shared.speed import disk_bytes_per_s, layer_seconds, memory_bytes_per_s, output_seconds

FORMAT = 1
"""Of the cached files; a change in what is measured, or how, needs a new one."""
KERNEL_PACKAGES = ("torch", "bitsandbytes", "numba")


@dataclass(frozen=True)
class Calibration:
    """What a pack's parts take on this machine."""

    disk_bytes_per_s: float
    """Layer files read past the page cache, as the ring reads them."""
    memory_bytes_per_s: float
    """Reading memory with all compute threads."""
    layer_s: Mapping[int, float]
    """Rows -> seconds for one layer's matrix products, weights from memory."""
    output_s: Mapping[int, float]
    """Rows -> seconds for the output matrix."""

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> Calibration:
        """The inverse of `dataclasses.asdict` and JSON, which makes rows into text."""
        tables = {name: {int(rows): float(s) for rows, s in value[name].items()} for name in ("layer_s", "output_s")}
        return cls(float(value["disk_bytes_per_s"]), float(value["memory_bytes_per_s"]), **tables)


def calibrated(pack: Pack, threads: int, *, again: bool = False) -> Calibration:
    """The calibration for a pack, measured if the cache has none.

    Args:
        threads: compute threads that the service will have.
        again: measure even if the cache has one, and replace it.

    Raises:
        DataLossError, UnavailableError: a layer cannot be read.
    """
    key = {
        "scheme": pack.scheme.name,
        "spec": pack.spec.to_json(),
        "device": pack.path.stat().st_dev,
        "threads": threads,
        "machine": _machine(),
    }
    return Calibration.of_json(cached("calibration", key, lambda: asdict(_measure(pack)), again=again))


def cached(kind: str, key: Mapping[str, Any], measure: Callable[[], Any], *, again: bool = False) -> Any:
    """A measured JSON value, from the cache folder where it is known. A cache that cannot be written costs time only.

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
        partial.replace(file)
    return value


def kernel_versions() -> dict[str, str]:
    """The installed packages whose kernels compute."""
    versions = {}
    for name in KERNEL_PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def _measure(pack: Pack) -> Calibration:
    return Calibration(disk_bytes_per_s(pack), memory_bytes_per_s(), layer_seconds(pack), output_seconds(pack))


def _machine() -> dict[str, Any]:
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
