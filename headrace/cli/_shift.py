"""What a shift brings under a budget: the stages at work, and the fleets that can be made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.cli._planning import Planning, Stage
from shared.errors import BudgetError, ConfigurationError
from shared.shift import (
    Fleet,
    Job,
    StageForecast,
    apart_fleet,
    colocated_fleet,
    colocated_stage,
    decode_stage,
    prefill_stage,
    recommended,
    together_fleet,
)
from shared.streaming.plan import plan_memory


@dataclass(frozen=True, kw_only=True)
class Shift:
    """A job, and ways to do it."""

    job: Job
    fleets: Sequence[Fleet]
    recommended: Fleet
    refused: Sequence[str]
    """Why some ways are not possible."""


def shift_of(job: Job, budget_bytes: int, planning: Planning, replicas: tuple[int, int] | None) -> Shift:
    """Looks at every arrangement, or at the one that was asked for.

    Args:
        replicas: prefill and decode processes; no prefill processes: colocated ones.

    Raises:
        ConfigurationError: a report is longer than the context, or no arrangement fits into the budget.
    """
    context = min(planning.context_length or planning.pack.spec.context_length, planning.pack.spec.context_length)
    if job.prompt_tokens + job.output_tokens > context:
        raise ConfigurationError(
            f"a report of {job.prompt_tokens} + {job.output_tokens} tokens is longer than the context of {context}"
        )
    stages: dict[Stage, StageForecast] = {}
    refused: list[str] = []
    for stage in _stages(replicas):
        try:
            stages[stage] = _forecast(stage, job, budget_bytes, planning, stages.get("decode"))
        except BudgetError as error:
            refused.append(f"{stage}: {error}")
    fleets = list(_fleets(job, stages, replicas))
    if not fleets:
        raise BudgetError("; ".join(refused))
    return Shift(job=job, fleets=fleets, recommended=recommended(fleets), refused=refused)


def _stages(replicas: tuple[int, int] | None) -> Sequence[Stage]:
    if replicas is None:
        return ("colocated", "decode", "prefill")
    return ("decode", "prefill") if replicas[0] else ("colocated",)


def _forecast(
    stage: Stage, job: Job, budget_bytes: int, planning: Planning, decode: StageForecast | None
) -> StageForecast:
    if stage == "prefill":
        plan = plan_memory(budget_bytes, planning.demand(stage))
        most_prompts = decode.at_once if decode else planning.batch
        return prefill_stage(job, plan, planning.prefill_model, planning.machine, most_prompts)
    of = decode_stage if stage == "decode" else colocated_stage
    found = []
    # A draft takes memory from layers and KV: without one there is another plan.
    choices = [planning] if planning.draft == "none" else [planning.without_draft(), planning]
    for choice in (choice.within(budget_bytes, stage) for choice in choices):
        plan = plan_memory(budget_bytes, choice.demand(stage))
        found.append(of(job, plan, planning.model, planning.machine, planning.batch, [choice.drafting]))
    return min(found, key=lambda forecast: forecast.report_s)


def _fleets(job: Job, stages: dict[Stage, StageForecast], replicas: tuple[int, int] | None) -> Sequence[Fleet]:
    colocated, prefill, decode = (stages.get(stage) for stage in ("colocated", "prefill", "decode"))
    fleets = []
    if colocated:
        fleets.append(colocated_fleet(job, colocated, replicas[1] if replicas else None))
    if prefill and decode:
        if replicas is None or replicas == (1, 1):
            fleets.append(together_fleet(job, prefill, decode))
        fleets.append(apart_fleet(job, prefill, decode, replicas))
    return fleets
