"""Installed packages, and whether ports can be opened."""

from __future__ import annotations

import platform
import re
import socket
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from headrace.doctor import Finding, Level

PACKAGES = ("torch", "bitsandbytes", "grpcio", "protobuf", "safetensors", "tokenizers")
_NEEDED_BY_ALL = frozenset(PACKAGES) - {"bitsandbytes"}


def versions() -> Iterator[Finding]:
    """One finding for Python and all packages that are well, and one for each that is not."""
    oldest = _oldest()
    well = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        finding = _package(name, oldest.get(name, ""))
        if isinstance(finding, Finding):
            yield finding
        else:
            well.append(finding)
    yield Finding("versions", "ok", ", ".join(well))


def _package(name: str, oldest: str) -> Finding | str:
    try:
        found = version(name)
    except PackageNotFoundError:
        level: Level = "problem" if name in _NEEDED_BY_ALL else "warning"
        without = "nothing runs" if name in _NEEDED_BY_ALL else "NF4 packs do not run"
        return Finding("versions", level, f"{name} is missing", f"install it: without it {without}")
    if _numbers(found) < _numbers(oldest):
        return Finding("versions", "problem", f"{name} {found}", f"install {name} {oldest} or newer")
    return f"{name} {found}"


def ports() -> Finding:
    """Whether services and clients can meet on loopback."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5),
        ):
            port = server.getsockname()[1]
    except OSError as error:
        advice = "services talk over TCP: allow listening and connecting on 127.0.0.1, as in a sandbox's settings"
        return Finding("ports", "problem", f"no port on loopback can be used: {error.strerror}", advice)
    return Finding("ports", "ok", f"free ones can be opened on loopback (as {port} just now)")


def _oldest() -> dict[str, str]:
    """Package -> oldest version that our own metadata asks for."""
    try:
        needed = requires("headrace") or []
    except PackageNotFoundError:
        return {}
    return {match[1]: match[2] for text in needed if (match := re.match(r"([\w-]+)\s*>=\s*([\d.]+)", text))}


def _numbers(text: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", text.split("+")[0])]
