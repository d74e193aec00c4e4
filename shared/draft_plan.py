"""The memory plan of a decode process whose draft may be left out: that is part of what `auto` chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from shared.demand import DecodeSettings, decode_demand
from shared.draft_pack import DraftPack
from shared.errors import BudgetError
from shared.pack.reader import Pack
from shared.streaming.device_plan import TieredPlan
from shared.streaming.plan import MemoryPlan, plan_memory

Plan = TypeVar("Plan", MemoryPlan, TieredPlan)


def plan_decode(
    budget_bytes: int,
    pack: Pack,
    draft: str,
    draft_pack: DraftPack | None,
    settings: DecodeSettings,
    runtime_bytes: int,
) -> tuple[MemoryPlan, DraftPack | None]:
    """Plans a budget, and says whether the draft's pack is part of it (`worthwhile_draft`).

    Raises:
        BudgetError: the budget is too small.
    """

    def planned(with_draft: DraftPack | None) -> MemoryPlan:
        return plan_memory(budget_bytes, decode_demand(pack, with_draft, settings, runtime_bytes))

    return worthwhile_draft(draft, draft_pack, planned)


def worthwhile_draft(
    draft: str, draft_pack: DraftPack | None, planned: Callable[[DraftPack | None], Plan]
) -> tuple[Plan, DraftPack | None]:
    """The plan with the draft's pack or without it, and the pack if it is part of the plan.

    `auto` goes without where it does not fit, and where the whole target would stay in memory but for it: then each of
    its tokens would cost about what the target's own do, and the target would have to be streamed besides.

    Args:
        planned: plans with a draft's pack, or without one.

    Raises:
        BudgetError: the budget is too small.
    """
    if draft != "auto" or draft_pack is None:
        return planned(draft_pack), draft_pack
    without = planned(None)
    try:
        plan = planned(draft_pack)
    except BudgetError:
        return without, None
    if without.everything_stays and not plan.everything_stays:
        return without, None
    return plan, draft_pack
