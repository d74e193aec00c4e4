"""Prefill and decode services on this machine, as child processes that never outlive their parent."""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, NoReturn

from headrace._child import Child, LogSink, Ready
from headrace.errors import InputError, LocalServiceError

Draft = Literal["auto", "none", "ngram", "self", "model"]

LOOPBACK = "127.0.0.1:0"
"""Any free port, for this machine only."""


@dataclass(frozen=True, kw_only=True)
class LocalPlan:
    """Which services to start, and how.

    Raises:
        InputError: no decode service, or a draft without the pack that it needs.
    """

    pack: str
    """Folder of the packed model."""
    memory: str
    """Budget of each process, as the services take it: "600MiB", "4GiB"."""
    prefills: int = 1
    """0: decode services compute prompts themselves, in the same passes (colocated)."""
    decodes: int = 1
    draft: Draft = "auto"
    draft_pack: str | None = None
    """Pack of the draft; for the drafts `auto` (there it may be left out), `self` and `model`."""
    draft_length: int | None = None
    """Tokens per draft; None leaves it to the service."""
    device: str = "cpu"
    """What computes, as the services take it; CUDA has not been tried on a GPU yet."""
    device_memory: str | None = None
    """Budget of each process on that device; None leaves it to the services."""
    prefill_command: Sequence[str] = (sys.executable, "-m", "prefill_service")
    decode_command: Sequence[str] = (sys.executable, "-m", "decode_service")
    ready_timeout_s: float = 600.0
    """For all services of a stage to become ready."""
    grace_s: float = 45.0
    """For a service to finish what runs and exit, after SIGTERM; longer than the 30 s it gives its own calls."""

    def __post_init__(self) -> None:
        if self.prefills < 0 or self.decodes < 1:
            raise InputError(
                "at least one decode service is needed, and no fewer than no prefill service; found "
                f"{self.decodes} and {self.prefills}"
            )
        if self.draft in ("self", "model") and self.draft_pack is None:
            raise InputError(f"draft {self.draft!r} needs a draft pack; none was given")

    def prefill_arguments(self) -> list[str]:
        """The command line of a prefill service."""
        return [*self.prefill_command, self.pack, *self._common_arguments()]

    def decode_arguments(self, prefill_addresses: Sequence[str]) -> list[str]:
        """The command line of a decode service."""
        arguments = [*self.decode_command, self.pack]
        arguments += ["--prefill", ",".join(prefill_addresses)] if prefill_addresses else []
        arguments += [*self._common_arguments(), "--draft", self.draft]
        if self.draft_pack is not None:
            arguments += ["--draft-pack", self.draft_pack]
        if self.draft_length is not None:
            arguments += ["--draft-length", str(self.draft_length)]
        return arguments

    def _common_arguments(self) -> list[str]:
        arguments = ["--listen", LOOPBACK, "--metrics", LOOPBACK, "--memory", self.memory]
        arguments += ["--device", self.device] if self.device != "cpu" else []
        return arguments + (["--device-memory", self.device_memory] if self.device_memory is not None else [])


class LocalServices:
    """Prefill and decode services for the duration of a `with` block.

    Entering waits until all are ready; leaving drains and stops them. Should this process die, even by SIGKILL, the
    kernel ends them (on Linux).
    """

    def __init__(self, plan: LocalPlan, log: LogSink | None = None) -> None:
        """
        Args:
            plan: which services to start.
            log: called with a service's name and each line it logs, from that service's own thread.
        """
        self._plan = plan
        self._log = log
        self._ended: queue.SimpleQueue[Child] = queue.SimpleQueue()
        self._lost: list[str] = []
        self._prefills: list[Child] = []
        self._decodes: list[Child] = []
        self.prefills: tuple[Ready, ...] = ()
        """Addresses of the prefill services."""
        self.decodes: tuple[Ready, ...] = ()
        """Addresses of the decode services."""

    @property
    def target(self) -> tuple[str, ...]:
        """What a client calls: the address of every decode service."""
        return tuple(ready.address for ready in self.decodes)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The address of every service, prefill first."""
        return tuple(ready.address for ready in (*self.prefills, *self.decodes))

    @property
    def pids(self) -> tuple[int, ...]:
        """The process id of every service, prefill first."""
        return tuple(child.pid for child in (*self._prefills, *self._decodes))

    def start(self) -> None:
        """Starts all services and waits until they are ready.

        Raises:
            LocalServiceError: one did not get ready; all that were started are gone again.
        """
        try:
            prefill = self._plan.prefill_arguments()
            self.prefills = self._start_stage(self._prefills, "prefill", self._plan.prefills, prefill)
            decode = self._plan.decode_arguments([ready.address for ready in self.prefills])
            self.decodes = self._start_stage(self._decodes, "decode", self._plan.decodes, decode)
        except BaseException:
            self._kill()
            raise

    @property
    def lost(self) -> tuple[str, ...]:
        """Says of each service that has ended by itself how; the others of its stage do its work."""
        return tuple(self._lost)

    def wait(self) -> NoReturn:
        """Blocks for as long as each stage has a service that runs.

        Raises:
            LocalServiceError: the last one of a stage ended by itself; the message has the last lines it logged.
        """
        while True:
            child = self._ended.get()
            stage = self._decodes if child in self._decodes else self._prefills
            what = child.told(f"{child.name} ended by itself, exit code {child.exit_code}")
            if all(other.exit_code is not None for other in stage):
                raise LocalServiceError(what)
            if self._log is not None:
                self._log(child.name, what)

    def stop(self) -> None:
        """Drains and stops all services, decode before prefill, on which it leans; kills what outlives its grace time.

        A service that ended earlier by itself is no error where others of its stage went on; see `lost`.

        Raises:
            LocalServiceError: one did not end with exit code 0 in time. None runs any more in that case too.
        """
        faults: list[str] = []
        try:
            for stage in (self._decodes, self._prefills):
                gone = [child for child in stage if child.exit_code is not None]
                if len(gone) < len(stage):
                    self._lost += [f"{child.name} ended by itself, exit code {child.exit_code}" for child in gone]
                    stage = [child for child in stage if child not in gone]
                faults += _stop_stage(stage, self._plan.grace_s)
        finally:
            self._kill()
        if faults:
            raise LocalServiceError("\n".join(faults))

    def __enter__(self) -> LocalServices:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        except LocalServiceError:
            if error is None:
                raise

    def _start_stage(self, stage: list[Child], name: str, count: int, command: Sequence[str]) -> tuple[Ready, ...]:
        deadline_s = time.monotonic() + self._plan.ready_timeout_s
        for index in range(count):
            # One by one: what runs is known to `_kill` even where this loop is interrupted.
            stage.append(Child(f"{name}-{index}", command, self._ended, self._log))  # noqa: PERF401
        return tuple(child.wait_ready(deadline_s) for child in stage)

    def _kill(self) -> None:
        for child in (*self._decodes, *self._prefills):
            child.kill()


def _stop_stage(stage: Sequence[Child], grace_s: float) -> list[str]:
    """Terminates the services together; returns what went wrong."""
    for child in stage:
        child.terminate()
    deadline_s = time.monotonic() + grace_s
    faults = []
    for child in stage:
        if not child.wait_exit(deadline_s):
            faults.append(child.told(f"{child.name} did not stop within {grace_s:g} s and was killed"))
        elif child.exit_code != 0:
            faults.append(child.told(f"{child.name} ended with exit code {child.exit_code}"))
    return faults
