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
from headrace.local import Draft

messages = Console(stderr=True, highlight=False, soft_wrap=True)
"""For what is not a command's result."""

DecodeTarget = Annotated[str, typer.Option("--target", help="Decode services: host:port[,host:port] or a gRPC name.")]
Device = Annotated[
    str, typer.Option(metavar="cpu|cuda|cuda:N", help="What computes. CUDA has not been tried on a GPU yet.")
]
DeviceMemory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Budget of each process on that device, as in 20GiB or 45%; 90% unless given."),
]
DraftKind = Annotated[
    Draft, typer.Option(help="Where draft tokens come from; auto: n-grams, and the draft pack where it pays.")
]
DraftPack = Annotated[Path | None, typer.Option(help="Pack of the draft, for auto, self and model.")]
DraftLength = Annotated[int | None, typer.Option(min=1, help="Tokens per draft; by default the service decides.")]


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
