"""What a memory plan should deliver on a calibrated machine, beside what no program could beat. Plain Python.

A pass reads its streamed layers while it computes: it takes the longer of the two. While a draft is proposed, reading
goes on only until the slots are full. A chain of k draft tokens at acceptance a is expected to yield
(1 − aᵏ⁺¹) / (1 − a) tokens (arXiv 2211.17192, equation 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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

    def needed(self, rows: int) -> float:
        """Experts that a layer is expected to need for that many tokens."""
        return distinct_experts(self.count, self.chosen, rows)


@dataclass(frozen=True, kw_only=True)
class ModelSpeed:
    """A model on this machine: its sizes, and the times of its parts by the rows of a pass."""

    layers: int
    layer_bytes: int
    layer_parameters: int
    """That a token goes through."""
    output_parameters: int
    layer_s: Mapping[int, float]
    output_s: Mapping[int, float]
    experts: ExpertTraffic | None = None

    def compute_s(self, rows: int, scored: int) -> float:
        """Products of a pass, of whose rows `scored` need logits."""
        return self.layers * at_rows(self.layer_s, rows) + (at_rows(self.output_s, scored) if scored else 0.0)

    def operations(self, rows: int, scored: int) -> float:
        """Multiplications and additions of the same."""
        return 2.0 * (self.layers * self.layer_parameters * rows + self.output_parameters * scored)

    def weight_bytes(self, rows: int) -> float:
        """Weights of all layers that a pass computes with."""
        return self.layers * self.layer_bytes + self.expert_bytes(rows)

    def expert_bytes(self, rows: int) -> float:
        """The part of them that are experts."""
        return self.layers * self.experts.needed(rows) * self.experts.expert_bytes if self.experts else 0.0

    @property
    def peak_operations_per_s(self) -> float:
        """The best rate that was measured for its products."""
        tables = ((self.layer_parameters, self.layer_s), (self.output_parameters, self.output_s))
        return max(2.0 * parameters * rows / s for parameters, table in tables for rows, s in table.items())


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

    def draft_s(self, batch: int) -> float:
        """Time to propose for a batch."""
        return self.length * self.draft.compute_s(batch, batch) if self.draft else 0.0


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """One pass at a batch size."""

    batch: int
    rows: int
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
    plan: MemoryPlan, model: ModelSpeed, machine: Machine, speculation: Speculation, batch: int
) -> Forecast:
    """A decode pass over `batch` sequences, each with its draft; attention over long contexts comes on top."""
    rows, draft_s = batch * (speculation.length + 1), speculation.draft_s(batch)
    return _forecast(plan, model, machine, batch, rows, rows, draft_s, batch * speculation.tokens)


def prefill_forecast(plan: MemoryPlan, model: ModelSpeed, machine: Machine, batch: int, rows: int) -> Forecast:
    """A prefill pass over `batch` prompts of `rows` tokens in all; attention over long prompts comes on top."""
    return _forecast(plan, model, machine, batch, rows, 0, 0.0, rows)


def expected_tokens(acceptance: float, length: int) -> float:
    """Tokens of a chain of `length` draft tokens, the target's own one included."""
    return sum(acceptance**accepted for accepted in range(length + 1))


def distinct_experts(count: int, chosen: int, rows: int) -> float:
    """Experts of a layer that some rows are expected to need, if each were as likely as any other.

    Real routers prefer some: then there are fewer.
    """
    return count * (1 - (1 - chosen / count) ** rows)


def at_rows(seconds: Mapping[int, float], rows: int) -> float:
    """Time at a number of rows: straight lines between measured ones, and through zero beyond the last."""
    known = sorted(seconds)
    if rows <= known[0]:
        return seconds[known[0]]
    for low, high in pairwise(known):
        if rows <= high:
            return seconds[low] + (seconds[high] - seconds[low]) * (rows - low) / (high - low)
    return seconds[known[-1]] * rows / known[-1]


def _forecast(
    plan: MemoryPlan,
    model: ModelSpeed,
    machine: Machine,
    batch: int,
    rows: int,
    scored: int,
    draft_s: float,
    tokens: float,
) -> Forecast:
    streamed_bytes = (model.layers - len(plan.residency.resident)) * model.layer_bytes
    streamed_bytes += round(model.expert_bytes(rows) * (1 - plan.kept_share))
    read_s, compute_s = streamed_bytes / machine.disk_bytes_per_s, model.compute_s(rows, scored)
    ahead_s = min(draft_s, plan.residency.slots * model.layer_bytes / machine.disk_bytes_per_s)
    limits = {
        "disk": read_s,
        "memory": model.weight_bytes(rows) / machine.memory_bytes_per_s,
        "arithmetic": model.operations(rows, scored) / model.peak_operations_per_s,
    }
    limited_by = max(limits, key=lambda name: limits[name])
    return Forecast(
        batch=batch,
        rows=rows,
        read_s=read_s,
        compute_s=compute_s,
        draft_s=draft_s,
        pass_s=draft_s + max(read_s - ahead_s, compute_s),
        tokens=tokens,
        limit_s=limits[limited_by],
        limited_by=limited_by,
    )
