"""Products of activations with stored weights, one clear function per scheme.

A row's result does not depend on the rows beside it, to the last bit: that is what makes an answer independent of its
batch and of the draft. Integer products are exact by nature; dense ones are kept away from the kernels' special cases
for few rows (`ROWS_MULTIPLE`). A test holds this for every scheme on the machine it runs on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache

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


FINE_STEPS = 254
"""Steps of the fine activation code within one step of the coarse one."""
SMALLEST_MAXIMUM = 1e-30
"""Rows are never scaled by less, so that those of zeros stay zeros: the reciprocal of 0 would make them NaN."""


def int8(x: Tensor, weight: Mapping[str, Tensor]) -> Tensor:
    """x [rows, in] times an int8 weight, in exact integer sums.

    A row of x is rounded to 16 bits by its own maximum and cut into a coarse and a fine int8 code, so that two integer
    products together keep bfloat16's precision. Eight bits alone would cost three times as much agreement with the
    unquantized model as the weights do (`docs/design.md`).
    """
    rows = len(x)
    row_max = x.abs().amax(dim=1, keepdim=True).float().clamp_(min=SMALLEST_MAXIMUM)
    steps = (x.float() * (127.0 * FINE_STEPS / row_max)).round_()
    coarse = (steps * (1 / FINE_STEPS)).round_()
    codes = torch.cat((coarse, steps - coarse * FINE_STEPS)).to(torch.int8)
    sums = integer_product(codes, weight["weight"]).float()
    both = sums[:rows] * FINE_STEPS + sums[rows:]
    return (both * (row_max / (127.0 * FINE_STEPS)) * (weight["SCB"] * (1 / 127.0))).to(x.dtype)


def integer_product(codes: Tensor, weight: Tensor) -> Tensor:
    """int8 [rows, in] @ int8 [out, in].T as int32 [rows, out]; two rows go one by one, where the kernel is fastest."""
    if len(codes) == 2:
        return torch.cat([torch._int_mm(row[None], weight.t()) for row in codes])
    return torch._int_mm(codes, weight.t())


NF4_ROW_GROUP = 32
"""Output rows that lie interleaved, so that one load brings the same two columns of all of them."""


def nf4(x: Tensor, weight: Mapping[str, Tensor]) -> Tensor:
    """x [rows, in] times an nf4 weight, without ever writing the dequantized weight where the CPU allows it.

    The kernel is used for any number of rows, though above about 500 dequantizing first would be somewhat faster: it
    rounds in another order, and a row must not depend on how many there are.
    """
    if not len(x) or not _has_nf4_kernel():  # the kernel ends the process when there are no rows
        return linear(x, nf4_dequantize(weight, x.dtype))
    codes, scales = weight["weight"], weight["weight.absmax"]
    shape = (codes.shape[0], codes.shape[1] * 2)
    product: Tensor = torch.ops.bitsandbytes.gemv_4bit(x, codes, shape, scales, _nf4_code(), shape[1] // len(scales))
    return product


def nf4_dequantize(weight: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The matrix [out, in] that an nf4 weight stands for: code value × block scale, rounded once to dtype."""
    load_bitsandbytes()
    codes, scales = nf4_separate(weight["weight"]), weight["weight.absmax"]
    shape = (codes.shape[0], codes.shape[1] * 2)
    absmax = scales.t().float().flatten()
    matrix: Tensor = torch.ops.bitsandbytes.dequantize_4bit(codes, absmax, shape[1] // len(scales), "nf4", shape, dtype)
    return matrix


def nf4_interleave(codes: Tensor) -> Tensor:
    """Codes as bitsandbytes stores them, uint8 [out, in/2], in the order of its CPU kernel; same shape.

    A byte as stored holds two columns of a row, the first in its high half. The kernel wants, for two columns, the 16
    first rows of a group in the low halves of 32 bytes and the 16 others in the high halves.
    """
    rows, pairs = codes.shape
    columns = torch.stack((codes >> 4, codes & 15), dim=-1)  # [rows, pairs, 2]
    halves = columns.view(-1, 2, NF4_ROW_GROUP // 2, pairs, 2).permute(0, 3, 1, 2, 4)  # [groups, pairs, half, 16, 2]
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).reshape(rows, pairs)


def nf4_separate(interleaved: Tensor) -> Tensor:
    """The inverse of `nf4_interleave`."""
    rows, pairs = interleaved.shape
    mixed = interleaved.view(-1, pairs, NF4_ROW_GROUP // 2, 2)
    columns = torch.stack((mixed & 15, mixed >> 4), dim=1)  # [groups, half, pairs, 16, 2]
    columns = columns.permute(0, 1, 3, 2, 4).reshape(rows, pairs, 2)
    return (columns[..., 0] << 4) | columns[..., 1]


@cache
def _has_nf4_kernel() -> bool:
    load_bitsandbytes()
    from bitsandbytes.functional import has_avx512bf16

    return bool(has_avx512bf16())


@cache
def _nf4_code() -> Tensor:
    """The 16 values of the format; the kernel only looks at whether they are NormalFloat's."""
    from bitsandbytes.functional import get_4bit_type

    code: Tensor = get_4bit_type("nf4", device="cpu")
    return code


@cache
def load_bitsandbytes() -> None:
    """Registers its operators with torch. Imported late: it costs 120 MB that other schemes do not need."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of a download that is not wanted here
    import bitsandbytes  # noqa: F401
