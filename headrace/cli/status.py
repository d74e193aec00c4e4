"""`headrace status`: one table of running services, of either stage."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headrace.cli import _options as options
from headrace.cli._connection import Connection
from headrace.client_health import Condition, Health, conditions
from headrace.errors import InputError
from headrace.tls import metadata_of
from headrace.types import ServerStatus
from shared.config import parse_duration

_STYLES: dict[Health, str] = {"serving": "green", "draining": "yellow", "not serving": "red", "unreachable": "red"}
_COLUMNS = ("stage", "model", "queued", "running", "cached tokens", "free KV blocks", "health")
_NUMBERS = ("queued", "running", "cached tokens", "free KV blocks")
DIGEST_CHARACTERS = 12
WIDTH = 160
"""Of the table where there is no terminal to ask: a row is a line."""


def status(
    targets: Annotated[
        list[str],
        typer.Argument(metavar="TARGET…", help="Services of either stage: host:port[,host:port] or a gRPC name."),
    ],
    *,
    connection: Connection,
    timeout: Annotated[str, typer.Option(help="What has not answered by then is unreachable.")] = "10s",
    watch: Annotated[bool, typer.Option("--watch", help="Look again and again, until Ctrl-C.")] = False,
    every: Annotated[str, typer.Option(help="Pause between looks; with --watch.")] = "2s",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, a line, for each look.")] = False,
) -> None:
    """Show how running services are: what they serve, how much they have to do, and whether they serve.

    A name that stands for many replicas, as dns:///decode:50051, is a row for each. Exit code 0: all are serving. 1:
    one is draining, not serving or unreachable (with --watch: when last looked at). 2: a target or an option cannot
    work.
    """
    with options.told_errors():
        timeout_s, every_s = parse_duration(timeout), parse_duration(every)
        if not (timeout_s and every_s):
            raise InputError("--timeout and --every must be longer than nothing, as in 10s or 500ms")
        tls, metadata = connection.read_tls(), metadata_of(connection.read_metadata())

        def look() -> tuple[Condition, ...]:
            return conditions(targets, tls, metadata, timeout_s=timeout_s)

        found = look()
        with _display(found, as_json) as show, suppress(KeyboardInterrupt):
            while watch:
                time.sleep(every_s)
                found = look()
                show(found)
    if any(each.health != "serving" for each in found):
        raise typer.Exit(1)


@contextmanager
def _display(found: Sequence[Condition], as_json: bool) -> Iterator[Callable[[Sequence[Condition]], None]]:
    """Shows it, and yields what shows later looks: a table takes the place of the one before, on a terminal."""
    if as_json:
        _print_json(found)
        yield _print_json
        return
    console = Console(highlight=False)
    if console.is_terminal:
        with Live(_table(found), console=console, auto_refresh=False) as live:
            yield lambda later: live.update(_table(later), refresh=True)
        return
    wide = Console(highlight=False, width=WIDTH)
    wide.print(_table(found))
    yield lambda later: wide.print(_table(later))


def _table(found: Sequence[Condition]) -> Group:
    table = Table(box=None)
    table.add_column("address", overflow="fold")
    for name in _COLUMNS:
        table.add_column(name, justify="right" if name in _NUMBERS else "left")
    for each in found:
        table.add_row(each.address, *_load(each), Text(each.health, _STYLES[each.health]))
    problems = (Text(f"{each.address}: {each.problem}", "dim") for each in found if each.problem)
    return Group(table, *problems)


def _load(condition: Condition) -> list[str]:
    status = condition.status
    if status is None:
        return ["–"] * (len(_COLUMNS) - 1)
    numbers = (status.queued, status.running, status.cached_tokens, free_kv_blocks(status))
    return [status.stage, status.model_digest[:DIGEST_CHARACTERS], *(f"{number:,}" for number in numbers)]


def free_kv_blocks(status: ServerStatus) -> int:
    """Blocks that new sequences can have; those kept for prompts to come are given up for them."""
    return status.kv_blocks - status.kv_blocks_used


def _print_json(found: Sequence[Condition]) -> None:
    described = [_described(each) for each in found]
    serving = sum(each.health == "serving" for each in found)
    print(json.dumps({"serving": serving, "of": len(found), "services": described}), flush=True)


def _described(condition: Condition) -> dict[str, Any]:
    described: dict[str, Any] = {"address": condition.address, "health": condition.health}
    if condition.status is None:
        return described | {"problem": condition.problem}
    fields = dataclasses.asdict(condition.status)
    return described | fields | {"free_kv_blocks": free_kv_blocks(condition.status)}
