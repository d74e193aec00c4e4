"""What a memory plan should deliver on a calibrated machine, beside what no program could beat. Plain Python.

A pass reads its streamed layers while it computes: it takes the longer of the two. While a draft is proposed, reading
goes on only until the slots are full. A chain of k draft tokens at acceptance a is expected to yield
(1 − aᵏ⁺¹) / (1 − a) tokens (arXiv 2211.17192, equation 1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from shared.streaming.plan import MemoryPlan


@dataclass(frozen=True, kw_only=True)
class ExpertTraffic:
    """The experts of a model that has some."""

    count: int
    """In each layer."""
    chosen: int
    """For each token."""
    expert_bytes: int

    def needed(self, rows: float) -> float:
        """Experts that a layer is expected to need for that many tokens."""
        return distinct_experts(self.count, self.chosen, rows)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a pass has to do."""

    decode_rows: float = 0.0
    """Tokens of sequences that decode: each one's last token and its draft."""
    context_tokens: float = 0.0
    """Tokens that those sequences have, all together: what attention looks at."""
    prompts: float = 0.0
    """Prompts, or as many parts of them as amount to whole ones."""
    prompt_tokens: int = 0
    """Tokens to be computed of each."""
    scored: float = 0.0
    """Rows that need logits."""
    sequences: float = 0.0
    """That decode."""
    written: float = 0.0
    """Tokens that the pass yields for answers."""
    handed: float = 0.0
    """Prompt tokens whose keys and values are sent, or received, meanwhile."""

    @property
    def rows(self) -> float:
        """Tokens in the pass."""
        return self.decode_rows + self.prompts * self.prompt_tokens


@dataclass(frozen=True, kw_only=True)
class ModelSpeed:
    """A model on this machine: its sizes, and the times of its parts."""

    layers: int
    layer_bytes: int
    layer_parameters: int
    """That a token goes through."""
    output_parameters: int
    streamed_layer_s: Mapping[int, float]
    """Rows -> seconds for the products of a layer that is streamed."""
    resident_layer_s: Mapping[int, float]
    """The same for a layer that stays in memory."""
    output_s: Mapping[int, float]
    decode_rest_s: Mapping[int, float] = field(default_factory=dict)
    """Rows of sequences that decode -> seconds for what a layer does besides its products."""
    context_token_s: float = 0.0
    """For a layer's attention to each token of their contexts."""
    prompt_rest_s: Mapping[int, float] = field(default_factory=dict)
    """Tokens of a prompt -> seconds for what a layer does with it besides its products."""
    begin_s: Mapping[int, float] = field(default_factory=dict)
    """Sequences -> seconds to lay out a pass over them."""
    written_token_s: float = 0.0
    """To make a chosen token part of its answer: text, stops, and the way to the RPC that waits for it."""
    handed_token_s: float = 0.0
    """Of all cores, for a prompt token's way from one stage to the other: either stage's share."""
    experts: ExpertTraffic | None = None

    def compute_s(self, work: Work, resident: int) -> float:
        """Arithmetic of a pass, with so many layers in memory for good."""
        products_s = resident * at_rows(self.resident_layer_s, work.rows)
        products_s += (self.layers - resident) * at_rows(self.streamed_layer_s, work.rows)
        output_s = at_rows(self.output_s, work.scored) if work.scored else 0.0
        return products_s + self.layers * self._rest_s(work) + output_s + self._besides_s(work)

    def operations(self, work: Work) -> float:
        """Multiplications and additions of its products."""
        return 2.0 * (self.layers * self.layer_parameters * work.rows + self.output_parameters * work.scored)

    def weight_bytes(self, rows: float) -> float:
        """Weights of all layers that a pass computes with."""
        return self.layers * self.layer_bytes + self.expert_bytes(rows)

    def expert_bytes(self, rows: float) -> float:
        """The part of them that are experts."""
        return self.layers * self.experts.needed(rows) * self.experts.expert_bytes if self.experts else 0.0

    @property
    def peak_operations_per_s(self) -> float:
        """The best rate that was measured for its products."""
        layers = [(self.layer_parameters, table) for table in (self.streamed_layer_s, self.resident_layer_s)]
        tables = [*layers, (self.output_parameters, self.output_s)]
        return max(2.0 * parameters * rows / s for parameters, table in tables for rows, s in table.items())

    def _besides_s(self, work: Work) -> float:
        """What a pass does besides its layers and its output."""
        seconds = work.written * self.written_token_s + work.handed * self.handed_token_s
        return seconds + (at_rows(self.begin_s, work.sequences) if work.sequences and self.begin_s else 0.0)

    def _rest_s(self, work: Work) -> float:
        """What one layer does besides its products."""
        seconds = work.context_tokens * self.context_token_s
        if work.decode_rows and self.decode_rest_s:
            seconds += at_rows(self.decode_rest_s, work.decode_rows)
        if work.prompts and self.prompt_rest_s:
            seconds += work.prompts * at_rows(self.prompt_rest_s, work.prompt_tokens)
        return seconds


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Bandwidths."""

    disk_bytes_per_s: float
    memory_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How drafting goes: a length, a guess at its acceptance, and what a draft's pass costs."""

    length: int
    acceptance: float
    draft: ModelSpeed | None
    """None: drafts cost nothing (n-grams)."""

    @property
    def tokens(self) -> float:
        """Tokens that a pass is expected to yield for one sequence."""
        return expected_tokens(self.acceptance, self.length)

    def draft_s(self, batch: float, context_tokens: float = 0.0) -> float:
        """Time to propose for a batch; a draft's layers all stay in memory."""
        if self.draft is None:
            return 0.0
        step = Work(decode_rows=batch, context_tokens=context_tokens, scored=batch, sequences=batch)
        return self.length * self.draft.compute_s(step, self.draft.layers)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """One pass at a batch size."""

    batch: int
    rows: float
    """Tokens in the pass."""
    read_s: float
    compute_s: float
    draft_s: float
    pass_s: float
    """With the draft."""
    tokens: float
    """What the pass yields: generated tokens, or, for prefill, prompt tokens."""
    limit_s: float
    """The longest of streamed bytes ÷ disk bandwidth, weights ÷ memory bandwidth, operations ÷ peak."""
    limited_by: str

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.pass_s

    @property
    def limit_tokens_per_s(self) -> float:
        return self.tokens / self.limit_s


def decode_forecast(
    plan: MemoryPlan, model: ModelSpeed, machine: Machine, speculation: Speculation, batch: int, context: float = 0.0
) -> Forecast:
    """A decode pass over `batch` sequences of `context` tokens, each with its draft."""
    rows = batch * (speculation.length + 1)
    tokens = batch * speculation.tokens
    work = Work(decode_rows=rows, context_tokens=batch * context, scored=rows, sequences=batch, written=tokens)
    draft_s = speculation.draft_s(batch, batch * context)
    return pass_forecast(plan, model, machine, batch, work, draft_s, tokens)


def prefill_forecast(plan: MemoryPlan, model: ModelSpeed, machine: Machine, batch: int, prompt_tokens: int) -> Forecast:
    """A prefill pass over `batch` prompts of that length."""
    work = Work(prompts=batch, prompt_tokens=prompt_tokens)
    return pass_forecast(plan, model, machine, batch, work, 0.0, work.rows)


def expected_tokens(acceptance: float, length: int) -> float:
    """Tokens of a chain of `length` draft tokens, the target's own one included."""
    return sum(acceptance**accepted for accepted in range(length + 1))


def distinct_experts(count: int, chosen: int, rows: float) -> float:
    """Experts of a layer that some rows are expected to need, if each were as likely as any other.

    Real routers prefer some: then there are fewer.
    """
    return count * (1 - math.pow(1 - chosen / count, rows))


def at_rows(seconds: Mapping[int, float], rows: float) -> float:
    """Time at a number of rows: straight lines between measured ones, and through zero beyond the last."""
    known = sorted(seconds)
    if rows <= known[0]:
        return seconds[known[0]]
    for low, high in pairwise(known):
        if rows <= high:
            return seconds[low] + (seconds[high] - seconds[low]) * (rows - low) / (high - low)
    return seconds[known[-1]] * rows / known[-1]


def pass_forecast(
    plan: MemoryPlan,
    model: ModelSpeed,
    machine: Machine,
    batch: int,
    work: Work,
    draft_s: float,
    tokens: float,
) -> Forecast:
    """A pass that does some work after `draft_s` of proposing, and yields `tokens`."""
    resident = len(plan.residency.resident)
    streamed_bytes = (model.layers - resident) * model.layer_bytes
    streamed_bytes += round(model.expert_bytes(work.rows) * (1 - plan.kept_share))
    read_s, compute_s = streamed_bytes / machine.disk_bytes_per_s, model.compute_s(work, resident)
    ahead_s = min(draft_s, plan.residency.slots * model.layer_bytes / machine.disk_bytes_per_s)
    limits = {
        "disk": read_s,
        "memory": model.weight_bytes(work.rows) / machine.memory_bytes_per_s,
        "arithmetic": model.operations(work) / model.peak_operations_per_s,
    }
    limited_by = max(limits, key=lambda name: limits[name])
    return Forecast(
        batch=batch,
        rows=work.rows,
        read_s=read_s,
        compute_s=compute_s,
        draft_s=draft_s,
        pass_s=draft_s + max(read_s - ahead_s, compute_s),
        tokens=tokens,
        limit_s=limits[limited_by],
        limited_by=limited_by,
    )
