"""`headrace serve`: prefill and decode services on this machine, until Ctrl-C."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli import _options as options


def serve(
    pack: Annotated[Path, typer.Option(help="The packed model to serve.")],
    prefills: options.Prefills = 1,
    decodes: options.Decodes = 1,
    memory: options.Memory = None,
    draft: options.DraftKind = "ngram",
    draft_pack: options.DraftPack = None,
    draft_length: options.DraftLength = None,
    logs: options.Logs = False,
) -> None:
    """Start services, print their addresses, and drain and stop them on Ctrl-C or SIGTERM."""
    with options.told_errors():
        plan = options.local_plan(
            pack,
            memory=memory,
            prefills=prefills,
            decodes=decodes,
            draft=draft,
            draft_pack=draft_pack,
            draft_length=draft_length,
        )
        with options.running(plan, logs) as services:
            for stage, ready in (("prefill", services.prefills), ("decode", services.decodes)):
                for service in ready:
                    print(f"{stage} {service.address} metrics {service.metrics}", flush=True)
            options.messages.print(f"call it with --target {','.join(services.target)}; Ctrl-C drains and stops it")
            with contextlib.suppress(KeyboardInterrupt):
                services.wait()
