"""How what a shift brings is shown: tables for people, JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace.cli._shift import Shift
from shared.shift import Arrangement, Fleet, Job, StageForecast

MEANINGS: Mapping[Arrangement, str] = {
    "colocated": "one decode process on each machine, which computes prompts too",
    "together": "a prefill and a decode process on each machine",
    "apart": "each process on a machine of its own",
}


def show(shift: Shift) -> None:
    """Prints the stages, the fleets and the recommendation."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(_stages(shift))
    console.print(_fleets(shift))
    meanings = [f"{fleet.arrangement}: {MEANINGS[fleet.arrangement]}." for fleet in shift.fleets]
    for line in (" ".join(meanings), *shift.refused, _advice(shift)):
        console.print(line, markup=False)


def to_json(shift: Shift) -> dict[str, Any]:
    """The same numbers. Times in seconds."""
    return {
        "job": {
            "prompt_tokens": shift.job.prompt_tokens,
            "output_tokens": shift.job.output_tokens,
            "shared_tokens": shift.job.shared_tokens,
            "reports": shift.job.reports,
            "shift_s": shift.job.shift_s,
            "price_per_hour": shift.job.price_per_hour,
        },
        "fleets": [_fleet_json(fleet, shift.job) for fleet in shift.fleets],
        "recommended": shift.recommended.arrangement,
        "refused": list(shift.refused),
    }


def _fleet_json(fleet: Fleet, job: Job) -> dict[str, Any]:
    price = job.price_per_hour
    return {
        "arrangement": fleet.arrangement,
        "prefills": fleet.prefills,
        "decodes": fleet.decodes,
        "machines": fleet.machines,
        "report_s": fleet.report_s,
        "reports_per_shift": fleet.reports_in(job.shift_s),
        "job_s": None if job.reports is None else job.reports * fleet.report_s,
        "cost_of_report": None if price is None else fleet.cost_of_report(price),
        "stages": [
            {
                "stage": stage.stage,
                "resident_layers": len(stage.plan.residency.resident),
                "layers": stage.plan.demand.layers,
                "draft": stage.draft,
                "draft_length": stage.draft_length,
                "at_once": stage.at_once,
                "report_s": stage.report_s,
                "compute_s": stage.compute_s,
                "read_s": stage.read_s,
                "bound_by": stage.bound_by,
            }
            for stage in fleet.stages
        ],
    }


def _stages(shift: Shift) -> Table:
    job = shift.job
    shared = f", {job.known_tokens} of them shared" if job.known_tokens else ""
    table = _table(
        f"Reports of {job.prompt_tokens} prompt tokens{shared} and {job.output_tokens} more",
        ("process", "layers that stay", "draft", "at once", "s a report", "bound by"),
    )
    seen = {stage.stage: stage for fleet in shift.fleets for stage in fleet.stages}
    for stage in seen.values():
        resident = f"{len(stage.plan.residency.resident)} of {stage.plan.demand.layers}"
        table.add_row(stage.stage, resident, _draft(stage), str(stage.at_once), f"{stage.report_s:.3g}", stage.bound_by)
    return table


def _draft(stage: StageForecast) -> str:
    if stage.stage == "prefill":
        return ""
    return f"{stage.draft}, {stage.draft_length}" if stage.draft_length else "none"


def _fleets(shift: Shift) -> Table:
    job = shift.job
    columns = ["processes", "prefill", "decode", "machines", "reports a shift"]
    columns += [f"hours for {job.reports:,}"] if job.reports else []
    columns += ["cost of a report"] if job.price_per_hour is not None else []
    table = _table(f"A shift of {job.shift_s / 3600:g} h", columns)
    for fleet in shift.fleets:
        counts = (fleet.prefills, fleet.decodes, fleet.machines)
        row = [fleet.arrangement, *(str(count) for count in counts), f"{fleet.reports_in(job.shift_s):,}"]
        row += [f"{job.reports * fleet.report_s / 3600:.2f}"] if job.reports else []
        row += [_money(fleet.cost_of_report(job.price_per_hour))] if job.price_per_hour is not None else []
        table.add_row(*row, style="bold" if fleet is shift.recommended else None)
    return table


def _money(amount: float) -> str:
    """With three digits that mean something, and never as a power of ten."""
    digits = 2 - math.floor(math.log10(amount)) if amount else 2
    return f"{amount:,.{max(2, digits)}f}"


def _advice(shift: Shift) -> str:
    fleet, stage = shift.recommended, shift.recommended.stages[-1]
    machines = "1 machine" if fleet.machines == 1 else f"{fleet.machines} machines"
    told = f"Recommended: {fleet.arrangement}, {machines}, draft {stage.draft}."
    if len(fleet.stages) > 1:
        prefill, decode = fleet.stages
        told += f" Prefill is {prefill.report_s / (prefill.report_s + decode.report_s):.0%} of the work."
    if shift.job.reports is not None and fleet.reports_in(shift.job.shift_s) < shift.job.reports:
        told += " That does not write all reports in a shift: add replicas."
    return told


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=not number)
    return table
