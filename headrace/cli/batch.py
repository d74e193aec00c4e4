"""`headrace batch`: a file of requests in, a file of answers out."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from headrace.answers import errors_path
from headrace.cli import _options as options
from headrace.cli._batch_view import BatchProgress, report_json, report_table
from headrace.cli._connection import Connection
from headrace.cli._services import ServiceOptions
from headrace.errors import InputError
from headrace.job_input import read_jobs
from headrace.jobs import TIMEOUT_S, run_batch
from headrace.local import LocalPlan
from headrace.target import Target
from shared.config import parse_duration

Order = Literal["input", "finished"]


def batch(
    in_file: Annotated[
        Path,
        typer.Argument(
            metavar="IN.jsonl",
            help="One request per line: id, and prompt, messages or token_ids; or lines of OpenAI's batch files.",
        ),
    ],
    out_file: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="The answers.")],
    *,
    target: Annotated[
        str | None, typer.Option(help="Decode services that run already: host:port[,host:port] or a gRPC name.")
    ] = None,
    pack: Annotated[Path | None, typer.Option(help="Start services for this pack, for the time of the batch.")] = None,
    connection: Connection,
    services: ServiceOptions,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests under way at a time; by default what turns out to be best.")
    ] = None,
    order: Annotated[
        Order, typer.Option(help="Answers in the order of the requests, or as they were finished.")
    ] = "input",
    errors_file: Annotated[
        Path | None, typer.Option("--errors", metavar="FILE", help="The failed requests; by default OUT.errors.jsonl.")
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Try again what failed in an earlier run.")
    ] = False,
    timeout: Annotated[str, typer.Option(help="Deadline of each request, as in 90s, 30m or 2h.")] = f"{TIMEOUT_S:g}s",
    shift: Annotated[str, typer.Option(help="The shift to project to, as in 8h.")] = "8h",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report there too, as JSON.")] = None,
) -> None:
    """Answer a file of requests. Interrupted, it continues when run again.

    Every line is checked before the first is sent. Failed requests go to the file of errors; --retry-failed takes them
    up again. Exit code 0: every request was answered. 1: some failed, or nothing could be done. 2: the input or an
    option cannot work. 130: interrupted; the same command goes on.
    """
    with options.told_errors("interrupted; what is answered is kept: run the same command again to continue"):
        timeout_s, shift_s = parse_duration(timeout), parse_duration(shift)
        if not (timeout_s and shift_s):
            raise InputError("--timeout and --shift must be longer than nothing, as in 30m or 8h")
        errors = errors_file or errors_path(out_file)
        _require_distinct(in_file, out_file, errors)
        plan = _plan(target, pack, services, connection)
        tls, metadata = connection.read_tls(), connection.read_metadata()
        with options.messages.status(f"checking {in_file} …"):
            jobs = read_jobs(in_file)
        with _called(target, plan, services) as (decodes, addresses):
            with BatchProgress(options.messages, shift_s) as progress:
                report = asyncio.run(
                    run_batch(
                        jobs,
                        out_file,
                        target=decodes,
                        tls=tls,
                        metadata=metadata,
                        progress=progress,
                        addresses=addresses,
                        concurrency=concurrency,
                        timeout_s=timeout_s,
                        shift_s=shift_s,
                        errors=errors,
                        ordered=order == "input",
                        retry_failed=retry_failed,
                    )
                )
            Console().print(report_table(report))
            if json_file is not None:
                json_file.write_text(json.dumps(report_json(report), indent=2) + "\n")
    if failed := report.failed + report.left_alone:
        options.messages.print(f"{failed} failed, see {errors}; --retry-failed tries those alone again", markup=False)
        raise typer.Exit(1)


def _require_distinct(in_file: Path, out_file: Path, errors_file: Path) -> None:
    """Raises InputError where two of them are one file, under whatever names."""
    if out_file.resolve() == errors_file.resolve():
        raise InputError(f"{errors_file} is the file of answers; give the errors another name")
    for file in (out_file, errors_file):
        if file.exists() and in_file.exists() and in_file.samefile(file):
            raise InputError(f"{file} is the file of requests; give the answers another name")


def _plan(target: str | None, pack: Path | None, services: ServiceOptions, connection: Connection) -> LocalPlan | None:
    """The services to start; None where they run already."""
    if (target is None) == (pack is None):
        raise InputError("give either --target, for services that run already, or --pack, to start some")
    if pack is None:
        return None
    if connection.is_given:
        raise InputError("TLS and metadata go with --target: services that start here are this machine's own")
    return services.plan(pack)


@contextlib.contextmanager
def _called(
    target: str | None, plan: LocalPlan | None, services: ServiceOptions
) -> Iterator[tuple[Target, Sequence[str] | None]]:
    """What to call, and the addresses of all services where they are known."""
    if plan is None:
        assert target is not None  # `_plan` saw to it
        yield target, None
        return
    with services.running(plan) as started:
        yield started.target, started.addresses
