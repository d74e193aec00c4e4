"""`headrace plan --device`: how both budgets of a process with a device are spent. No GPU has proven it yet."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from headrace.cli._planning import Planning, Stage
from shared.budget import measured_runtime_bytes
from shared.card import open_card
from shared.device_demand import decode_tiers, prefill_tiers
from shared.draft_plan import worthwhile_draft
from shared.errors import ConfigurationError
from shared.streaming.device_plan import TieredPlan, plan_tiers
from shared.streaming.plan import MemoryPlan, mebibytes

if TYPE_CHECKING:
    from shared.draft_pack import DraftPack

NO_FORECAST = "Speeds are not forecast for a device, and no GPU has been tried yet."


def device_plan(planning: Planning, stage: Stage, budget_bytes: int) -> TieredPlan:
    """The plan of a process of a stage that computes on a device of this machine.

    Raises:
        ConfigurationError: there is no such device.
        BudgetError: one of the budgets is too small; the message says which, and names the smallest that works.
    """
    card = open_card(planning.device, planning.device_memory)
    if card is None:
        raise ConfigurationError("--device-memory is for a CUDA device; the CPU's budget is --memory")
    schemes = [planning.pack.scheme] + ([planning.draft_pack.pack.scheme] if planning.draft_pack else [])
    measured_runtime_bytes(schemes, card.device)  # for what its first products take of the device
    return tiered(planning, stage, budget_bytes, card.budget_bytes, card.runtime_bytes())


def tiered(
    planning: Planning, stage: Stage, budget_bytes: int, device_bytes: int, device_runtime_bytes: int
) -> TieredPlan:
    """The plan for budgets, whatever the device.

    Args:
        device_runtime_bytes: what is taken of the device without any weights.

    Raises:
        BudgetError: as `device_plan`.
    """
    runtime_bytes = planning.runtime_bytes(stage)
    if stage == "prefill":
        settings = planning.prefill_settings
        return plan_tiers(
            budget_bytes, device_bytes, prefill_tiers(planning.pack, settings, runtime_bytes, device_runtime_bytes)
        )

    def planned(draft: DraftPack | None) -> TieredPlan:
        settings = planning.decode_settings(stage)
        demand = decode_tiers(planning.pack, draft, settings, runtime_bytes, device_runtime_bytes)
        return plan_tiers(budget_bytes, device_bytes, demand)

    return worthwhile_draft(planning.draft, planning.draft_pack, planned)[0]


def show(plan: TieredPlan) -> None:
    """Prints both tables."""
    console = Console(highlight=False, soft_wrap=True)
    for name, part in (("Device memory", plan.device), ("Host memory", plan.host)):
        title = f"{name}: {mebibytes(part.planned_bytes)} of {mebibytes(part.budget_bytes)}"
        table = Table("", title=title, title_justify="left", title_style="bold")
        table.add_column("MiB", justify="right")
        for row, size_bytes in part.rows:
            table.add_row(row, f"{size_bytes / 2**20:,.0f}")
        console.print(table)
    console.print(NO_FORECAST)


def to_json(plan: TieredPlan) -> dict[str, Any]:
    """The same numbers, in bytes, and which layers stay where."""
    stays = plan.residency
    residency = asdict(stays) | {"resident": sorted(stays.resident), "host": sorted(stays.host)}
    parts = {"device_memory": _described(plan.device), "host_memory": _described(plan.host)}
    return parts | {"residency": residency, "kv_blocks": plan.kv_blocks, "note": NO_FORECAST}


def _described(plan: MemoryPlan) -> dict[str, Any]:
    return {
        "budget_bytes": plan.budget_bytes,
        "planned_bytes": plan.planned_bytes,
        "smallest_budget_bytes": plan.demand.smallest_budget_bytes,
        "parts": [{"name": name, "bytes": size} for name, size in plan.rows],
    }
