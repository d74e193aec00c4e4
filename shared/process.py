"""What a service process does before anything else: logging, and a tie to the process that launched it."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys

from shared.errors import ConfigurationError

LOG_LEVELS = ("debug", "info", "warning", "error")
_PR_SET_PDEATHSIG = 1  # prctl(2)


def setup_logging(level: str = "info") -> None:
    """Readable lines on stderr: time, level, logger, message.

    Raises:
        ConfigurationError: no such level.
    """
    if level.lower() not in LOG_LEVELS:
        raise ConfigurationError(f"unknown log level {level!r}; choose one of {', '.join(LOG_LEVELS)}")
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", force=True
    )


def exit_with_parent(parent_pid: int | None = None) -> None:
    """Asks the kernel for SIGTERM when the launching process dies, so that no service outlives its launcher.

    Pass the launcher's `parent_pid` where it is known: a launcher that died before this call is noticed only by it. The
    kernel watches the launching *thread*. Linux only; elsewhere this does nothing.
    """
    if sys.platform != "linux":
        return
    expected = os.getppid() if parent_pid is None else parent_pid
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != expected:
        raise SystemExit(f"the launcher (process {expected}) has already ended")
