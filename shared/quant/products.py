"""Products of activations with stored weights, one clear function per scheme.

A row's result does not depend on the rows beside it, to the last bit: that is what makes an answer independent of its
batch and of the draft. A test holds this for every scheme on the machine it runs on.

A weight that is packed (`shared.quant.packed`), or that lies on a device, says itself how it is multiplied. For all
others a candidate was chosen by measurement (`shared.quant.candidates`): by `rows`, the numbers of rows that are
likely, and never by those that come.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shared.quant import candidates
from shared.quant.candidates import ROWS, Rows
from shared.quant.kernels import (
    BY_ROWS,
    PACKED,
    integer_codes,
    nf4_by_dequantizing,
    packed_linear,
    padded_linear,
)


def dense(x: Tensor, weight: Mapping[str, Tensor], rows: Rows = ROWS) -> Tensor:
    """x [rows, in] times an unquantized weight [out, in]: [rows, out]."""
    return packed_linear(x, weight[PACKED]) if PACKED in weight else linear(x, weight["weight"], rows)


def linear(x: Tensor, weight: Tensor, rows: Rows = ROWS) -> Tensor:
    """x [rows, in] @ weight.T: [rows, out]."""
    if x.is_cpu and weight.dtype == torch.bfloat16:
        return candidates.product("bf16", x, {"weight": weight}, rows)
    return padded_linear(x, weight)


def int8(x: Tensor, weight: Mapping[str, Tensor], rows: Rows = ROWS) -> Tensor:
    """x [rows, in] times an int8 weight [out, in]: [rows, out]."""
    return integer_codes(x, weight) if PACKED in weight or not x.is_cpu else candidates.product("int8", x, weight, rows)


def nf4(x: Tensor, weight: Mapping[str, Tensor], rows: Rows = ROWS) -> Tensor:
    """x [rows, in] times an nf4 weight that stands for [out, in]: [rows, out]."""
    arranged = BY_ROWS in weight or not x.is_cpu
    return nf4_by_dequantizing(x, weight) if arranged else candidates.product("nf4", x, weight, rows)
