"""The memory plan: never over the budget, everything that fits is used, and a refusal names what would work."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import BudgetError
from shared.streaming.plan import (
    FEWEST_SLOTS,
    MOST_SLOTS,
    START_VARIATION_BYTES,
    Demand,
    MemoryPlan,
    kept_experts,
    plan_memory,
)

MIB = 1 << 20


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    """Demands as models make them: a block of KV is never larger than a layer; prefill has no blocks at all."""
    sizes = st.integers(0, 100 * MIB)
    layer_bytes = draw(st.integers(1, 40 * MIB))
    blocks = draw(st.booleans())
    fewest = draw(st.integers(0, 50)) if blocks else 0
    return Demand(
        runtime_bytes=draw(sizes),
        outer_bytes=draw(sizes),
        draft_bytes=draw(sizes),
        workspace_bytes=draw(sizes),
        transfer_bytes=draw(sizes),
        layers=draw(st.integers(1, 100)),
        layer_bytes=layer_bytes,
        kv_block_bytes=draw(st.integers(1, layer_bytes)) if blocks else 0,
        fewest_kv_blocks=fewest,
        most_kv_blocks=fewest + draw(st.integers(0, 2000)) if blocks else 0,
        kv_share=draw(st.sampled_from([0.125, 0.5])),
    )


def least_bytes(demand: Demand) -> int:
    """What must be there: everything fixed, the slots, and the fewest blocks."""
    fixed = demand.runtime_bytes + demand.outer_bytes + demand.draft_bytes
    fixed += demand.workspace_bytes + demand.transfer_bytes
    slots = min(FEWEST_SLOTS, demand.layers)
    return fixed + slots * demand.layer_bytes + demand.fewest_kv_blocks * demand.kv_block_bytes


@st.composite
def plans(draw: st.DrawFn) -> MemoryPlan:
    """Plans of budgets from just enough to more than everything needs."""
    demand = draw(demands())
    useful_bytes = demand.layers * demand.layer_bytes + demand.most_kv_blocks * demand.kv_block_bytes
    return plan_memory(least_bytes(demand) + draw(st.integers(0, useful_bytes + MIB)), demand)


@given(plans())
def test_a_plan_stays_inside_its_budget_and_inside_what_can_be_used(plan: MemoryPlan) -> None:
    demand = plan.demand
    assert plan.planned_bytes <= plan.budget_bytes
    assert demand.fewest_kv_blocks <= plan.kv_blocks <= demand.most_kv_blocks
    assert plan.residency.resident <= set(range(demand.layers))


@st.composite
def expert_plans(draw: st.DrawFn) -> MemoryPlan:
    """Plans for models with experts."""
    layers = draw(demands())
    demand = replace(layers, experts=layers.layers * draw(st.integers(1, 64)), expert_bytes=draw(st.integers(1, MIB)))
    useful_bytes = demand.layers * demand.layer_bytes + demand.experts * demand.expert_bytes
    useful_bytes += demand.most_kv_blocks * demand.kv_block_bytes
    return plan_memory(demand.least_bytes + draw(st.integers(0, useful_bytes + MIB)), demand)


@given(expert_plans())
def test_experts_get_what_layers_leave_and_no_more_than_there_are(plan: MemoryPlan) -> None:
    demand, slots = plan.demand, plan.expert_slots
    assert plan.planned_bytes <= plan.budget_bytes
    assert min(FEWEST_SLOTS, demand.experts) <= slots <= demand.experts
    layers = replace(demand, experts=0, expert_bytes=0)
    left = plan.budget_bytes - plan.planned_bytes
    assert left < max(demand.expert_bytes, demand.kv_block_bytes) or slots == demand.experts
    if len(plan.residency.resident) < demand.layers:
        resident = len(plan_memory(plan.budget_bytes, layers).residency.resident)
        assert len(plan.residency.resident) <= resident
        assert slots * demand.expert_bytes < demand.fewest_expert_bytes + demand.layer_bytes + demand.expert_bytes


@given(expert_plans(), st.integers(0, 100 * MIB))
def test_a_larger_budget_never_keeps_fewer_layers_nor_with_all_layers_fewer_experts(
    plan: MemoryPlan, more_bytes: int
) -> None:
    larger = plan_memory(plan.budget_bytes + more_bytes, plan.demand)
    assert len(larger.residency.resident) >= len(plan.residency.resident)
    if len(plan.residency.resident) == plan.demand.layers:
        assert larger.expert_slots >= plan.expert_slots


@given(st.integers(1, 1000), st.integers(1, 1000))
def test_all_experts_stay_or_slots_are_left_for_others(slots: int, experts: int) -> None:
    kept = kept_experts(slots, experts)
    assert 0 <= kept <= min(slots, experts)
    assert kept == experts if slots >= experts else slots == 1 or slots - kept >= FEWEST_SLOTS


def test_the_smallest_budget_of_a_model_with_experts_has_two_of_its_layers_and_two_of_its_experts() -> None:
    demand = Demand(
        runtime_bytes=5, outer_bytes=0, workspace_bytes=0, layers=8, layer_bytes=40, experts=64, expert_bytes=10
    )
    plan = plan_memory(5 + 2 * 40 + 2 * 10, demand)
    assert dict(plan.rows)["experts (2 of 64)"] == 20
    assert plan.kept_share == 0
    with pytest.raises(BudgetError):
        plan_memory(5 + 2 * 40 + 2 * 10 - 1, demand)
    everything = plan_memory(5 + 8 * 40 + 64 * 10, demand)
    assert everything.everything_stays
    assert not plan_memory(5 + 8 * 40 + 64 * 10 - 1, demand).everything_stays


@given(plans())
def test_slots_are_there_exactly_when_layers_are_streamed(plan: MemoryPlan) -> None:
    residency = plan.residency
    streamed = plan.demand.layers - len(residency.resident)
    if streamed:
        assert FEWEST_SLOTS <= residency.slots <= MOST_SLOTS
        assert residency.slots < streamed, "with as many slots as streamed layers, all could be resident"
    else:
        assert residency.slots == 0


@given(plans())
def test_what_is_left_over_is_of_no_use(plan: MemoryPlan) -> None:
    demand = plan.demand
    left = plan.budget_bytes - plan.planned_bytes
    all_resident = len(plan.residency.resident) == demand.layers
    assert left < demand.layer_bytes or all_resident
    assert left < demand.kv_block_bytes or plan.kv_blocks == demand.most_kv_blocks


@given(plans(), st.integers(0, 100 * MIB))
def test_a_larger_budget_never_keeps_fewer_layers(plan: MemoryPlan, more_bytes: int) -> None:
    larger = plan_memory(plan.budget_bytes + more_bytes, plan.demand)
    assert len(larger.residency.resident) >= len(plan.residency.resident)


def test_a_budget_that_just_reaches_the_next_block_does_not_cost_a_layer() -> None:
    demand = Demand(
        runtime_bytes=0, outer_bytes=0, workspace_bytes=0, layers=9, layer_bytes=5, kv_block_bytes=10, most_kv_blocks=99
    )
    resident = [len(plan_memory(budget, demand).residency.resident) for budget in range(10, 120)]
    assert resident == sorted(resident)


@given(plans())
def test_streamed_layers_lie_evenly_between_resident_ones(plan: MemoryPlan) -> None:
    demand = plan.demand
    streamed = sorted(set(range(demand.layers)) - plan.residency.resident)
    following = [*streamed[1:], *(layer + demand.layers for layer in streamed[:1])]
    gaps = {after - before for before, after in zip(streamed, following, strict=True)}
    assert not gaps or max(gaps) - min(gaps) <= 1


@given(demands())
def test_a_refusal_names_the_smallest_budget_that_works(demand: Demand) -> None:
    with pytest.raises(BudgetError) as refusal:
        plan_memory(least_bytes(demand) - 1, demand)
    named = re.search(r"the smallest that works is (\d+) MiB", str(refusal.value))
    assert named
    smallest_bytes = int(named[1]) * MIB
    assert plan_memory(smallest_bytes, demand).planned_bytes <= smallest_bytes
    with pytest.raises(BudgetError):
        plan_memory(smallest_bytes - START_VARIATION_BYTES - MIB, demand)


def test_a_budget_that_holds_everything_streams_nothing() -> None:
    demand = Demand(runtime_bytes=5, outer_bytes=5, workspace_bytes=5, layers=30, layer_bytes=7)
    assert plan_memory(15 + 30 * 7, demand).residency.resident == frozenset(range(30))
    plan = plan_memory(15 + 30 * 7 - 1, demand)
    assert len(plan.residency.resident) + plan.residency.slots == 29


def test_the_table_adds_up_and_names_its_rows() -> None:
    demand = Demand(
        runtime_bytes=100,
        outer_bytes=50,
        draft_bytes=30,
        workspace_bytes=20,
        layers=8,
        layer_bytes=40,
        kv_block_bytes=4,
        fewest_kv_blocks=2,
        most_kv_blocks=6,
    )
    plan = plan_memory(200 + 2 * 40 + 3 * 40 + 6 * 4, demand)
    assert dict(plan.rows) == {
        "runtime": 100,
        "outer weights": 50,
        "draft": 30,
        "resident layers (3 of 8)": 120,
        "slots (2)": 80,
        "KV blocks (6)": 24,
        "workspace": 20,
        "transfer buffers": 0,
    }
    assert plan.planned_bytes == plan.budget_bytes
