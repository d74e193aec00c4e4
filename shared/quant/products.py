"""Products of activations with stored weights, one clear function per scheme.

A row's result does not depend on the rows beside it, to the last bit: that is what makes an answer independent of its
batch and of the draft. Integer products are exact by nature; dense ones are kept away from the kernels' special cases
for few rows (`ROWS_MULTIPLE`). A test holds this for every scheme on the machine it runs on.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

ROWS_MULTIPLE = 4
"""Kernels choose another order of summation below this many rows, and for remainders of it."""


def dense(x: Tensor, weight: Mapping[str, Tensor]) -> Tensor:
    """x [rows, in] times an unquantized weight [out, in]: [rows, out]."""
    return linear(x, weight["weight"])


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, in] @ weight.T, with rows padded to a multiple of `ROWS_MULTIPLE`: [rows, out]."""
    missing = -len(x) % ROWS_MULTIPLE
    return (
        functional.linear(functional.pad(x, (0, 0, 0, missing)), weight)[: len(x)]
        if missing
        else functional.linear(x, weight)
    )


def int8(x: Tensor, weight: Mapping[str, Tensor]) -> Tensor:
    """x [rows, in] times an int8 weight: rows are quantized by their own maximum, multiplied in integers, rescaled.

    The integer sum is exact and each row has its own scale, so a row's result does not depend on its neighbours.
    """
    row_max = x.abs().amax(dim=1, keepdim=True).float().clamp_(min=torch.finfo(torch.float32).tiny)
    codes = (x.float() * (127.0 / row_max)).round_().to(torch.int8)
    sums = torch._int_mm(codes, weight["weight"].t())
    return (sums.float() * (row_max * (1 / 127.0)) * (weight["SCB"] * (1 / 127.0))).to(x.dtype)


def nf4(x: Tensor, weight: Mapping[str, Tensor]) -> Tensor:
    """x [rows, in] times an nf4 weight: the weight is dequantized to x's dtype and multiplied."""
    return linear(x, nf4_dequantize(weight, x.dtype))


def nf4_dequantize(weight: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The matrix [out, in] that an nf4 weight stands for: code value × block scale, rounded once to dtype."""
    import bitsandbytes  # noqa: F401  registers the operator; imported late, see schemes

    codes, scales = weight["weight"], weight["weight.absmax"]
    shape = (codes.shape[0], codes.shape[1] * 2)
    block = shape[1] // scales.shape[1]
    matrix: Tensor = torch.ops.bitsandbytes.dequantize_4bit(codes, scales.float().flatten(), block, "nf4", shape, dtype)
    return matrix
