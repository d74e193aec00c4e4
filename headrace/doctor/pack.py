"""A pack: whether it is whole, and whether this machine suits it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from headrace.doctor import Finding
from shared.config import memory_limit_bytes
from shared.errors import HeadraceError
from shared.pack.reader import Pack
from shared.processor import instructions

_WANTS = {"bf16": "avx512_bf16", "nf4": "avx512_bf16"}
"""Scheme -> what its own kernels need; without it, it is multiplied in float32. int8 has a kernel for any processor."""


def health(path: Path, root: Path = Path("/")) -> Iterator[Finding]:
    """Manifest, files and sizes; the scheme beside the processor; the size beside the memory. Weights are not read."""
    try:
        pack = Pack.open(path)
    except (HeadraceError, OSError) as error:
        yield Finding("pack", "problem", str(error), "make it again with `headrace pack SOURCE OUT --overwrite`")
        return
    total = sum(record.size_bytes for record in pack.manifest.files.values())
    whole = f"{pack.manifest.source} in {pack.scheme.name}, {pack.spec.layers} layers, {total / 1e9:.2f} GB, complete"
    yield Finding("pack", "ok", f"{whole} (`headrace pack --check` compares every digest)")
    yield _scheme(pack.scheme.name, instructions(root))
    yield _fit(total, memory_limit_bytes(root))


def _scheme(name: str, there: frozenset[str]) -> Finding:
    wanted = _WANTS.get(name)
    if wanted is None or wanted in there:
        return Finding("scheme", "ok", f"{name} has its instructions here")
    found = f"{name} is fast with {wanted}, which this processor lacks"
    return Finding("scheme", "warning", found, "pack it in int8, or compare with `headrace plan PACK --memory …`")


def _fit(pack_bytes: int, memory_bytes: int) -> Finding:
    found = f"{pack_bytes / 2**30:.2f} GiB of weights, {memory_bytes / 2**30:.1f} GiB of memory"
    if pack_bytes > memory_bytes / 2:
        return Finding("fit", "note", found, "layers will be streamed; `headrace plan PACK --memory …` says how fast")
    return Finding("fit", "ok", f"{found}: all of it can stay in memory")
