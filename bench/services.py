"""Service processes for benchmarks, each with the arguments of its case."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

GRACE_S = 60.0
"""For a service to end after SIGTERM."""


@contextmanager
def service(module: str, pack: str, memory: str, arguments: Sequence[str] = ()) -> Iterator[str]:
    """`python -m module PACK …` on a free port of this machine, ended with the context; its address.

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
            yield json.loads(ready)["address"]
        finally:
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
