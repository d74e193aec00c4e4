"""One service process: started, watched, stopped."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from headrace.errors import InputError, LocalServiceError

LogSink = Callable[[str, str], None]
"""Takes a service's name and one line it logged."""

_TAIL_LINES = 20
CONFIGURATION_EXIT = 2
"""Exit code of a service whose settings cannot work; its last line says why."""
_GUARD = Path(__file__).with_name("_guard.py")


@dataclass(frozen=True)
class Ready:
    """What a service prints once it can be called."""

    address: str
    metrics: str


class Child:
    """A service process with its own supervising thread.

    The thread starts the process and lives as long as it does: the kernel counts the *thread* that forked as the parent
    whose death the child follows, so a caller's short-lived thread must not fork it.
    """

    def __init__(
        self, name: str, command: Sequence[str], ended: queue.SimpleQueue[Child], log: LogSink | None = None
    ) -> None:
        """Starts the process; does not wait for it.

        Args:
            name: for messages, as in "decode-0".
            command: program and arguments.
            ended: gets this child once its process has ended.
            log: called with each line of the process's stderr.

        Raises:
            LocalServiceError: the program cannot be started.
        """
        self.name = name
        self._command = [sys.executable, "-I", "-S", str(_GUARD), str(os.getpid()), *command]
        self._ended = ended
        self._log = log
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._ready_line: queue.SimpleQueue[Ready | None] = queue.SimpleQueue()
        self._exited = threading.Event()
        spawned: Future[subprocess.Popen[str]] = Future()
        threading.Thread(target=self._supervise, args=(spawned,), name=f"{name}-supervisor", daemon=True).start()
        try:
            self._process = spawned.result()
        except OSError as error:
            raise LocalServiceError(f"cannot start {name}: {error}") from None
        except BaseException:  # interrupted while the thread forks
            spawned.add_done_callback(_kill_spawned)
            raise

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative where a signal ended it."""
        return self._process.returncode

    def wait_ready(self, deadline_s: float) -> Ready:
        """Waits for the service's ready line, until that time of the monotonic clock.

        Raises:
            InputError: it says that its settings cannot work.
            LocalServiceError: it ended first, or was not ready in time; the message has the last lines it logged.
        """
        try:
            ready = self._ready_line.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            raise LocalServiceError(self.told(f"{self.name} was not ready in time")) from None
        if ready is None:
            self._exited.wait()
            if self.exit_code == CONFIGURATION_EXIT and self._tail and self._tail[-1].startswith("error: "):
                raise InputError(f"{self.name}: {self._tail[-1].removeprefix('error: ')}")
            raise LocalServiceError(self.told(f"{self.name} ended before it was ready, exit code {self.exit_code}"))
        return ready

    def terminate(self) -> None:
        """Asks it to drain and exit (SIGTERM); harmless after its end."""
        self._process.terminate()

    def kill(self) -> None:
        """Ends it at once and waits for the end; harmless after its end."""
        self._process.kill()
        self._exited.wait()

    def wait_exit(self, deadline_s: float) -> bool:
        """Waits for its end, until that time of the monotonic clock; whether it came."""
        return self._exited.wait(max(0.0, deadline_s - time.monotonic()))

    def told(self, what: str) -> str:
        """`what`, followed by the last lines the service logged."""
        lines = "".join(f"\n    {line}" for line in tuple(self._tail))
        return f"{what}; its last lines:{lines}" if lines else f"{what}; it logged nothing"

    def _supervise(self, spawned: Future[subprocess.Popen[str]]) -> None:
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                process_group=0,  # Ctrl-C is the parent's, which then stops its services in order
            )
        except BaseException as error:
            spawned.set_exception(error)
            return
        spawned.set_result(process)
        assert process.stdout is not None
        assert process.stderr is not None
        readers = [
            threading.Thread(target=read, args=(stream,), name=f"{self.name}-{stream_name}", daemon=True)
            for read, stream, stream_name in (
                (self._read_stdout, process.stdout, "stdout"),
                (self._read_stderr, process.stderr, "stderr"),
            )
        ]
        for reader in readers:
            reader.start()
        process.wait()
        for reader in readers:  # a grandchild may hold the pipes open for longer
            reader.join(timeout=1.0)
        self._exited.set()
        self._ended.put(self)

    def _read_stdout(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                ready = _parse_ready(line)
                if ready is None:
                    self._keep(line)
                else:
                    self._ready_line.put(ready)
        self._ready_line.put(None)

    def _read_stderr(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._keep(line)

    def _keep(self, line: str) -> None:
        line = line.rstrip("\n")
        self._tail.append(line)
        if self._log is not None:
            with contextlib.suppress(OSError, ValueError):  # a closed terminal must not stop the service
                self._log(self.name, line)


def _kill_spawned(spawned: Future[subprocess.Popen[str]]) -> None:
    if spawned.exception() is None:
        spawned.result().kill()


def _parse_ready(line: str) -> Ready | None:
    try:
        event = json.loads(line)
        return Ready(event["address"], event["metrics"]) if event["event"] == "ready" else None
    except (ValueError, TypeError, KeyError):
        return None
