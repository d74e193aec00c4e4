"""How many reports a shift brings, and at what cost: from forecasts of passes to whole jobs. Plain Python.

A stage is forecast in its steady state, with as many reports under way as it holds: the time that one process of it
spends on one report. Two stages on machines of their own work side by side, and the slower one sets the pace. On one
machine they share cores and disk, so that no rate exceeds what either has for both together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shared.forecast import Machine, ModelSpeed, Speculation, Work, expected_tokens, pass_forecast
from shared.limits import LOCAL_PASS_TOKENS, LONGEST_DRAFT, OVERCOMMIT, PREFILL_PASS_TOKENS, most_scored_rows
from shared.streaming.plan import MemoryPlan

Stage = Literal["prefill", "decode", "colocated"]
Arrangement = Literal["colocated", "together", "apart"]

BLOCK_TOKENS = 16
"""Of KV, as in `shared.kv.paged`, which needs torch."""
MOST_TRIED = 8
"""Replicas of a stage that are tried to divide work evenly, where nobody says how many reports there are."""
AS_GOOD = 1.05
"""What costs so little more is as good, and the simpler arrangement is recommended."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Reports of one kind, to be written in a shift."""

    prompt_tokens: int
    output_tokens: int
    shared_tokens: int = 0
    """Prompt tokens that all reports begin with: whole blocks of them are computed once."""
    reports: int | None = None
    """None: as many as a shift brings."""
    shift_s: float
    price_per_hour: float | None = None
    """Of one machine, in any currency."""

    @property
    def known_tokens(self) -> int:
        """Prompt tokens that are found in a prefix cache; the last one is always computed."""
        return min(self.shared_tokens, self.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that each report costs."""
        return self.prompt_tokens - self.known_tokens


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """A kind of draft, and what its tokens are worth."""

    name: str
    acceptance: float
    draft: ModelSpeed | None
    length: int | None
    """None: what pays most, as the service finds by measuring."""

    def speculations(self, batch: int) -> Iterator[Speculation]:
        """Every length that is possible with so many sequences in a pass."""
        most = 0 if self.name == "none" else most_scored_rows(batch, None) // batch - 1
        fixed = 0 if self.name == "none" else self.length
        for length in range(min(most, LONGEST_DRAFT) + 1) if fixed is None else (fixed,):
            yield Speculation(length=length, acceptance=self.acceptance, draft=self.draft)


@dataclass(frozen=True, kw_only=True)
class StageForecast:
    """One process of a stage at work."""

    stage: Stage
    plan: MemoryPlan
    draft: str
    """Its kind; none where no draft pays."""
    draft_length: int
    at_once: int
    """Reports in a pass."""
    report_s: float
    """Of the process, for one report."""
    compute_s: float
    """Of that, what the cores need."""
    read_s: float
    """And the disk."""

    @property
    def bound_by(self) -> str:
        """What the process waits for."""
        return "disk" if self.read_s > self.compute_s else "arithmetic"


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Processes of one arrangement, and what they achieve together."""

    arrangement: Arrangement
    prefills: int
    decodes: int
    machines: int
    stages: Sequence[StageForecast]
    report_s: float
    """Between one report and the next."""

    def reports_in(self, seconds: float) -> int:
        """Reports written in that time."""
        return int(seconds / self.report_s + 1e-6)  # so that rounding loses no whole report

    def cost_of_report(self, price_per_hour: float) -> float:
        """Time on all machines × the price of one."""
        return self.machines * price_per_hour * self.report_s / 3600


def decode_stage(
    job: Job, plan: MemoryPlan, model: ModelSpeed, machine: Machine, batch: int, draftings: Sequence[Drafting]
) -> StageForecast:
    """A decode process whose prompts come from prefill processes, with the draft that pays most."""

    def of(drafting: Drafting, speculation: Speculation, at_once: int) -> StageForecast:
        turns = _turns(job, speculation)
        work = _decode_work(job, speculation, at_once)
        work = replace(work, handed=at_once * job.computed_tokens / turns)
        draft_s = speculation.draft_s(at_once, work.context_tokens)
        found = pass_forecast(plan, model, machine, at_once, work, draft_s, at_once * speculation.tokens)
        times = (found.pass_s, found.compute_s + draft_s, found.read_s)
        return _stage("decode", plan, drafting, speculation, at_once, [s * turns / at_once for s in times])

    return _best(of, job, plan, batch, draftings)


def colocated_stage(
    job: Job, plan: MemoryPlan, model: ModelSpeed, machine: Machine, batch: int, draftings: Sequence[Drafting]
) -> StageForecast:
    """A decode process that computes prompts in its own passes, with the draft that pays most."""

    def of(drafting: Drafting, speculation: Speculation, at_once: int) -> StageForecast:
        # One round writes `at_once` reports. Some of its passes carry prompts besides, as many tokens as there is room.
        turns, prompt_passes = _turns(job, speculation), at_once * job.computed_tokens / LOCAL_PASS_TOKENS
        passes = max(turns + job.computed_tokens / LOCAL_PASS_TOKENS, prompt_passes)
        decoding = _decode_work(job, speculation, at_once * turns / passes)
        loaded = replace(decoding, prompts=LOCAL_PASS_TOKENS / job.computed_tokens, prompt_tokens=job.computed_tokens)
        drafting_rows = decoding.decode_rows / (speculation.length + 1)
        draft_s = speculation.draft_s(drafting_rows, decoding.context_tokens)
        totals = [0.0, 0.0, 0.0]
        for count, work in ((prompt_passes, loaded), (passes - prompt_passes, decoding)):
            found = pass_forecast(plan, model, machine, at_once, work, draft_s, 0.0)
            times = (found.pass_s, found.compute_s + draft_s, found.read_s)
            totals = [total + count * s / at_once for total, s in zip(totals, times, strict=True)]
        return _stage("colocated", plan, drafting, speculation, at_once, totals)

    return _best(of, job, plan, batch, draftings)


def prefill_stage(job: Job, plan: MemoryPlan, model: ModelSpeed, machine: Machine, most_prompts: int) -> StageForecast:
    """A prefill process.

    Args:
        most_prompts: that decode asks for at once.
    """
    prompts = max(1, min(PREFILL_PASS_TOKENS // job.computed_tokens, most_prompts))
    work = Work(prompts=prompts, prompt_tokens=job.computed_tokens, handed=prompts * job.computed_tokens)
    found = pass_forecast(plan, model, machine, prompts, work, 0.0, work.rows)
    nothing = Drafting(name="none", acceptance=0.0, draft=None, length=None)
    times = [s / prompts for s in (found.pass_s, found.compute_s, found.read_s)]
    return _stage("prefill", plan, nothing, Speculation(length=0, acceptance=0.0, draft=None), prompts, times)


def colocated_fleet(job: Job, stage: StageForecast, processes: int | None = None) -> Fleet:
    """Machines with one colocated process each: as many as the job needs, or so many."""
    count = processes or _needed(job, stage.report_s)
    return Fleet(
        arrangement="colocated",
        prefills=0,
        decodes=count,
        machines=count,
        stages=[stage],
        report_s=stage.report_s / count,
    )


def together_fleet(job: Job, prefill: StageForecast, decode: StageForecast) -> Fleet:
    """Machines with a prefill and a decode process each, which share cores and disk: as many as the job needs."""
    both = (prefill, decode)
    report_s = max(
        *(stage.report_s for stage in both),
        sum(stage.compute_s for stage in both),
        sum(stage.read_s for stage in both),
    )
    count = _needed(job, report_s)
    return Fleet(
        arrangement="together",
        prefills=count,
        decodes=count,
        machines=count,
        stages=both,
        report_s=report_s / count,
    )


def apart_fleet(
    job: Job, prefill: StageForecast, decode: StageForecast, replicas: tuple[int, int] | None = None
) -> Fleet:
    """Prefill and decode processes on a machine each: so many, or what the job needs, or what divides work evenly."""

    def of(prefills: int, decodes: int) -> Fleet:
        return Fleet(
            arrangement="apart",
            prefills=prefills,
            decodes=decodes,
            machines=prefills + decodes,
            stages=(prefill, decode),
            report_s=max(prefill.report_s / prefills, decode.report_s / decodes),
        )

    if replicas is not None:
        return of(*replicas)
    if job.reports is not None:
        return of(_needed(job, prefill.report_s), _needed(job, decode.report_s))
    tried = range(1, MOST_TRIED + 1)
    return min(
        (of(prefills, decodes) for prefills in tried for decodes in tried),
        key=lambda fleet: (fleet.machines * fleet.report_s, fleet.machines),
    )


def recommended(fleets: Sequence[Fleet]) -> Fleet:
    """The cheapest for each report; the first of those that are as good."""
    cheapest = min(fleet.machines * fleet.report_s for fleet in fleets)
    return next(fleet for fleet in fleets if fleet.machines * fleet.report_s <= cheapest * AS_GOOD)


def reports_held(job: Job, plan: MemoryPlan) -> int:
    """Reports whose keys and values are in memory at once, over-committed as decode does by default."""
    room = plan.kv_blocks * BLOCK_TOKENS - job.known_tokens
    grown = job.computed_tokens + job.output_tokens
    return max(1, int(min(OVERCOMMIT * room / grown, room / (grown - job.output_tokens / 2))))


def _best(
    of: Callable[[Drafting, Speculation, int], StageForecast],
    job: Job,
    plan: MemoryPlan,
    batch: int,
    draftings: Sequence[Drafting],
) -> StageForecast:
    """The forecast with the draft and length that cost least time; the first of those that do."""
    at_once = min(batch, reports_held(job, plan), job.reports or batch)
    forecasts = (
        of(drafting, speculation, at_once) for drafting in draftings for speculation in drafting.speculations(at_once)
    )
    return min(forecasts, key=lambda forecast: forecast.report_s)


def _turns(job: Job, speculation: Speculation) -> float:
    """Decode passes that a report takes part in; its first token needs none."""
    return max(1.0, (job.output_tokens - 1) / expected_tokens(speculation.acceptance, speculation.length))


def _decode_work(job: Job, speculation: Speculation, sequences: float) -> Work:
    rows = sequences * (speculation.length + 1)
    context = job.prompt_tokens + job.output_tokens / 2
    written = sequences * min(speculation.tokens, job.output_tokens)
    return Work(decode_rows=rows, context_tokens=sequences * context, scored=rows, sequences=sequences, written=written)


def _stage(
    stage: Stage,
    plan: MemoryPlan,
    drafting: Drafting,
    speculation: Speculation,
    at_once: int,
    times: Sequence[float],
) -> StageForecast:
    report_s, compute_s, read_s = times
    return StageForecast(
        stage=stage,
        plan=plan,
        draft=drafting.name if speculation.length else "none",
        draft_length=speculation.length,
        at_once=at_once,
        report_s=report_s,
        compute_s=compute_s,
        read_s=read_s,
    )


def _needed(job: Job, report_s: float) -> int:
    """Processes that write the job's reports within the shift; one where nobody says how many these are."""
    return 1 if job.reports is None else max(1, math.ceil(job.reports * report_s / job.shift_s))
