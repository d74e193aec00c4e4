"""The memory plan of a decode process whose draft may be left out: that is part of what `auto` chooses."""

from __future__ import annotations

from shared.demand import DecodeSettings, decode_demand
from shared.draft_pack import DraftPack
from shared.errors import BudgetError
from shared.pack.reader import Pack
from shared.streaming.plan import MemoryPlan, plan_memory


def plan_decode(
    budget_bytes: int,
    pack: Pack,
    draft: str,
    draft_pack: DraftPack | None,
    settings: DecodeSettings,
    runtime_bytes: int,
) -> tuple[MemoryPlan, DraftPack | None]:
    """Plans a budget, and says whether the draft's pack is part of it.

    `auto` goes without where it does not fit, and where the whole target would stay in memory but for it: then each of
    its tokens would cost about what the target's own do, and the target would have to be streamed besides.

    Raises:
        BudgetError: the budget is too small.
    """

    def planned(with_draft: DraftPack | None) -> MemoryPlan:
        return plan_memory(budget_bytes, decode_demand(pack, with_draft, settings, runtime_bytes))

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
