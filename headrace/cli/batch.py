"""`headrace batch`: a file of requests in, a file of answers out."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headrace.cli import _options as options
from headrace.cli._batch_view import BatchProgress, report_json, report_table
from headrace.errors import InputError
from headrace.job_input import read_jobs
from headrace.jobs import TIMEOUT_S, run_batch
from headrace.local import Draft, LocalPlan
from headrace.target import Target
from shared.config import parse_duration


def batch(
    in_file: Annotated[
        Path, typer.Argument(metavar="IN.jsonl", help="One request per line: id, and prompt, messages or token_ids.")
    ],
    out_file: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="The answers, in the order of the requests.")],
    target: Annotated[
        str | None, typer.Option(help="Decode services that run already: host:port[,host:port] or a gRPC name.")
    ] = None,
    pack: Annotated[Path | None, typer.Option(help="Start services for this pack, for the time of the batch.")] = None,
    prefills: options.Prefills = 1,
    decodes: options.Decodes = 1,
    memory: options.Memory = None,
    draft: options.DraftKind = "ngram",
    draft_pack: options.DraftPack = None,
    draft_length: options.DraftLength = None,
    logs: options.Logs = False,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests under way at a time; by default 8 per decode service.")
    ] = None,
    timeout: Annotated[str, typer.Option(help="Deadline of each request, as in 90s, 30m or 2h.")] = f"{TIMEOUT_S:g}s",
    shift: Annotated[str, typer.Option(help="The shift to project to, as in 8h.")] = "8h",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report there too, as JSON.")] = None,
) -> None:
    """Answer a file of requests. Interrupted, it continues when run again.

    Exit code 0: every request was answered. 1: some failed (their lines say why), or nothing could be done.
    """
    with options.told_errors("interrupted; what is answered is kept: run the same command again to continue"):
        timeout_s, shift_s = parse_duration(timeout), parse_duration(shift)
        if not (timeout_s and shift_s):
            raise InputError("--timeout and --shift must be longer than nothing, as in 30m or 8h")
        if out_file.exists() and in_file.exists() and in_file.samefile(out_file):
            raise InputError(f"{out_file} is the file of requests; give the answers another name")
        jobs = read_jobs(in_file)
        plan = _plan(target, pack, memory, prefills, decodes, draft, draft_pack, draft_length)
        with _services(target, plan, logs) as (decodes_target, addresses):
            with BatchProgress(options.messages) as progress:
                report = asyncio.run(
                    run_batch(
                        jobs,
                        out_file,
                        target=decodes_target,
                        progress=progress,
                        addresses=addresses,
                        concurrency=concurrency,
                        timeout_s=timeout_s,
                        shift_s=shift_s,
                    )
                )
            Console().print(report_table(report))
            if json_file is not None:
                json_file.write_text(json.dumps(report_json(report), indent=2) + "\n")
    if report.failed:
        options.messages.print(f"{report.failed} failed; run the same command again to try those alone")
        raise typer.Exit(1)


def _plan(
    target: str | None,
    pack: Path | None,
    memory: str | None,
    prefills: int,
    decodes: int,
    draft: Draft,
    draft_pack: Path | None,
    draft_length: int | None,
) -> LocalPlan | None:
    """The services to start; None where they run already."""
    if (target is None) == (pack is None):
        raise InputError("give either --target, for services that run already, or --pack, to start some")
    if pack is None:
        return None
    return options.local_plan(
        pack,
        memory=memory,
        prefills=prefills,
        decodes=decodes,
        draft=draft,
        draft_pack=draft_pack,
        draft_length=draft_length,
    )


@contextlib.contextmanager
def _services(target: str | None, plan: LocalPlan | None, logs: bool) -> Iterator[tuple[Target, Sequence[str] | None]]:
    """What to call, and the addresses of all services where they are known."""
    if plan is None:
        assert target is not None  # `_plan` saw to it
        yield target, None
        return
    with options.running(plan, logs) as services:
        yield services.target, services.addresses
