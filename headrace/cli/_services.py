"""Services that a command starts on this machine, and for how long."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli import _options as options
from headrace.errors import InputError
from headrace.local import LocalPlan, LocalServices


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """The options of every command that starts services."""

    prefills: Annotated[
        int | None, typer.Option(min=1, help="Prefill processes to start; by default 1, or none with --colocate.")
    ] = None
    colocate: Annotated[
        bool, typer.Option("--colocate", help="No prefill processes: decode computes prompts in its own passes.")
    ] = False
    decodes: Annotated[int, typer.Option(min=1, help="Decode processes to start.")] = 1
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory budget of each process, as in 600MiB or 4GiB.")
    ] = None
    device: options.Device = "cpu"
    device_memory: options.DeviceMemory = None
    draft: options.DraftKind = "auto"
    draft_pack: options.DraftPack = None
    draft_length: options.DraftLength = None
    logs: Annotated[bool, typer.Option("--logs", help="Show what the started services log.")] = False

    def plan(self, pack: Path) -> LocalPlan:
        """The services that the options describe.

        Raises:
            InputError: the memory budget is missing, a pack is not there, or options contradict each other.
        """
        if self.memory is None:
            raise InputError("services that start here need --memory: the budget of each process, as in 2GiB")
        if self.colocate and self.prefills is not None:
            raise InputError("--colocate means no prefill processes; leave --prefills out")
        for folder in (pack, self.draft_pack):
            if folder is not None and not folder.is_dir():
                raise InputError(f"{folder} is no pack: there is no such folder; make one with `headrace pack`")
        return LocalPlan(
            pack=str(pack),
            memory=self.memory,
            device=self.device,
            device_memory=self.device_memory,
            prefills=0 if self.colocate else self.prefills or 1,
            decodes=self.decodes,
            draft=self.draft,
            draft_pack=None if self.draft_pack is None else str(self.draft_pack),
            draft_length=self.draft_length,
        )

    @contextlib.contextmanager
    def running(self, plan: LocalPlan) -> Iterator[LocalServices]:
        """The services of a plan, ready; says so while they start and stop."""
        prefills, decodes = plan.prefills, plan.decodes
        names = f"{prefills} prefill and {decodes} decode" if prefills else f"{decodes} colocated decode"
        with contextlib.ExitStack() as stack:
            with options.messages.status(f"starting {names} …"):
                services = stack.enter_context(LocalServices(plan, _show_log if self.logs else None))
            try:
                yield services
            finally:
                options.messages.print(f"stopping {names} …")
                stack.close()
                for what in services.lost:
                    options.messages.print(f"warning: {what}; the others did its work", style="yellow", markup=False)


def _show_log(service: str, line: str) -> None:
    """Prints a line that a service logged."""
    options.messages.print(f"[{service}] {line}", markup=False)
