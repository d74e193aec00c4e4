"""`headrace serve`: prefill and decode services on this machine, until Ctrl-C."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli import _options as options
from headrace.cli._services import ServiceOptions
from headrace.local import LocalServices


def serve(
    pack: Annotated[Path, typer.Option(help="The packed model to serve.")],
    services: ServiceOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print the addresses as one line of JSON.")] = False,
) -> None:
    """Start services, print their addresses, and drain and stop them on Ctrl-C or SIGTERM.

    On one machine, --colocate is usually right: one process, and one read of a layer serves prompts and drafts alike.

    Exit code 0: stopped as asked, and what ran was finished. 1: a service failed. 2: the settings cannot work.
    """
    ctrl_c = contextlib.suppress(KeyboardInterrupt)
    with options.told_errors(), services.running(services.plan(pack)) as started, ctrl_c:
        # Inside from the first line on: who reads it may stop it at once.
        print("\n".join(_told(started, as_json)), flush=True)
        options.messages.print(f"call it with --target {','.join(started.target)}; Ctrl-C drains and stops it")
        started.wait()


def _told(services: LocalServices, as_json: bool) -> list[str]:
    stages = (("prefill", services.prefills), ("decode", services.decodes))
    found = [(stage, service.address, service.metrics) for stage, ready in stages for service in ready]
    if not as_json:
        return [f"{stage} {address} metrics {metrics}" for stage, address, metrics in found]
    described = [
        {"stage": stage, "address": address, "metrics": metrics, "pid": pid}
        for (stage, address, metrics), pid in zip(found, services.pids, strict=True)
    ]
    return [json.dumps({"target": ",".join(services.target), "services": described})]
