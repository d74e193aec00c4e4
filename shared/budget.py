"""What every service's memory plan starts from, and how it is shown."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator

import torch

from shared.device import CPU
from shared.metrics import rss_bytes
from shared.quant.packed import settle_matrix
from shared.quant.schemes import SCHEMES, Scheme
from shared.streaming.device_plan import TieredPlan
from shared.streaming.plan import MemoryPlan, mebibytes

log = logging.getLogger(__name__)

RUNTIME_GROWTH_BYTES = 32 << 20
"""What the runtime still takes after start: thread stacks, gRPC's buffers, calls that wait (`docs/memory.md`)."""


def measured_runtime_bytes(schemes: Collection[Scheme], device: torch.device = CPU) -> int:
    """What the interpreter and the libraries take: to be asked after all imports and before any weights are loaded.

    Multiplies once in each scheme, so that what its kernels load or compile is there, and on a CPU it is measured and
    logged which products are used.

    Args:
        device: the one that will compute.
    """
    for scheme in schemes:
        _multiply_once(scheme, device)
    if device == CPU:
        log.info("products on this processor: %s", ", ".join(_products_of(schemes)))
    return rss_bytes() + RUNTIME_GROWTH_BYTES


def log_plan(log: logging.Logger, plan: MemoryPlan | TieredPlan) -> None:
    """Writes the plan's table to the log, or its two tables."""
    if isinstance(plan, TieredPlan):
        _log_table(log, "device memory plan", plan.device)
        _log_table(log, "host memory plan", plan.host)
    else:
        _log_table(log, "memory plan", plan)


def _log_table(log: logging.Logger, title: str, plan: MemoryPlan) -> None:
    log.info("%s: %s of %s", title, mebibytes(plan.planned_bytes), mebibytes(plan.budget_bytes))
    for name, size_bytes in plan.rows:
        log.info("  %-28s %10s", name, mebibytes(size_bytes))


def _products_of(schemes: Collection[Scheme]) -> Iterator[str]:
    """What multiplies by weights that are stored in these schemes, and by an output matrix beside them."""
    names = {f"{scheme.name} {scheme.product_name}" for scheme in schemes if scheme.product_name}
    if any(scheme.compute_dtype == torch.bfloat16 for scheme in schemes):
        names.add(f"bf16 {SCHEMES['bf16'].product_name}")
    yield from sorted(names)


def _multiply_once(scheme: Scheme, device: torch.device) -> None:
    shapes = scheme.components(256, 256).items()
    components = {suffix: torch.zeros(shape, dtype=dtype, device=device) for suffix, (dtype, shape) in shapes}
    with torch.inference_mode():
        for weight in (components, settle_matrix(components, scheme)) if device == CPU else (components,):
            for rows in (1, 8, 128):
                scheme.product(torch.zeros(rows, 256, dtype=scheme.compute_dtype, device=device), weight)
