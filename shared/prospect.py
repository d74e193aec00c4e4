"""A memory plan with all that an operator wants to know of it: what fits, how fast it goes, what more would bring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shared.calibration import Calibration
from shared.forecast import ExpertTraffic, Forecast, Machine, ModelSpeed, Speculation, decode_forecast, prefill_forecast
from shared.kv.paged import BLOCK_TOKENS
from shared.pack.format import matrix_shapes, mlp_shapes
from shared.pack.reader import Pack
from shared.streaming.plan import Demand, MemoryPlan, mebibytes, plan_memory

BATCHES = (1, 8, 32)
SEQUENCE_TOKENS = (256, 1024, 4096)
PROMPT_TOKENS = 256
"""Length of the prompts in a prefill forecast, and of the sequences in one of decode."""
WORTH_TELLING = 1.1
"""More memory is recommended where it brings at least this much."""


@dataclass(frozen=True, kw_only=True)
class Prospect:
    """A plan and its forecasts."""

    plan: MemoryPlan
    sequences: dict[int, int]
    """Length in tokens -> how many such sequences have their KV in memory at once; none for prefill."""
    forecasts: Sequence[Forecast]
    advice: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What forecasts depend on besides the plan."""

    model: ModelSpeed
    machine: Machine
    speculation: Speculation | None
    """None for prefill."""
    pass_tokens: int
    """Of prefill."""

    def forecast(self, plan: MemoryPlan, batch: int) -> Forecast:
        """One pass of a batch under a plan."""
        if self.speculation is None:
            prompts = max(1, min(batch, self.pass_tokens // PROMPT_TOKENS))
            return prefill_forecast(plan, self.model, self.machine, prompts, PROMPT_TOKENS)
        return decode_forecast(plan, self.model, self.machine, self.speculation, batch, PROMPT_TOKENS)


def prospect(budget_bytes: int, demand: Demand, outlook: Outlook) -> Prospect:
    """Plans a budget and looks ahead.

    Raises:
        BudgetError: the budget is too small; the message names the smallest that works.
    """
    plan = plan_memory(budget_bytes, demand)
    return Prospect(
        plan=plan,
        sequences={tokens: plan.kv_blocks // -(-tokens // BLOCK_TOKENS) for tokens in SEQUENCE_TOKENS}
        if outlook.speculation is not None
        else {},
        forecasts=[outlook.forecast(plan, batch) for batch in BATCHES],
        advice=_advice(plan, outlook),
    )


def model_speed(pack: Pack, calibration: Calibration, written_token_s: float = 0.0) -> ModelSpeed:
    """A pack's model with its calibrated times.

    Args:
        written_token_s: what the service takes to make a chosen token part of its answer.
    """
    spec = pack.spec
    chosen = spec.experts.chosen if spec.experts else 0
    return ModelSpeed(
        layers=spec.layers,
        layer_bytes=pack.layer_layout.data_bytes,
        layer_parameters=_parameters(matrix_shapes(spec)) + chosen * _parameters(mlp_shapes(spec)),
        output_parameters=spec.vocab_size * spec.hidden_size,
        streamed_layer_s=calibration.streamed_layer_s,
        resident_layer_s=calibration.resident_layer_s,
        output_s=calibration.output_s,
        decode_rest_s=calibration.decode_rest_s,
        context_token_s=calibration.context_token_s,
        prompt_rest_s=calibration.prompt_rest_s,
        begin_s=calibration.begin_s,
        written_token_s=written_token_s,
        handed_token_s=calibration.handed_token_s,
        experts=ExpertTraffic(count=pack.experts_per_layer, chosen=chosen, expert_bytes=pack.expert_bytes)
        if chosen
        else None,
    )


def _parameters(shapes: Mapping[str, tuple[int, int]]) -> int:
    return sum(rows * columns for rows, columns in shapes.values())


def _advice(plan: MemoryPlan, outlook: Outlook) -> list[str]:
    demand = plan.demand
    if plan.everything_stays:
        return ["Every layer stays in memory; more memory only holds more sequences."]
    # KV takes up to its share of what is left, and no more than it can use.
    layers_bytes = demand.layers * demand.layer_bytes + demand.experts * demand.expert_bytes
    kv_bytes = min(
        int(layers_bytes * demand.kv_share / (1 - demand.kv_share)) + 1, demand.most_kv_blocks * demand.kv_block_bytes
    )
    enough_bytes = demand.fixed_bytes + layers_bytes + kv_bytes
    larger = [size for factor in (1.5, 2.0) if (size := int(plan.budget_bytes * factor)) < enough_bytes]
    told = [text for size in (*larger, enough_bytes) if (text := _gain(plan, plan_memory(size, demand), outlook))]
    return told or ["More memory makes no pass faster, since computing takes longer than reading; it only holds more."]


def _gain(plan: MemoryPlan, larger: MemoryPlan, outlook: Outlook) -> str:
    """What a larger plan brings; empty where that is not worth telling."""
    pairs = [(outlook.forecast(plan, batch), outlook.forecast(larger, batch)) for batch in BATCHES]
    if max(after.tokens_per_s / before.tokens_per_s for before, after in pairs) < WORTH_TELLING:
        return ""
    rates = ", ".join(f"{after.tokens_per_s:.3g} tokens/s at batch {after.batch}" for _, after in pairs)
    resident, layers = len(larger.residency.resident), larger.demand.layers
    experts = f" and {larger.kept_share:.0%} of the experts" if larger.demand.experts else ""
    return f"With {mebibytes(larger.budget_bytes)}, {resident} of {layers} layers{experts} stay in memory: {rates}."
