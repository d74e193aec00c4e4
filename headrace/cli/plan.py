"""`headrace plan`: how a memory budget is spent, what fits into it, how fast it goes, and what a shift of it brings."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headrace.cli import _options as options
from shared.config import parse_bytes, parse_duration
from shared.errors import ConfigurationError
from shared.limits import DECODE_BATCH

if TYPE_CHECKING:
    from headrace.cli._planning import Planning
    from shared.shift import Job

Stage = Literal["prefill", "decode", "colocated"]


def plan(
    pack: Annotated[Path, typer.Argument(help="The packed model.")],
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Budget of the process, as in 2GiB, 800MB or 50%.")],
    device: options.Device = "cpu",
    device_memory: options.DeviceMemory = None,
    stage: Annotated[Stage, typer.Option(help="Which process; colocated: both in one.")] = "decode",
    draft: options.DraftKind = "auto",
    draft_pack: options.DraftPack = None,
    draft_length: options.DraftLength = None,
    acceptance: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Assumed chance that a draft token is right (0.8; n-grams 0.3); yours depends on the text.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Most sequences that share a decode pass.")] = DECODE_BATCH,
    context_length: Annotated[int | None, typer.Option(min=1, help="Longest sequence served (the model's).")] = None,
    prefix_cache: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Prefill: KV kept for prompts that begin alike (what is left).")
    ] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Of a report: what a shift brings is shown.")] = None,
    output_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens generated for a report.")] = None,
    shared_tokens: Annotated[int, typer.Option(min=0, help="Prompt tokens that all reports begin with.")] = 0,
    reports: Annotated[int | None, typer.Option(min=1, help="Reports in a shift (what one machine brings).")] = None,
    shift: Annotated[str, typer.Option(help="Length of a shift.")] = "8h",
    price_per_hour: Annotated[float | None, typer.Option(min=0, help="Of one machine, in any currency.")] = None,
    prefills: Annotated[int | None, typer.Option(min=0, help="Prefill replicas; 0: colocated (recommended).")] = None,
    decodes: Annotated[int | None, typer.Option(min=1, help="Decode replicas (recommended).")] = None,
    recalibrate: Annotated[bool, typer.Option("--recalibrate", help="Measure this machine again.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show how a memory budget is spent, what fits into it, how fast it goes on this machine, and what a shift brings.

    With --prompt-tokens and --output-tokens: how many reports a shift brings, at what cost each, with which residency,
    draft and replicas. --reports asks for so many and is answered with the machines that they need.

    With --device: how both of its budgets are spent, and no forecast.

    The forecast needs a calibration of some seconds, which is kept in the user's cache folder. Exit code 2: the budget
    is too small (the message names the smallest that works), or options contradict each other.
    """
    job = _job(prompt_tokens, output_tokens, shared_tokens, reports, shift, price_per_hour)
    replicas = _replicas(job, prefills, decodes)
    from shared.threads import wait_passively

    wait_passively()
    import torch

    from headrace.cli import _shift_view
    from headrace.cli._plan_view import show, to_json
    from headrace.cli._planning import Planning
    from headrace.cli._shift import shift_of
    from shared.pack.reader import Pack
    from shared.prospect import prospect

    torch.set_num_threads(os.cpu_count() or 1)
    shares = stage == "prefill" and job is None
    planning = Planning(
        pack=Pack.open(pack),
        draft="none" if shares else draft,
        draft_path=None if shares else draft_pack,
        draft_length=draft_length,
        given_acceptance=acceptance,
        batch=batch,
        context_length=context_length,
        prefix_cache=prefix_cache,
        again=recalibrate,
        device=device,
        device_memory=device_memory,
    )
    budget_bytes = parse_bytes(memory)
    if (device, device_memory) != ("cpu", None):
        _plan_device(planning, stage, budget_bytes, job, as_json)
        return
    planned = planning.within(budget_bytes, stage)  # refuses before anything is measured
    with options.messages.status("measuring disk, memory and matrix products …"):
        outlook = planned.outlook(stage)
        found = prospect(budget_bytes, planned.demand(stage), outlook)
        brought = shift_of(job, budget_bytes, planning, replicas) if job is not None else None
    if as_json:
        extra = {"shift": _shift_view.to_json(brought)} if brought else {}
        print(json.dumps(to_json(found, outlook) | extra, indent=2))
        return
    show(found, outlook)
    if brought:
        _shift_view.show(brought)


def _plan_device(planning: Planning, stage: Stage, budget_bytes: int, job: Job | None, as_json: bool) -> None:
    from headrace.cli import _device_plan

    if job is not None:
        raise ConfigurationError("a shift is forecast for the CPU only; leave --device or --prompt-tokens out")
    found = _device_plan.device_plan(planning, stage, budget_bytes)
    if as_json:
        print(json.dumps(_device_plan.to_json(found), indent=2))
    else:
        _device_plan.show(found)


def _job(
    prompt_tokens: int | None,
    output_tokens: int | None,
    shared_tokens: int,
    reports: int | None,
    shift: str,
    price_per_hour: float | None,
) -> Job | None:
    from shared.shift import Job

    if prompt_tokens is None or output_tokens is None:
        if (prompt_tokens, output_tokens, reports, price_per_hour, shared_tokens) != (None, None, None, None, 0):
            raise ConfigurationError(
                "what a shift brings depends on the size of a report: give both --prompt-tokens and --output-tokens"
            )
        return None
    shift_s = parse_duration(shift)
    if not shift_s:
        raise ConfigurationError("--shift must be longer than nothing, as in 8h")
    if shared_tokens >= prompt_tokens:
        raise ConfigurationError(
            f"--shared-tokens {shared_tokens} must be fewer than --prompt-tokens {prompt_tokens}: reports differ"
        )
    return Job(
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        shared_tokens=shared_tokens,
        reports=reports,
        shift_s=shift_s,
        price_per_hour=price_per_hour,
    )


def _replicas(job: Job | None, prefills: int | None, decodes: int | None) -> tuple[int, int] | None:
    if (prefills is None) != (decodes is None):
        raise ConfigurationError("--prefills and --decodes go together; give both, or neither for a recommendation")
    if prefills is None or decodes is None:
        return None
    if job is None:
        raise ConfigurationError("--prefills and --decodes need a job: give --prompt-tokens and --output-tokens")
    return prefills, decodes
