"""The products that a scheme may be computed by on this CPU, and the choice between them.

All candidates of a scheme compute the same and differ in rounding only. Which one is fast depends on the processor:
without its instructions for bfloat16 or int8, kernels that need them are ten to fifty times slower than float32. So
each candidate is held against the first one and against itself (a row must not depend on how many there are), and
those that pass are timed. A process takes one for *all* numbers of rows: were it another one for many rows, a row would
depend on its neighbours. But it says which numbers are likely: what is best for prompts may be worst for drafts.

The rule: the least geometric mean over those numbers of rows, so that each counts for the same. Measured once per
machine and number of threads, in less than a second, and remembered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

import torch
from torch import Tensor

from shared.machine import cached, machine_key
from shared.quant.kernels import (
    NF4_BLOCK,
    NF4_ROW_GROUP,
    has_nf4_kernel,
    integer_codes,
    mixed_int8,
    nf4_by_dequantizing,
    nf4_fused,
    padded_linear,
    takes_mixed,
)
from shared.quant.trial import COLUMNS, OUTPUTS, SHAPES, WEIGHTS, Components, Product, is_right, times_s
from shared.quant.widened import widened_dense, widened_int8, widened_nf4


@dataclass(frozen=True)
class Candidate:
    """One way to compute the products of a scheme."""

    name: str
    product: Product
    """(x bfloat16 [rows, in], stored components) -> [rows, out] in bfloat16."""
    runs: Callable[[], bool] = lambda: True
    """Whether it can be called on this processor."""
    takes: Callable[[Components], bool] = lambda weight: True
    """Whether it can be called with such a weight."""


CANDIDATES: Mapping[str, Sequence[Candidate]] = {
    "bf16": (
        Candidate("bfloat16", lambda x, weight: padded_linear(x, weight["weight"])),
        Candidate("widened", widened_dense),
    ),
    "int8": (
        Candidate("integers", integer_codes),
        Candidate("widened", widened_int8),
        Candidate("mixed", mixed_int8, takes=takes_mixed),
    ),
    "nf4": (
        Candidate("dequantized", nf4_by_dequantizing),
        Candidate("fused", nf4_fused, has_nf4_kernel),
        Candidate("widened", widened_nf4),
    ),
}
"""Scheme -> its candidates. The first one runs everywhere; the others are held against it."""

Rows = tuple[int, ...]
"""Numbers of rows that products are likely to have."""
ROWS: Rows = (1, 8, 64, 256)
"""One token, a batch, a batch with drafts, and a part of a prompt: for who does not know."""
PROMPT_ROWS: Rows = (64, 256)
"""What prefill multiplies: short prompts, and parts of long ones."""
DECODE_ROWS: Rows = (1, 8, 64)
"""What decode multiplies. Prompts that it computes itself are multiplied by the same."""
DRAFT_ROWS: Rows = (1, 8)
"""What a draft multiplies: one token of each sequence. It is not bound to the bits of what the target multiplies by."""

_ranked: dict[tuple[str, int, Rows], Sequence[Candidate]] = {}
_choosing = threading.Lock()


def product(scheme: str, x: Tensor, weight: Components, rows: Rows) -> Tensor:
    """x bfloat16 [rows, in] times a weight that is stored in a scheme, on the CPU: [rows, out].

    Args:
        rows: the numbers of rows that the choice was made for; not those of x.
    """
    return next(candidate for candidate in ranked(scheme, rows) if candidate.takes(weight)).product(x, weight)


def ranked(scheme: str, rows: Rows) -> Sequence[Candidate]:
    """What multiplies by stored weights of a scheme here, best first; measured where that is not known yet.

    The first that takes a weight is used. The last one that is slow takes any.
    """
    key = (scheme, torch.get_num_threads(), rows)
    return _ranked.get(key) or _rank(*key)


def forget() -> None:
    """Lets the next products ask the cache folder again."""
    _ranked.clear()


def _rank(scheme: str, threads: int, rows: Rows) -> Sequence[Candidate]:
    """Two threads must not measure at once: they would disturb each other, and might choose otherwise."""
    candidates = {candidate.name: candidate for candidate in CANDIDATES[scheme]}
    key = machine_key() | {"scheme": scheme, "threads": threads, "candidates": list(candidates), "rows": rows}
    with _choosing:
        if (scheme, threads, rows) not in _ranked:
            names = cached("products", key, lambda: _measure(scheme, rows))
            _ranked[scheme, threads, rows] = [candidates[name] for name in names]
    return _ranked[scheme, threads, rows]


@torch.inference_mode()
def _measure(scheme: str, rows: Rows) -> list[str]:
    """The names of the candidates that are right, best first."""
    first, *others = (candidate for candidate in CANDIDATES[scheme] if candidate.runs())
    right = [first] + [candidate for candidate in others if _is_right(candidate, first, scheme)]
    timed = [(candidate.product, _timed_weights(scheme)) for candidate in right]
    times = dict(zip((candidate.name for candidate in right), times_s(timed, rows), strict=True))
    return sorted(times, key=lambda name: geometric_mean(times[name]))


def _is_right(candidate: Candidate, first: Candidate, scheme: str) -> bool:
    weights = (weight for shape in SHAPES for weight in trial_weights(scheme, *shape) if candidate.takes(weight))
    return all(is_right(candidate.product, first.product, weight) for weight in weights)


def _timed_weights(scheme: str) -> list[Components]:
    return [trial_weights(scheme, OUTPUTS, COLUMNS)[0] for _ in range(WEIGHTS)]


def trial_weights(scheme: str, outputs: int, columns: int) -> list[Components]:
    """Stored weights of that shape to try products with: random ones, and the largest; none where nf4 has none."""
    shape, random = (outputs, columns), torch.Generator().manual_seed(0)
    if scheme == "bf16":
        values = torch.randn(shape, generator=random).to(torch.bfloat16)
        return [{"weight": values}, {"weight": torch.ones_like(values)}]
    if scheme == "int8":
        scales = torch.rand(outputs, generator=random) + 0.5
        codes = torch.randint(-127, 128, shape, generator=random, dtype=torch.int8)
        return [{"weight": some, "SCB": scales} for some in (codes, torch.full_like(codes, 127))]
    if outputs % NF4_ROW_GROUP or columns % NF4_BLOCK:
        return []
    scales = (torch.rand(columns // NF4_BLOCK, outputs, generator=random) + 0.5).to(torch.bfloat16)
    codes = torch.randint(0, 256, (outputs, columns // 2), generator=random, dtype=torch.uint8)
    return [{"weight": some, "weight.absmax": scales} for some in (codes, torch.full_like(codes, 255))]
