"""Processor, threads and memory."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from headrace.doctor import Finding
from shared.config import memory_limit_bytes
from shared.processor import NOTABLE_INSTRUCTIONS, instructions, processor_name

LEAST_BYTES = 1 << 30
"""Even the smallest model, as two processes, needs about this much."""


def processor(root: Path = Path("/")) -> Finding:
    """Which of the instruction sets that matter are there."""
    there = instructions(root)
    notable = [name for name in NOTABLE_INSTRUCTIONS if name in there]
    found = f"{processor_name(root)}: {', '.join(notable) or 'none of ' + ', '.join(NOTABLE_INSTRUCTIONS)}"
    if "avx512_bf16" in there and "avx512_vnni" in there:
        without_amx = "amx_bf16" not in there
        return Finding(
            "processor", "ok", found + (" (no AMX: prompts and large batches take longer)" if without_amx else "")
        )
    if "avx512_vnni" in there:
        advice = "prefer int8: without AVX512-BF16, bf16 is emulated and NF4 is unpacked before each product"
    elif "avx512_bf16" in there:
        advice = "compare schemes with `headrace plan PACK --memory …`: there is no AVX512-VNNI for int8"
    elif "avx2" in there:
        advice = "prefer int8: arithmetic is in float32 here, so prompts take longer and few bytes count most"
    else:
        return Finding(
            "processor", "warning", found, "PyTorch runs without vector kernels here; use a machine with AVX2 or better"
        )
    return Finding("processor", "warning", found, advice)


def threads(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Finding:
    """Cores, and what the environment says about compute threads."""
    seen, allowed = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    quota = _core_quota(root)
    usable = min([allowed, *([quota] if quota else [])])
    settings = {name: environment[name] for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY") if name in environment}
    found = f"{usable:g} usable of {seen} cores" + "".join(f", {name}={value}" for name, value in settings.items())
    if settings.get("OMP_WAIT_POLICY", "").upper() == "ACTIVE":
        advice = "unset OMP_WAIT_POLICY: waiting threads that spin take the cores from readers and the other service"
        return Finding("threads", "warning", found, advice)
    if usable < seen:
        advice = f"give services --threads {max(1, int(usable))}: by default they take one for each of {seen} cores"
        return Finding("threads", "warning", found, advice)
    limit = settings.get("OMP_NUM_THREADS", "")
    if limit.isdigit() and int(limit) > usable:
        return Finding("threads", "warning", found, f"set OMP_NUM_THREADS to {usable:g} or less, or unset it")
    return Finding("threads", "ok", found)


def memory(root: Path = Path("/")) -> Finding:
    """What processes may take together, and what is free now."""
    limit = memory_limit_bytes(root)
    sizes = _meminfo(root)
    total, free = sizes.get("MemTotal", limit), sizes.get("MemAvailable", limit)
    usable = min(limit, free)
    found = f"{_gib(usable)} available of {_gib(total)}"
    if limit < total:
        found += f", this control group may have {_gib(limit)}"
    if usable < LEAST_BYTES:
        return Finding(
            "memory", "problem", found, f"free memory, or raise the limit: {_gib(LEAST_BYTES)} is little enough"
        )
    if free < limit / 2:
        advice = f"others hold more than half of it; keep all --memory budgets together below {_gib(usable)}"
        return Finding("memory", "warning", found, advice)
    return Finding("memory", "ok", found)


def _core_quota(root: Path) -> float | None:
    """Cores that the control group's time suffices for; None where it is not limited."""
    groups = (root / "sys/fs/cgroup/cpu.max", root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us")
    try:
        quota, period = groups[0].read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = groups[1].read_text().strip(), groups[1].with_name("cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    return int(quota) / int(period) if quota.isdigit() and int(period) else None


def _meminfo(root: Path) -> dict[str, int]:
    try:
        text = (root / "proc/meminfo").read_text()
    except OSError:
        return {}
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
