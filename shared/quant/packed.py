"""Weights that stay in memory, in the layout that this machine multiplies by fastest.

Stored weights are rows after rows, which oneDNN reorders in every product. What is streamed has to be taken as it
comes; what stays is reordered once. A packed product gives the same bits as the stored one, so nobody can tell from an
answer which layers were resident. Whether packing is right and pays is measured once (`packing_pays`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from shared.machine import cached, machine_key
from shared.quant.kernels import PACKED
from shared.quant.schemes import Scheme

Components = Mapping[str, Tensor]

EXPECTED_ROWS = 8
"""Rows that oneDNN is told to expect: a decode pass."""


def settle(tensors: Components, matrices: Collection[str], scheme: Scheme) -> dict[str, Tensor]:
    """Tensors of a layer that stays, with memory of their own.

    Args:
        tensors: by their stored names, as views of a buffer that the caller keeps.
        matrices: the names that those which are quantized may have, without the suffixes of their components.
    """
    settled = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] not in matrices}
    settled = {name: tensor.clone() for name, tensor in settled.items()}
    for matrix in {name.rpartition(".")[0] for name in tensors} & set(matrices):
        stored = {suffix: tensors[f"{matrix}.{suffix}"] for suffix in _suffixes(tensors, matrix)}
        settled |= {f"{matrix}.{suffix}": tensor for suffix, tensor in settle_matrix(stored, scheme).items()}
    return settled


def settle_matrix(stored: Components, scheme: Scheme) -> dict[str, Tensor]:
    """The components of one matrix that stays: packed where that pays, else copied."""
    if scheme.name in PACKERS and packing_pays(scheme, *stored["weight"].shape):
        return PACKERS[scheme.name](stored)
    return {suffix: tensor.clone() for suffix, tensor in stored.items()}


def pack_dense(stored: Components) -> dict[str, Tensor]:
    """bf16: the weight as `kernels.packed_linear` takes it."""
    others = {suffix: tensor.clone() for suffix, tensor in stored.items() if suffix != "weight"}
    return others | {PACKED: torch.ops.mkldnn._reorder_linear_weight(stored["weight"], EXPECTED_ROWS)}


def pack_int8(stored: Components) -> dict[str, Tensor]:
    """int8: the weight as `kernels.packed_integer_product` takes it."""
    weight = stored["weight"]
    others = {suffix: tensor.clone() for suffix, tensor in stored.items() if suffix != "weight"}
    return others | {PACKED: torch.ops.onednn.qlinear_prepack(weight, [EXPECTED_ROWS, weight.shape[1]])}


PACKERS: Mapping[str, Callable[[Components], dict[str, Tensor]]] = {"bf16": pack_dense, "int8": pack_int8}
"""Scheme -> how it is packed. nf4 is stored in its kernel's order already; fp32 would not keep its bits."""

TRIAL_ROWS = (1, 4, 16)
TRIAL_BYTES = 2 << 20
"""Of a matrix, at most this much is tried: the memory is not there for more."""
TRIAL_COPIES = 8
"""Together more than most caches hold, so that weights come from memory as they do in a pass."""
TRIAL_ROUNDS = 3


@cache
def packing_pays(scheme: Scheme, outputs: int, inputs: int) -> bool:
    """Whether packed products with matrices [outputs, inputs] are right and faster here.

    Measured once per machine in a fraction of a second, and remembered.
    """
    outputs = min(outputs, max(1, TRIAL_BYTES // (inputs * scheme.components(1, inputs)["weight"][0].itemsize)))
    key = machine_key() | {
        "scheme": scheme.name,
        "product": scheme.product_name,
        "shape": [outputs, inputs],
        "threads": torch.get_num_threads(),
    }
    return bool(
        cached("packing", key, lambda: _can(scheme) and _is_right(scheme) and _is_faster(scheme, outputs, inputs))
    )


def _can(scheme: Scheme) -> bool:
    """oneDNN packs bf16 for some processors only."""
    try:
        PACKERS[scheme.name](scheme.encode(torch.ones(96, 640)))
    except RuntimeError:
        return False
    return True


def _is_right(scheme: Scheme) -> bool:
    """Same bits, where sums are largest too: the instructions of old processors saturate."""
    shapes = {suffix: shape for suffix, (_, shape) in scheme.components(96, 640).items()}
    for fill in (None, 127):
        random = torch.Generator().manual_seed(0)
        stored = scheme.encode(torch.randn(shapes["weight"], generator=random) if fill is None else torch.ones(96, 640))
        packed = PACKERS[scheme.name](stored)
        for rows in (1, 2, 5, 16, 33):
            x = torch.randn(rows, 640, generator=random) if fill is None else torch.ones(rows, 640)
            x = x.to(scheme.compute_dtype)
            if not torch.equal(scheme.product(x, packed), scheme.product(x, stored)):
                return False
    return True


def _is_faster(scheme: Scheme, outputs: int, inputs: int) -> bool:
    stored = [scheme.encode(torch.randn(outputs, inputs)) for _ in range(TRIAL_COPIES)]
    packed = [PACKERS[scheme.name](weight) for weight in stored]
    rows = [torch.randn(count, inputs).to(scheme.compute_dtype) for count in TRIAL_ROWS]
    rounds = [(_products_s(scheme, rows, packed), _products_s(scheme, rows, stored)) for _ in range(TRIAL_ROUNDS)]
    return min(packed_s for packed_s, _ in rounds) < min(stored_s for _, stored_s in rounds)


def _products_s(scheme: Scheme, inputs: Sequence[Tensor], weights: Sequence[Components]) -> float:
    started_s = time.perf_counter()
    for x in inputs:
        for weight in weights:
            scheme.product(x, weight)
    return time.perf_counter() - started_s


def _suffixes(tensors: Components, matrix: str) -> list[str]:
    prefix = f"{matrix}."
    return [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]
