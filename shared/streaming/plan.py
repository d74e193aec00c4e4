"""The memory plan of one process: one budget, everything accounted for, what is left over filled."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shared.errors import BudgetError

FEWEST_SLOTS = 2
MOST_SLOTS = 4
"""Reading ahead by more than this gains nothing that a resident layer would not gain as well. The same for experts."""
START_VARIATION_BYTES = 4 << 20
"""A runtime takes a little more or less at each start (measured: 1 MiB)."""


@dataclass(frozen=True)
class Residency:
    """Which layers stay in memory for good, and how many slots the others stream through."""

    resident: frozenset[int]
    slots: int
    expert_slots: int | None = None
    """Buffers of one expert each, of which most keep a hot expert; None: as many as there are experts."""
    device_slots: int = 0
    """On a device: how many slots layers that do not stay there go through (`shared.streaming.device_ring`)."""
    host: frozenset[int] = frozenset()
    """On a device: which of those stay in host memory; the others are read into `slots`, which lie there too."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a process needs."""

    runtime_bytes: int
    """Interpreter, libraries, threads: measured, before any weights are loaded."""
    outer_bytes: int
    """Embedding, final norm, output matrix."""
    draft_bytes: int = 0
    """The draft model and its KV."""
    workspace_bytes: int
    """What the largest pass works in besides weights and KV."""
    transfer_bytes: int = 0
    """Keys and values on their way between the stages."""
    layers: int
    layer_bytes: int
    """One layer in memory, without its experts."""
    experts: int = 0
    """Of all layers together."""
    expert_bytes: int = 0
    """One expert in memory."""
    kv_block_bytes: int = 0
    """One block of KV over all layers (and of the draft's)."""
    fewest_kv_blocks: int = 0
    most_kv_blocks: int = 0
    """More than this many blocks could not be used."""
    kv_share: float = 0.5
    """Of what is left over: how much KV may take before layers do."""
    kv_name: str = "KV blocks"
    """What the table calls them."""
    budget_name: str = "memory budget"
    """What errors call the budget."""

    @property
    def fixed_bytes(self) -> int:
        """What there is in any plan, always the same."""
        return sum(size for _, size in self.fixed_rows)

    @property
    def fixed_rows(self) -> list[tuple[str, int]]:
        """Its parts."""
        return [
            ("runtime", self.runtime_bytes),
            ("outer weights", self.outer_bytes),
            ("draft", self.draft_bytes),
            ("workspace", self.workspace_bytes),
            ("transfer buffers", self.transfer_bytes),
        ]

    @property
    def fewest_slots_bytes(self) -> int:
        """Layers stream through two slots at least, and so do experts."""
        return min(FEWEST_SLOTS, self.layers) * self.layer_bytes + self.fewest_expert_bytes

    @property
    def fewest_expert_bytes(self) -> int:
        """The part of them that is for experts."""
        return min(FEWEST_SLOTS, self.experts) * self.expert_bytes

    @property
    def least_bytes(self) -> int:
        """Less cannot work."""
        return self.fixed_bytes + self.fewest_slots_bytes + self.fewest_kv_blocks * self.kv_block_bytes

    @property
    def smallest_budget_bytes(self) -> int:
        """What works at any start, in whole mebibytes."""
        return -(-(self.least_bytes + START_VARIATION_BYTES) >> 20) << 20


@dataclass(frozen=True)
class MemoryPlan:
    """How a budget is spent."""

    budget_bytes: int
    demand: Demand
    residency: Residency
    kv_blocks: int

    @property
    def expert_slots(self) -> int:
        """Buffers of one expert each."""
        return self.residency.expert_slots or 0

    @property
    def kept_share(self) -> float:
        """The share of experts that stay in memory; 1 for a model without experts."""
        experts = self.demand.experts
        return kept_experts(self.expert_slots, experts) / experts if experts else 1.0

    @property
    def everything_stays(self) -> bool:
        """Nothing is read in a pass."""
        return len(self.residency.resident) == self.demand.layers and self.kept_share == 1.0

    @property
    def rows(self) -> list[tuple[str, int]]:
        """The table: what takes how many bytes."""
        demand, residency = self.demand, self.residency
        resident = len(residency.resident)
        experts = (f"experts ({self.expert_slots} of {demand.experts})", self.expert_slots * demand.expert_bytes)
        return [
            *demand.fixed_rows,
            (f"resident layers ({resident} of {demand.layers})", resident * demand.layer_bytes),
            (f"slots ({residency.slots})", residency.slots * demand.layer_bytes),
            *([experts] if demand.experts else []),
            (f"{demand.kv_name} ({self.kv_blocks})", self.kv_blocks * demand.kv_block_bytes),
        ]

    @property
    def planned_bytes(self) -> int:
        return sum(size for _, size in self.rows)


def plan_memory(budget_bytes: int, demand: Demand) -> MemoryPlan:
    """Spends a budget: first what must be there, then KV up to its share of the rest, then weights, then KV again.

    Raises:
        BudgetError: even the least does not fit; the message names the smallest budget that works.
    """
    if budget_bytes < demand.least_bytes:
        raise BudgetError(
            f"the {demand.budget_name} of {mebibytes(budget_bytes)} is too small; the smallest that works is "
            f"{mebibytes(demand.smallest_budget_bytes)} ({_listed(demand)}, slots and KV the rest)"
        )
    left = budget_bytes - demand.fixed_bytes
    slots_bytes, fewest_kv_bytes = demand.fewest_slots_bytes, demand.fewest_kv_blocks * demand.kv_block_bytes
    # Layers and KV divide bytes, not blocks: otherwise a slightly larger budget, by one block more, could cost a layer.
    kv_bytes = _clamp(int(left * demand.kv_share), fewest_kv_bytes, demand.most_kv_blocks * demand.kv_block_bytes)
    residency = _residency(max(left - kv_bytes, slots_bytes), demand)
    left -= (len(residency.resident) + residency.slots) * demand.layer_bytes
    left -= (residency.expert_slots or 0) * demand.expert_bytes
    kv_blocks = demand.fewest_kv_blocks
    if demand.kv_block_bytes:
        kv_blocks = _clamp(left // demand.kv_block_bytes, kv_blocks, demand.most_kv_blocks)
    return MemoryPlan(budget_bytes, demand, residency, kv_blocks)


def kept_experts(expert_slots: int, experts: int) -> int:
    """How many experts stay in memory: all, or those that leave some slots for others to come through.

    Args:
        experts: of all layers together.
    """
    if expert_slots >= experts:
        return experts
    return max(0, expert_slots - _clamp(expert_slots // 4, FEWEST_SLOTS, MOST_SLOTS))


def _listed(demand: Demand) -> str:
    return ", ".join(f"{name} {mebibytes(size)}" for name, size in demand.fixed_rows if size)


def mebibytes(size_bytes: int) -> str:
    """A size for people, as in "512 MiB"."""
    return f"{size_bytes >> 20} MiB"


def _residency(size_bytes: int, demand: Demand) -> Residency:
    """Spends memory for weights: on layers first, of which a pass needs every byte, then on experts."""
    buffers = (size_bytes - demand.fewest_expert_bytes) // demand.layer_bytes
    layers = _layer_residency(buffers, demand.layers)
    if not demand.experts:
        return layers
    left = size_bytes - (len(layers.resident) + layers.slots) * demand.layer_bytes
    return replace(layers, expert_slots=min(left // demand.expert_bytes, demand.experts))


def _layer_residency(buffers: int, layers: int) -> Residency:
    """Spends as many layer-sized buffers as there are on slots and resident layers."""
    if buffers >= layers:
        return Residency(frozenset(range(layers)), 0)
    slots = _clamp(buffers // 4, FEWEST_SLOTS, MOST_SLOTS)
    streamed = layers - (buffers - slots)
    # Streamed layers are spread evenly, so that reading has the time of the resident ones between them.
    return Residency(frozenset(range(layers)) - {i * layers // streamed for i in range(streamed)}, slots)


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))
