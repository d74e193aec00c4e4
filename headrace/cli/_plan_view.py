"""How a plan is shown: tables for people, JSON for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from shared.forecast import Forecast
from shared.prospect import PROMPT_TOKENS, Outlook, Prospect
from shared.streaming.plan import mebibytes


def show(found: Prospect, outlook: Outlook) -> None:
    """Prints the plan, what fits, the forecast and the advice."""
    console = Console(highlight=False, soft_wrap=True)
    for table in (_memory(found), _sequences(found), _forecasts(found, outlook)):
        if table is not None:
            console.print(table)
    for line in (_assumptions(outlook), *found.advice):
        console.print(line, markup=False)


def to_json(found: Prospect, outlook: Outlook) -> dict[str, Any]:
    """The same numbers. Sizes in bytes, times in seconds."""
    plan, speculation = found.plan, outlook.speculation
    return {
        "budget_bytes": plan.budget_bytes,
        "planned_bytes": plan.planned_bytes,
        "smallest_budget_bytes": plan.demand.smallest_budget_bytes,
        "parts": [{"name": name, "bytes": size} for name, size in plan.rows],
        "layers": plan.demand.layers,
        "resident_layers": sorted(plan.residency.resident),
        "slots": plan.residency.slots,
        "experts": plan.demand.experts,
        "expert_slots": plan.expert_slots,
        "experts_kept": plan.kept_share,
        "kv_blocks": plan.kv_blocks,
        "sequences": [{"tokens": tokens, "fit": count} for tokens, count in found.sequences.items()],
        "machine": asdict(outlook.machine),
        "peak_operations_per_s": outlook.model.peak_operations_per_s,
        "draft_length": speculation.length if speculation else None,
        "assumed_acceptance": speculation.acceptance if speculation and speculation.length else None,
        "forecasts": [
            asdict(forecast)
            | {"tokens_per_s": forecast.tokens_per_s, "limit_tokens_per_s": forecast.limit_tokens_per_s}
            for forecast in found.forecasts
        ],
        "advice": list(found.advice),
    }


def _memory(found: Prospect) -> Table:
    plan = found.plan
    table = _table(f"Memory: {mebibytes(plan.planned_bytes)} of {mebibytes(plan.budget_bytes)}", "", "MiB")
    for name, size_bytes in plan.rows:
        table.add_row(name, f"{size_bytes / 2**20:,.0f}")
    streamed = plan.demand.layers - len(plan.residency.resident)
    table.add_row("streamed from disk in each pass", f"{streamed * plan.demand.layer_bytes / 2**20:,.0f}", style="dim")
    if plan.demand.experts:
        kept = round(plan.kept_share * plan.demand.experts)
        most_bytes = (plan.demand.experts - kept) * plan.demand.expert_bytes
        name = f"and experts, at most ({kept} of {plan.demand.experts} stay)"
        table.add_row(name, f"{most_bytes / 2**20:,.0f}", style="dim")
    return table


def _sequences(found: Prospect) -> Table | None:
    if not found.sequences:
        return None
    table = _table("What KV holds at once", "tokens each", "sequences")
    for tokens, count in found.sequences.items():
        table.add_row(f"{tokens:,}", f"{count:,}")
    return table


def _forecasts(found: Prospect, outlook: Outlook) -> Table:
    unit = "prompt tokens/s" if outlook.speculation is None else "tokens/s"
    table = _table("Forecast, seconds", "batch", "pass", "read", "compute", "draft", unit, "limit", "bound by")
    for forecast in found.forecasts:
        table.add_row(*_forecast(forecast))
    return table


def _forecast(forecast: Forecast) -> list[str]:
    times = (forecast.pass_s, forecast.read_s, forecast.compute_s, forecast.draft_s)
    rates = (forecast.tokens_per_s, forecast.limit_tokens_per_s)
    return [str(forecast.batch), *(f"{s:.3f}" for s in times), *(f"{rate:,.3g}" for rate in rates), forecast.limited_by]


def _assumptions(outlook: Outlook) -> str:
    disk, memory = outlook.machine.disk_bytes_per_s / 1e9, outlook.machine.memory_bytes_per_s / 1e9
    peak = outlook.model.peak_operations_per_s / 1e12
    speeds = f"Measured: disk {disk:.2f} GB/s, memory {memory:.1f} GB/s, products {peak:.2f} T operations/s. "
    if outlook.model.experts:
        speeds += "Assumed: each expert is as likely as any other. "
    if outlook.speculation is None:
        return speeds + (
            f"Prompts of {PROMPT_TOKENS} tokens, up to {outlook.pass_tokens} tokens in a pass, none of them in the "
            "prefix cache."
        )
    if not outlook.speculation.length:
        return speeds + "No draft."
    return speeds + (
        f"Assumed: drafts of {outlook.speculation.length} tokens, each right with a chance of "
        f"{outlook.speculation.acceptance:g} (--acceptance), {outlook.speculation.tokens:.1f} tokens a pass."
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table
