"""What a shift brings: stages and fleets, in numbers that can be checked by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.forecast import Machine, ModelSpeed
from shared.kv import paged
from shared.shift import (
    BLOCK_TOKENS,
    Drafting,
    Job,
    StageForecast,
    apart_fleet,
    colocated_fleet,
    colocated_stage,
    decode_stage,
    prefill_stage,
    recommended,
    reports_held,
    together_fleet,
)
from shared.streaming.plan import Demand, MemoryPlan, plan_memory

JOB = Job(prompt_tokens=128, output_tokens=65, shift_s=3600.0, price_per_hour=2.0)
MACHINE = Machine(disk_bytes_per_s=1000.0, memory_bytes_per_s=1e9)
NO_DRAFT = Drafting(name="none", acceptance=0.0, draft=None, length=None)
NGRAM = Drafting(name="ngram", acceptance=0.5, draft=None, length=None)
MODEL = ModelSpeed(
    layers=10,
    layer_bytes=100,
    layer_parameters=50,
    output_parameters=20,
    streamed_layer_s={1: 0.001, 64: 0.001, 128: 0.01},
    resident_layer_s={1: 0.001, 64: 0.001, 128: 0.01},
    output_s={1: 0.01, 128: 0.01},
)


def plan(budget_bytes: int, kv_blocks: int = 0) -> MemoryPlan:
    demand = Demand(
        runtime_bytes=0,
        outer_bytes=0,
        workspace_bytes=0,
        layers=10,
        layer_bytes=100,
        kv_block_bytes=1,
        fewest_kv_blocks=kv_blocks,
        most_kv_blocks=kv_blocks,
    )
    return plan_memory(budget_bytes + kv_blocks, demand)


def test_a_decode_process_takes_its_passes_shared_by_all_reports_in_them() -> None:
    stage = decode_stage(JOB, plan(1000, 1000), MODEL, MACHINE, 8, [NO_DRAFT])
    assert stage.at_once == 8
    assert stage.report_s == pytest.approx(64 * (10 * 0.001 + 0.01) / 8)
    assert (stage.read_s, stage.bound_by) == (0, "arithmetic")


def test_a_streamed_process_takes_as_long_as_the_disk() -> None:
    stage = decode_stage(JOB, plan(200, 1000), MODEL, MACHINE, 8, [NO_DRAFT])
    assert stage.report_s == pytest.approx(64 * 1.0 / 8)
    assert stage.bound_by == "disk"


def test_the_draft_and_the_length_that_pay_most_are_chosen() -> None:
    free = decode_stage(JOB, plan(200, 1000), MODEL, MACHINE, 2, [NO_DRAFT, NGRAM])
    assert (free.draft, free.draft_length > 4) == ("ngram", True)
    dear = replace(MODEL, resident_layer_s={1: 0.001, 2: 0.1, 3: 0.4})
    assert decode_stage(JOB, plan(1000, 1000), dear, MACHINE, 1, [NO_DRAFT, NGRAM]).draft == "none"


def test_no_more_reports_are_at_once_than_keys_and_values_have_room_for() -> None:
    held = plan(1000, 24)  # 384 tokens; a report has 193 in the end, 160 on average
    assert reports_held(JOB, held) == 2
    assert decode_stage(JOB, held, MODEL, MACHINE, 8, [NO_DRAFT]).at_once == 2
    assert reports_held(replace(JOB, shared_tokens=112), plan(1000, 24)) > 2


def test_a_prefill_pass_holds_as_many_prompts_as_fit_and_are_asked_for() -> None:
    stages = [prefill_stage(JOB, plan(1000), MODEL, MACHINE, most) for most in (1, 4, 100)]
    assert [stage.at_once for stage in stages] == [1, 4, 16]
    assert stages[0].report_s == pytest.approx(10 * 0.01)


def test_prompt_tokens_that_are_shared_are_computed_once() -> None:
    assert replace(JOB, shared_tokens=100).computed_tokens == 128 - 96
    assert replace(JOB, shared_tokens=127).computed_tokens == 128 - 112
    assert BLOCK_TOKENS == paged.BLOCK_TOKENS


def test_a_colocated_process_reads_once_for_prompts_and_answers() -> None:
    stage = colocated_stage(JOB, plan(200, 1000), MODEL, MACHINE, 8, [NO_DRAFT])
    # A round of 8 reports: 64 passes to decode, and a quarter of a pass for each report's prompt.
    assert stage.report_s == pytest.approx(64.25 / 8)


def test_the_way_of_keys_and_values_from_stage_to_stage_takes_both_stages_cores() -> None:
    dear = replace(MODEL, handed_token_s=0.001)
    job = replace(JOB, shared_tokens=100)  # of which 96 are held already
    for stage in (partial(prefill_stage, most_prompts=4), partial(decode_stage, batch=8, draftings=[NO_DRAFT])):
        free_s, handed_s = (stage(job, plan(1000, 1000), speed, MACHINE).report_s for speed in (MODEL, dear))
        assert handed_s - free_s == pytest.approx(32 * 0.001)
    here = [colocated_stage(job, plan(1000, 1000), speed, MACHINE, 8, [NO_DRAFT]) for speed in (MODEL, dear)]
    assert here[0].report_s == here[1].report_s


def test_every_written_token_takes_its_time() -> None:
    dear = replace(MODEL, written_token_s=0.001)
    for of in (decode_stage, colocated_stage):
        free_s, written_s = (
            of(JOB, plan(1000, 1000), speed, MACHINE, 8, [NO_DRAFT]).report_s for speed in (MODEL, dear)
        )
        assert written_s - free_s == pytest.approx(64 * 0.001)  # the first of 65 comes with the prompt


def test_on_one_machine_two_stages_share_cores_and_on_two_the_slower_one_sets_the_pace() -> None:
    prefill = _stage("prefill", 1.0)
    decode = _stage("decode", 3.0)
    together, apart = together_fleet(JOB, prefill, decode), apart_fleet(JOB, prefill, decode, (1, 1))
    assert (together.machines, together.report_s) == (1, 4.0)
    assert (apart.machines, apart.report_s) == (2, 3.0)
    even = apart_fleet(JOB, prefill, decode)
    assert (even.prefills, even.decodes, even.report_s) == (1, 3, 1.0)


def test_a_job_gets_the_machines_that_it_needs_and_costs_their_time() -> None:
    job = replace(JOB, reports=7200)
    fleet = colocated_fleet(job, _stage("colocated", 3.0))
    assert (fleet.machines, fleet.reports_in(3600)) == (6, 7200)
    assert fleet.cost_of_report(2.0) == pytest.approx(2.0 * 3.0 / 3600)
    asked = colocated_fleet(job, _stage("colocated", 3.0), 2)
    assert (asked.machines, asked.reports_in(3600)) == (2, 2400)


def test_the_simplest_of_the_cheapest_is_recommended() -> None:
    colocated = colocated_fleet(JOB, _stage("colocated", 1.04))
    apart = apart_fleet(JOB, _stage("prefill", 0.5), _stage("decode", 0.5))
    assert recommended([colocated, apart]) is colocated
    assert recommended([colocated_fleet(JOB, _stage("colocated", 1.2)), apart]) is apart


@given(
    prompt=st.integers(1, 2000), output=st.integers(1, 2000), budget=st.integers(200, 1000), batch=st.integers(1, 64)
)
def test_what_a_process_takes_is_never_less_than_its_cores_or_its_disk_need(
    prompt: int, output: int, budget: int, batch: int
) -> None:
    job = replace(JOB, prompt_tokens=prompt, output_tokens=output)
    for of in (decode_stage, colocated_stage):
        stage = of(job, plan(budget, 500), MODEL, MACHINE, batch, [NO_DRAFT, NGRAM])
        assert stage.report_s >= max(stage.compute_s, stage.read_s) * (1 - 1e-9)


def _stage(stage: str, report_s: float) -> StageForecast:
    return StageForecast(
        stage=stage,  # type: ignore[arg-type]
        plan=plan(1000),
        draft="none",
        draft_length=0,
        at_once=1,
        report_s=report_s,
        compute_s=report_s,
        read_s=0.0,
    )
