"""Opening the device that an operator asks for: whether it is there, and how much of it the process may take.

No GPU was there when this was written: what says CUDA has never run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from shared.config import parse_bytes
from shared.errors import ConfigurationError
from shared.streaming.copies import Copies, CudaCopies
from shared.streaming.device_plan import TieredDemand, TieredPlan, plan_tiers
from shared.streaming.plan import mebibytes

DEFAULT_MEMORY = "90%"
"""Of a device's memory, unless the operator says how much."""
CONTEXT_BYTES = 640 << 20
"""What a CUDA context and the kernels that it loads are assumed to take. An allowance: never measured."""


@dataclass(frozen=True)
class Card:
    """A device that is open."""

    copies: Copies
    budget_bytes: int

    @property
    def device(self) -> torch.device:
        return self.copies.device

    def plan(self, host_bytes: int, demand: TieredDemand) -> TieredPlan:
        """Spends the host's budget and the device's, and bounds what this process allocates on the device.

        Raises:
            BudgetError: one of them is too small.
        """
        plan = plan_tiers(host_bytes, self.budget_bytes, demand)
        whole_bytes = torch.cuda.mem_get_info(self.device)[1]
        torch.cuda.set_per_process_memory_fraction((self.budget_bytes - CONTEXT_BYTES) / whole_bytes, self.device)
        return plan

    def runtime_bytes(self) -> int:
        """What is taken of the device without any weights: to be asked after the first products there."""
        return CONTEXT_BYTES + torch.cuda.memory_reserved(self.device)


def open_card(name: str, memory: str | None) -> Card | None:
    """Opens a device; None for the CPU.

    Args:
        name: cpu, cuda or cuda:N.
        memory: the device's budget, a size or a percentage of its memory.

    Raises:
        ConfigurationError: there is no such device, or not that much memory of it.
    """
    if name == "cpu":
        if memory is not None:
            raise ConfigurationError("--device-memory is for a CUDA device; the CPU's budget is --memory")
        return None
    device = checked_device(name, torch.backends.cuda.is_built(), torch.cuda.device_count())
    torch.cuda.set_device(device)
    free_bytes, whole_bytes = torch.cuda.mem_get_info(device)
    budget_bytes = parse_bytes(memory or DEFAULT_MEMORY, lambda: whole_bytes)
    check_budget(device, budget_bytes, free_bytes + CONTEXT_BYTES, whole_bytes)
    return Card(CudaCopies(device), budget_bytes)


def checked_device(name: str, built: bool, count: int) -> torch.device:
    """The device of that name.

    Args:
        built: this torch can use CUDA.
        count: CUDA devices that it finds.

    Raises:
        ConfigurationError: there is none.
    """
    match = re.fullmatch(r"cuda(?::(\d+))?", name)
    if not match:
        raise ConfigurationError(f"{name!r} is not a device; write cpu, cuda or cuda:N")
    if not built:
        raise ConfigurationError(
            f"--device {name}: this build of torch ({torch.__version__}) has no CUDA; install one that has, or leave "
            "--device out"
        )
    if not count:
        raise ConfigurationError(f"--device {name}: torch finds no CUDA device; see whether nvidia-smi lists one")
    index = int(match[1] or 0)
    if index >= count:
        raise ConfigurationError(f"--device {name}: there are {count} CUDA devices, cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", index)


def check_budget(device: torch.device, budget_bytes: int, free_bytes: int, whole_bytes: int) -> None:
    """Raises ConfigurationError where a device has not that much memory, or others have it."""
    if budget_bytes > whole_bytes:
        raise ConfigurationError(
            f"--device-memory of {mebibytes(budget_bytes)}: {device} has {mebibytes(whole_bytes)}; give less"
        )
    if budget_bytes > free_bytes:
        raise ConfigurationError(
            f"--device-memory of {mebibytes(budget_bytes)}: only {mebibytes(free_bytes)} of {device} are free; give "
            "less, or stop what else uses it"
        )
