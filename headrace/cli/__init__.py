"""The command line: `headrace COMMAND …`. Each command is one module; what is heavy it imports when it runs."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from headrace.cli._groups import flat
from headrace.cli.batch import batch
from headrace.cli.bench import bench
from headrace.cli.doctor import doctor
from headrace.cli.generate import generate
from headrace.cli.inspect import inspect
from headrace.cli.pack import pack_command
from headrace.cli.plan import plan
from headrace.cli.score import score
from headrace.cli.serve import serve
from headrace.cli.status import status
from shared.errors import ConfigurationError, HeadraceError, InvalidRequestError

log = logging.getLogger("headrace")

app = typer.Typer(
    name="headrace",
    help="Serves language models that are bigger than the memory they run in.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("pack")(pack_command)
app.command()(inspect)
app.command()(plan)
app.command()(flat(serve))
app.command()(flat(batch))
app.command()(flat(generate))
app.command()(flat(score))
app.command()(flat(status))
app.command()(doctor)
app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
    add_help_option=False,  # what comes behind a name is the benchmark's own
)(bench)


@app.callback()
def options(
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show details, and where errors came from.")] = False,
) -> None:
    """Options of every command."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if verbose:
        log.setLevel(logging.DEBUG)


def main() -> None:
    """Runs the command line. Errors that a user can act on become one line on stderr.

    Exit codes: 0 done; 1 it failed while running; 2 the command or its settings cannot work.
    """
    try:
        app()
    except (HeadraceError, OSError) as error:
        log.debug("where the error came from", exc_info=True)
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigurationError | InvalidRequestError) else 1)
