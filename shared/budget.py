"""What every service's memory plan starts from, and how it is shown."""

from __future__ import annotations

import logging

from shared.metrics import rss_bytes
from shared.streaming.plan import MemoryPlan, mebibytes

RUNTIME_GROWTH_BYTES = 64 << 20
"""What the runtime still takes after start: thread stacks, gRPC buffers, kernels' scratch (measured)."""


def measured_runtime_bytes() -> int:
    """What the interpreter and the libraries take: to be asked after all imports and before any weights are loaded."""
    return rss_bytes() + RUNTIME_GROWTH_BYTES


def log_plan(log: logging.Logger, plan: MemoryPlan) -> None:
    """Writes the plan's table to the log."""
    log.info("memory plan: %s of %s", mebibytes(plan.planned_bytes), mebibytes(plan.budget_bytes))
    for name, size_bytes in plan.rows:
        log.info("  %-28s %10s", name, mebibytes(size_bytes))
