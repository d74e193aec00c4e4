"""Service processes: their log lines, and their tie to the launcher."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shared.errors import ConfigurationError
from shared.process import setup_logging

LOGGER = """
from shared.process import setup_logging
import logging
setup_logging("warning")
logging.getLogger("shared.streaming").info("unseen")
logging.getLogger("shared.streaming").warning("layer %d is slow", 3)
"""

LAUNCHER = """
import subprocess, sys
child = "import time, shared.process; shared.process.exit_with_parent(); print(flush=True); time.sleep(60)"
process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
process.stdout.readline()
print(process.pid, flush=True)
"""

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="a Linux facility")


def _python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)


def test_log_lines_on_stderr_have_time_level_and_logger() -> None:
    run = _python(LOGGER)
    assert run.stdout == ""
    (line,) = run.stderr.splitlines()
    assert line.endswith(" WARNING shared.streaming: layer 3 is slow")
    assert line[:4].isdigit()


def test_an_unknown_log_level_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'loud'.*debug, info"):
        setup_logging("loud")


@linux_only
def test_a_service_ends_with_its_launcher() -> None:
    # The child holds the launcher's stderr: communicate() returns only when both have ended.
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    launcher.communicate(timeout=30)
    assert launcher.returncode == 0


@linux_only
def test_a_launcher_that_is_gone_already_is_noticed() -> None:
    run = _python("from shared.process import exit_with_parent; exit_with_parent(2**22 + 1)")
    assert run.returncode == 1
    assert "the launcher (process 4194305) has already ended" in run.stderr
