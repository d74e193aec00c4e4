"""Service processes for benchmarks, each with the arguments of its case."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

GRACE_S = 60.0
"""For a service to end after SIGTERM."""


@dataclass(frozen=True)
class Started:
    """A service that is ready."""

    address: str
    pid: int

    @property
    def processor_s(self) -> float:
        """Processor time that it has taken so far, in user and system mode."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def service(module: str, pack: str, memory: str, arguments: Sequence[str] = ()) -> Iterator[Started]:
    """`python -m module PACK …` on a free port of this machine, ended with the context.

    Raises:
        SystemExit: it did not become ready; its own message is on the screen.
    """
    command = [sys.executable, "-m", module, pack, "--memory", memory, "--log-level", "warning", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            if not ready:
                raise SystemExit(f"the service did not start: {' '.join(command)}")
            yield Started(json.loads(ready)["address"], process.pid)
        finally:
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
