"""Command-line options that several commands share, and how their errors end a command."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headrace.errors import ClientError, InputError, InvalidRequest
from headrace.local import Draft, LocalPlan, LocalServices

messages = Console(stderr=True, highlight=False, soft_wrap=True)
"""For what is not a command's result."""

DecodeTarget = Annotated[str, typer.Option("--target", help="Decode services: host:port[,host:port] or a gRPC name.")]
Prefills = Annotated[
    int | None, typer.Option(min=1, help="Prefill processes to start; by default 1, or none with --colocate.")
]
Colocate = Annotated[
    bool, typer.Option("--colocate", help="No prefill processes: decode computes prompts in its own passes.")
]
Decodes = Annotated[int, typer.Option(min=1, help="Decode processes to start.")]
Memory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Memory budget of each process, as in 600MiB or 4GiB.")
]
DraftKind = Annotated[
    Draft, typer.Option(help="Where draft tokens come from; auto: n-grams, and the draft pack where it pays.")
]
DraftPack = Annotated[Path | None, typer.Option(help="Pack of the draft, for auto, self and model.")]
DraftLength = Annotated[int | None, typer.Option(min=1, help="Tokens per draft; by default the service decides.")]
Logs = Annotated[bool, typer.Option("--logs", help="Show what the started services log.")]


def local_plan(
    pack: Path,
    *,
    memory: str | None,
    prefills: int | None,
    colocate: bool,
    decodes: int,
    draft: Draft,
    draft_pack: Path | None,
    draft_length: int | None,
) -> LocalPlan:
    """The services that the options describe.

    Raises:
        InputError: the memory budget is missing, a pack is not there, or options contradict each other.
    """
    if memory is None:
        raise InputError("services that start here need --memory: the budget of each process, as in 2GiB")
    if colocate and prefills is not None:
        raise InputError("--colocate means no prefill processes; leave --prefills out")
    for folder in (pack, draft_pack):
        if folder is not None and not folder.is_dir():
            raise InputError(f"{folder} is no pack: there is no such folder; make one with `headrace pack`")
    return LocalPlan(
        pack=str(pack),
        memory=memory,
        prefills=0 if colocate else prefills or 1,
        decodes=decodes,
        draft=draft,
        draft_pack=None if draft_pack is None else str(draft_pack),
        draft_length=draft_length,
    )


@contextlib.contextmanager
def running(plan: LocalPlan, logs: bool) -> Iterator[LocalServices]:
    """The services of a plan, ready; says so while they start and stop."""
    names = (
        f"{plan.prefills} prefill and {plan.decodes} decode" if plan.prefills else f"{plan.decodes} colocated decode"
    )
    with contextlib.ExitStack() as stack:
        with messages.status(f"starting {names} …"):
            services = stack.enter_context(LocalServices(plan, show_log if logs else None))
        try:
            yield services
        finally:
            messages.print(f"stopping {names} …")
            stack.close()
            for what in services.lost:
                messages.print(f"warning: {what}; the others did its work", style="yellow", markup=False)


def show_log(service: str, line: str) -> None:
    """Prints a line that a service logged."""
    messages.print(f"[{service}] {line}", markup=False)


@contextlib.contextmanager
def told_errors(interrupted: str = "interrupted") -> Iterator[None]:
    """Ends the command with a message, not a traceback.

    Exit code 2: the command cannot work as given. 1: it failed while running. 130: Ctrl-C or SIGTERM.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except ClientError as error:
        messages.print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(2 if isinstance(error, InputError | InvalidRequest) else 1) from None
    except KeyboardInterrupt:
        messages.print(interrupted, markup=False)
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)
