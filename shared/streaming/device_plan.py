"""The memory plan of a process with a device: one budget for the host, one for the device.

What the arithmetic needs lies on the device: it is planned first, like a process of its own. The layers that do not
stay there are the host's to keep or to read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shared.streaming.plan import Demand, MemoryPlan, Residency, plan_memory


@dataclass(frozen=True, kw_only=True)
class TieredDemand:
    """What a process needs on either side."""

    host: Demand
    """Its layers are those that do not stay on the device, however many; its KV blocks are what each block there costs
    here."""
    device: Demand


@dataclass(frozen=True)
class TieredPlan:
    """How both budgets are spent."""

    host: MemoryPlan
    device: MemoryPlan

    @property
    def kv_blocks(self) -> int:
        """Blocks, all of them on the device."""
        return self.device.kv_blocks

    @property
    def residency(self) -> Residency:
        """Which layers stay where."""
        on_device, on_host = self.device.residency, self.host.residency
        others = [layer for layer in range(self.device.demand.layers) if layer not in on_device.resident]
        return Residency(
            resident=on_device.resident,
            slots=on_host.slots,
            device_slots=on_device.slots,
            host=frozenset(others[place] for place in on_host.resident),
        )

    @property
    def everything_stays(self) -> bool:
        """Nothing is read from disk in a pass."""
        return self.host.everything_stays


def plan_tiers(host_bytes: int, device_bytes: int, demand: TieredDemand) -> TieredPlan:
    """Spends both budgets.

    Raises:
        BudgetError: one of them is too small; the message says which, and names the smallest that works.
    """
    device = plan_memory(device_bytes, demand.device)
    here = replace(
        demand.host,
        layers=demand.device.layers - len(device.residency.resident),
        fewest_kv_blocks=device.kv_blocks,
        most_kv_blocks=device.kv_blocks,
    )
    return TieredPlan(plan_memory(host_bytes, here), device)
