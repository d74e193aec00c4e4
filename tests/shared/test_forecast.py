"""Forecasts: a pass takes the longer of reading and computing, and nothing is promised beyond the physical limit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.forecast import (
    Machine,
    ModelSpeed,
    Speculation,
    at_rows,
    decode_forecast,
    expected_tokens,
    prefill_forecast,
)
from shared.streaming.plan import Demand, MemoryPlan, plan_memory

MACHINE = Machine(disk_bytes_per_s=100.0, memory_bytes_per_s=10_000.0)
NO_DRAFT = Speculation(length=0, acceptance=0.8, draft=None)


def model(layer_s: dict[int, float], resident_layer_s: dict[int, float] | None = None, **rest: Any) -> ModelSpeed:
    return ModelSpeed(
        layers=10,
        layer_bytes=100,
        layer_parameters=50,
        output_parameters=20,
        streamed_layer_s=layer_s,
        resident_layer_s=resident_layer_s or layer_s,
        output_s={1: 0.1},
        **rest,
    )


def plan(budget_bytes: int) -> MemoryPlan:
    demand = Demand(runtime_bytes=0, outer_bytes=0, workspace_bytes=0, layers=10, layer_bytes=100)
    return plan_memory(budget_bytes, demand)


def test_a_streamed_pass_takes_as_long_as_reading_where_that_is_longer() -> None:
    forecast = decode_forecast(plan(200), model({1: 0.01}), MACHINE, NO_DRAFT, batch=1)
    assert (forecast.read_s, forecast.pass_s, forecast.limited_by) == (10.0, 10.0, "disk")
    assert forecast.compute_s == pytest.approx(0.2)
    assert forecast.tokens_per_s == forecast.limit_tokens_per_s == 0.1


def test_a_resident_pass_takes_as_long_as_computing() -> None:
    forecast = decode_forecast(plan(1000), model({1: 0.01}), MACHINE, NO_DRAFT, batch=1)
    assert forecast.read_s == 0
    assert forecast.pass_s == pytest.approx(0.2)


def test_while_a_draft_is_proposed_reading_fills_the_slots_and_no_more() -> None:
    slow_draft = Speculation(length=4, acceptance=0.5, draft=model({1: 0.2}))
    forecast = decode_forecast(plan(200), model({1: 0.01}), MACHINE, slow_draft, batch=1)
    assert forecast.draft_s == pytest.approx(4 * (10 * 0.2 + 0.1))
    assert forecast.pass_s == pytest.approx(forecast.draft_s + 10.0 - 2.0)
    assert forecast.tokens == pytest.approx(1 + 0.5 + 0.25 + 0.125 + 0.0625)


def test_prompt_tokens_count_once_and_need_no_logits() -> None:
    forecast = prefill_forecast(plan(1000), model({1: 0.01, 100: 1.0}), MACHINE, batch=2, prompt_tokens=100)
    assert (forecast.batch, forecast.rows, forecast.tokens) == (2, 200, 200)
    assert forecast.compute_s == pytest.approx(20.0)


def test_layers_that_stay_and_layers_that_stream_each_take_their_own_time() -> None:
    half = plan(700)
    resident = len(half.residency.resident)
    assert 0 < resident < 10
    forecast = decode_forecast(half, model({1: 0.02}, {1: 0.01}), MACHINE, NO_DRAFT, batch=1)
    assert forecast.compute_s == pytest.approx(resident * 0.01 + (10 - resident) * 0.02 + 0.1)


def test_attention_grows_with_the_tokens_of_all_contexts() -> None:
    speed = model({1: 0.01}, decode_rest_s={1: 0.002}, context_token_s=0.0001)
    forecasts = [
        decode_forecast(plan(1000), speed, MACHINE, NO_DRAFT, batch=1, context=context) for context in (0, 100)
    ]
    assert [forecast.compute_s for forecast in forecasts] == pytest.approx([10 * 0.012 + 0.1, 10 * 0.022 + 0.1])


def test_a_pass_is_laid_out_once_and_each_written_token_takes_its_time() -> None:
    speed = model({1: 0.01}, begin_s={1: 0.5, 8: 1.2}, written_token_s=0.25)
    drafting = Speculation(length=1, acceptance=0.5, draft=None)
    alone, eight = (decode_forecast(plan(1000), speed, MACHINE, drafting, batch) for batch in (1, 8))
    assert alone.compute_s == pytest.approx(2 * (10 * 0.01 + 0.1) + 0.5 + 1.5 * 0.25)
    assert eight.compute_s == pytest.approx(16 * (10 * 0.01 + 0.1) + 1.2 + 8 * 1.5 * 0.25)


def test_expected_tokens_reach_from_one_to_the_whole_chain() -> None:
    assert expected_tokens(0.0, 5) == 1
    assert expected_tokens(1.0, 5) == 6
    assert expected_tokens(0.8, 2) == pytest.approx(1 + 0.8 + 0.64)


def test_times_between_measured_rows_lie_on_straight_lines() -> None:
    seconds = {8: 1.0, 16: 2.0, 32: 2.0}
    assert [at_rows(seconds, rows) for rows in (1, 8, 12, 16, 24, 32, 64)] == [1.0, 1.0, 1.5, 2.0, 2.0, 2.0, 4.0]


@given(
    layer_s=st.dictionaries(st.sampled_from([1, 8, 32, 128, 512]), st.floats(0.1, 10.0), min_size=1),
    budget_bytes=st.integers(200, 1000),
    length=st.integers(0, 16),
    batch=st.integers(1, 64),
)
def test_no_forecast_beats_its_limit_of_disk_and_arithmetic(
    layer_s: dict[int, float], budget_bytes: int, length: int, batch: int
) -> None:
    speculation = Speculation(length=length, acceptance=0.8, draft=None)
    forecast = decode_forecast(plan(budget_bytes), model(layer_s), MACHINE, speculation, batch)
    assert forecast.tokens_per_s <= forecast.limit_tokens_per_s * (1 + 1e-9)
