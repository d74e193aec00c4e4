"""`headrace plan`: how a memory budget is spent, what fits into it, and how fast it will go on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headrace.cli import _options as options
from shared.config import parse_bytes
from shared.errors import ConfigurationError, HeadraceError
from shared.limits import DECODE_BATCH, LOCAL_PASS_TOKENS, PREFILL_PASS_TOKENS

if TYPE_CHECKING:
    from shared.calibration import Calibration
    from shared.draft_pack import DraftPack
    from shared.pack.reader import Pack
    from shared.prospect import Outlook
    from shared.streaming.plan import Demand

Stage = Literal["prefill", "decode", "colocated"]

PLANNED_DRAFT_LENGTH = 4
"""For the forecast, where the length is left to the service."""


def plan(
    pack: Annotated[Path, typer.Argument(help="The packed model.")],
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Budget of the process, as in 2GiB, 800MB or 50%.")],
    stage: Annotated[Stage, typer.Option(help="Which process; colocated: both in one.")] = "decode",
    draft: options.DraftKind = "ngram",
    draft_pack: options.DraftPack = None,
    draft_length: options.DraftLength = None,
    acceptance: Annotated[
        float, typer.Option(min=0, max=1, help="Assumed chance that a draft token is right; yours depends on the text.")
    ] = 0.8,
    batch: Annotated[int, typer.Option(min=1, help="Most sequences that share a decode pass.")] = DECODE_BATCH,
    context_length: Annotated[int | None, typer.Option(min=1, help="Longest sequence served (the model's).")] = None,
    prefix_cache: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Prefill: KV kept for prompts that begin alike (what is left).")
    ] = None,
    recalibrate: Annotated[bool, typer.Option("--recalibrate", help="Measure this machine again.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show how a memory budget is spent, what fits into it, and how fast it will go on this machine.

    The forecast needs a calibration of a few seconds, which is kept in the user's cache folder. Exit code 2: the budget
    is too small; the message names the smallest that works.
    """
    from shared.threads import wait_passively

    wait_passively()
    import torch

    from headrace.cli._plan_view import show, to_json
    from shared.calibration import calibrated
    from shared.draft_pack import DraftPack
    from shared.pack.reader import Pack
    from shared.prospect import prospect
    from shared.streaming.plan import plan_memory

    torch.set_num_threads(os.cpu_count() or 1)
    opened = Pack.open(pack)
    drafting = None if stage == "prefill" else DraftPack.open(draft, draft_pack, opened)
    budget_bytes = parse_bytes(memory)
    demand = _demand(stage, opened, drafting, batch, draft, draft_length, context_length, prefix_cache, recalibrate)
    plan_memory(budget_bytes, demand)  # refuses before anything is measured
    with options.messages.status("measuring disk, memory and matrix products …"):
        threads = torch.get_num_threads()
        calibration = calibrated(opened, threads, again=recalibrate)
        drafts = calibrated(drafting.pack, threads, again=recalibrate) if drafting else None
    outlook = _outlook(stage, opened, drafting, (calibration, drafts), draft, draft_length, acceptance)
    found = prospect(budget_bytes, demand, outlook)
    print(json.dumps(to_json(found, outlook), indent=2)) if as_json else show(found, outlook)


def _demand(
    stage: Stage,
    pack: Pack,
    drafting: DraftPack | None,
    batch: int,
    draft: str,
    draft_length: int | None,
    context_length: int | None,
    prefix_cache: str | None,
    recalibrate: bool,
) -> Demand:
    from shared.demand import DecodeSettings, PrefillSettings, decode_demand, prefill_demand, spool_bytes

    context = min(context_length or pack.spec.context_length, pack.spec.context_length)
    runtime_bytes = _runtime_bytes(stage, pack, drafting, draft, recalibrate)
    if stage == "prefill":
        spool = spool_bytes(pack, context)
        prefill = PrefillSettings(
            context_length=context,
            pass_tokens=PREFILL_PASS_TOKENS,
            spool_bytes=spool,
            prefix_cache_bytes=parse_bytes(prefix_cache) if prefix_cache else None,
        )
        return prefill_demand(pack, prefill, runtime_bytes)
    colocated = stage == "colocated"
    decode = DecodeSettings(
        context_length=context,
        batch=batch,
        draft_length=draft_length,
        receives=not colocated,
        prompt_tokens=LOCAL_PASS_TOKENS if colocated else 0,
    )
    return decode_demand(pack, drafting, decode, runtime_bytes)


def _outlook(
    stage: Stage,
    pack: Pack,
    drafting: DraftPack | None,
    calibrations: tuple[Calibration, Calibration | None],
    draft: str,
    draft_length: int | None,
    acceptance: float,
) -> Outlook:
    from shared.forecast import Machine, Speculation
    from shared.prospect import Outlook, model_speed

    own, drafts = calibrations
    speculation = Speculation(
        length=0 if draft == "none" else draft_length or PLANNED_DRAFT_LENGTH,
        acceptance=acceptance,
        draft=model_speed(drafting.pack, drafts) if drafting and drafts else None,
    )
    return Outlook(
        model=model_speed(pack, own),
        machine=Machine(disk_bytes_per_s=own.disk_bytes_per_s, memory_bytes_per_s=own.memory_bytes_per_s),
        speculation=None if stage == "prefill" else speculation,
        pass_tokens=PREFILL_PASS_TOKENS,
    )


def _runtime_bytes(stage: Stage, pack: Pack, drafting: DraftPack | None, draft: str, recalibrate: bool) -> int:
    """What the service itself says that it takes without weights: only it has its imports. Kept like a calibration."""
    from shared.machine import cached, kernel_versions

    module = "prefill_service" if stage == "prefill" else "decode_service"
    command = [sys.executable, "-m", module, str(pack.path), "--show-runtime", "--log-level", "error"]
    if module == "decode_service":
        command += ["--draft", draft, *(["--draft-pack", str(drafting.pack.path)] if drafting else [])]
    packs = [pack.manifest.model_digest, drafting.pack.manifest.model_digest if drafting else None]
    key = {"service": module, "packs": packs, "draft": draft, "python": sys.version, "kernels": kernel_versions()}

    def ask() -> int:
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            kind = ConfigurationError if run.returncode == 2 else HeadraceError
            raise kind(run.stderr.strip().removeprefix("error: "))
        return int(run.stdout)

    return int(cached("runtime", key, ask, again=recalibrate))
