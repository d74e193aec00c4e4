"""How operators write settings: sizes, addresses and durations, and the channel options both sides must agree on."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigurationError

BYTE_UNITS: Mapping[str, int] = {
    "": 1,
    "B": 1,
    "kB": 1000,
    "KB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
    "KiB": 1024,
    "MiB": 1024**2,
    "GiB": 1024**3,
    "TiB": 1024**4,
}
SECONDS: Mapping[str, float] = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

KEEPALIVE_S = 60
"""How often either side of a quiet connection asks whether the other is still there."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
)
"""What every client channel to our services is opened with: pings during long quiet calls, none on an idle channel."""

_NUMBER = r"\d+(?:\.\d+)?"
_SIZE = re.compile(rf"({_NUMBER})\s*([A-Za-z]*|%)")
_DURATION = re.compile(rf"(?:{_NUMBER}\s*(?:ms|s|m|h|d)\s*)+")
_DURATION_PART = re.compile(rf"({_NUMBER})\s*(ms|s|m|h|d)")
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\s\[\]:/]+):(\d{1,5})")


@dataclass(frozen=True)
class Address:
    """A host and a TCP port; port 0 means any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Reachable from this machine only."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


def parse_bytes(text: str, machine_bytes: Callable[[], int] | None = None) -> int:
    """A size such as "2GiB", "1.5 GB", "800000000" or "50%", in bytes.

    A percentage is of `machine_bytes()`, which defaults to `memory_limit_bytes`.

    Raises:
        ConfigurationError: the text is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match and match[2] == "%":
        return int((machine_bytes or memory_limit_bytes)() * float(match[1]) / 100)
    if match and match[2] in BYTE_UNITS:
        return _scaled(match[1], BYTE_UNITS[match[2]])
    units = ", ".join(unit for unit in BYTE_UNITS if unit)
    raise ConfigurationError(
        f"{text!r} is not a size; write a number and one of {units}, or a percentage of this machine's memory: "
        "2GiB, 800MB, 1.5GB, 50%"
    )


def parse_duration(text: str) -> float:
    """A duration such as "8h", "1h30m", "250ms" or "45" (seconds), in seconds.

    Raises:
        ConfigurationError: the text is not a duration.
    """
    stripped = text.strip()
    if re.fullmatch(_NUMBER, stripped):
        return float(stripped)
    if not _DURATION.fullmatch(stripped):
        raise ConfigurationError(
            f"{text!r} is not a duration; write numbers with ms, s, m, h or d: 8h, 1h30m, 250ms, or plain seconds: 45"
        )
    return sum(float(number) * SECONDS[unit] for number, unit in _DURATION_PART.findall(stripped))


def parse_address(text: str) -> Address:
    """An address such as "127.0.0.1:50051", "localhost:0" or "[::1]:50051".

    Raises:
        ConfigurationError: host or port is missing, or the port is above 65535.
    """
    match = _ADDRESS.fullmatch(text.strip())
    if not match or int(match[2]) > 65535:
        raise ConfigurationError(
            f"{text!r} is not an address; write host:port with a port from 0 (any free one) to 65535: "
            "127.0.0.1:50051, localhost:0, [::1]:50051"
        )
    return Address(match[1].strip("[]"), int(match[2]))


def memory_limit_bytes(root: Path = Path("/")) -> int:
    """Memory this process may use: the machine's, or its control group's limit where that is smaller.

    Every enclosing group of the process counts, in cgroup v2 and v1. `root` is where /proc and /sys are found.
    """
    return min([_machine_memory_bytes(root), *_group_limits(root)])


def _machine_memory_bytes(root: Path) -> int:
    meminfo = _read(root / "proc/meminfo")
    if match := re.search(r"^MemTotal:\s+(\d+) kB", meminfo, re.MULTILINE):
        return int(match[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _group_limits(root: Path) -> list[int]:
    limits = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        folder = top / path.lstrip("/")
        texts = [_read(group / name).strip() for group in (folder, *folder.parents) if group.is_relative_to(top)]
        limits += [int(text) for text in texts if text.isdigit()]
    return limits


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _scaled(number: str, unit_bytes: int) -> int:
    """Exact for whole numbers of any size, which a float is not."""
    return int(number) * unit_bytes if number.isdigit() else int(float(number) * unit_bytes)
