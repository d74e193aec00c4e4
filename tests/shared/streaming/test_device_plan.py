"""The plan of two budgets: neither is exceeded, every layer has its place, and a refusal names what would work."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import BudgetError
from shared.streaming.device_plan import TieredDemand, TieredPlan, plan_tiers
from shared.streaming.plan import FEWEST_SLOTS, MOST_SLOTS, Demand

MIB = 1 << 20


@st.composite
def demands(draw: st.DrawFn) -> TieredDemand:
    sizes = st.integers(0, 100 * MIB)
    layers, layer_bytes = draw(st.integers(1, 60)), draw(st.integers(1, 40 * MIB))
    fewest = draw(st.integers(0, 50))
    device = Demand(
        runtime_bytes=draw(sizes),
        outer_bytes=draw(sizes),
        draft_bytes=draw(sizes),
        workspace_bytes=draw(sizes),
        layers=layers,
        layer_bytes=layer_bytes,
        kv_block_bytes=draw(st.integers(1, layer_bytes)),
        fewest_kv_blocks=fewest,
        most_kv_blocks=fewest + draw(st.integers(0, 2000)),
        budget_name="device memory budget",
    )
    host = Demand(
        runtime_bytes=draw(sizes),
        outer_bytes=0,
        workspace_bytes=draw(sizes),
        transfer_bytes=draw(sizes),
        layers=layers,
        layer_bytes=layer_bytes,
        kv_block_bytes=draw(st.integers(0, 1 << 14)),
    )
    return TieredDemand(host=host, device=device)


@st.composite
def plans(draw: st.DrawFn) -> TieredPlan:
    """From just enough on either side to more than everything needs."""
    demand = draw(demands())
    all_layers = demand.device.layers * demand.device.layer_bytes
    device_bytes = demand.device.least_bytes + draw(st.integers(0, 2 * all_layers))
    # The host's least depends on how many blocks the device's plan has room for.
    host = replace(demand.host, fewest_kv_blocks=demand.device.most_kv_blocks)
    return plan_tiers(host.least_bytes + draw(st.integers(0, 2 * all_layers)), device_bytes, demand)


@given(plans())
def test_neither_budget_is_exceeded(plan: TieredPlan) -> None:
    assert plan.host.planned_bytes <= plan.host.budget_bytes
    assert plan.device.planned_bytes <= plan.device.budget_bytes


@given(plans())
def test_every_layer_has_a_place_and_a_way_there(plan: TieredPlan) -> None:
    residency, layers = plan.residency, plan.device.demand.layers
    others = set(range(layers)) - residency.resident
    assert residency.host <= others
    on_device, on_host = len(residency.resident) + residency.device_slots, len(residency.host) + residency.slots
    assert plan.device.planned_bytes >= on_device * plan.device.demand.layer_bytes
    assert plan.host.planned_bytes >= on_host * plan.host.demand.layer_bytes
    read = others - residency.host
    assert (residency.device_slots >= min(FEWEST_SLOTS, layers)) if others else residency.device_slots == 0
    assert (residency.slots >= min(FEWEST_SLOTS, len(others))) if read else residency.slots == 0
    assert max(residency.slots, residency.device_slots) <= MOST_SLOTS
    assert residency.slots <= len(read)
    assert plan.everything_stays == (not read)


@given(plans())
def test_what_goes_with_a_block_on_the_host_is_there_for_every_block_of_the_device(plan: TieredPlan) -> None:
    assert plan.host.kv_blocks == plan.kv_blocks


@given(plans(), st.integers(0, 1 << 30))
def test_memory_on_the_host_saves_reads_and_memory_on_the_device_saves_copies(plan: TieredPlan, more: int) -> None:
    demand = TieredDemand(host=plan.host.demand, device=plan.device.demand)
    richer = plan_tiers(plan.host.budget_bytes + more, plan.device.budget_bytes, demand)
    assert richer.device == plan.device
    assert len(richer.residency.host) >= len(plan.residency.host)


@given(demands())
def test_a_refusal_says_which_budget_is_too_small_and_names_one_that_works(demand: TieredDemand) -> None:
    plenty = 1 << 50
    with pytest.raises(BudgetError, match="^the device memory budget of ") as refused:
        plan_tiers(plenty, demand.device.least_bytes - 1, demand)
    device_bytes = named_bytes(refused)
    plan = plan_tiers(plenty, device_bytes, demand)
    with pytest.raises(BudgetError, match="^the memory budget of ") as refused:
        plan_tiers(plan.host.demand.least_bytes - 1, device_bytes, demand)
    plan_tiers(named_bytes(refused), device_bytes, demand)


def named_bytes(refused: pytest.ExceptionInfo[BudgetError]) -> int:
    found = re.search(r"smallest that works is (\d+) MiB", str(refused.value))
    assert found
    return int(found[1]) * MIB
