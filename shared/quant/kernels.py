"""Products with stored weights by kernels that take the weights as they are stored.

Integer products are exact by nature; dense ones are kept away from the kernels' special cases for few rows
(`ROWS_MULTIPLE`), so that a row does not depend on those beside it. On processors without the instructions for bfloat16
or int8 the same kernels are slow: `shared.quant.candidates` chooses between them and others.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

PACKED = "packed"
"""The component that holds a weight in oneDNN's own layout (`shared.quant.packed`), in place of "weight"."""
ROWS_MULTIPLE = 4
"""Kernels choose another order of summation below this many rows, and for remainders of it."""


def padded_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, in] @ weight.T, with rows padded to a multiple of `ROWS_MULTIPLE`: [rows, out]."""
    return functional.linear(padded(x), weight)[: len(x)]


def padded(x: Tensor, multiple: int = ROWS_MULTIPLE) -> Tensor:
    """x with rows of zeros behind it, up to a multiple of so many."""
    missing = -len(x) % multiple
    return functional.pad(x, (0, 0, 0, missing)) if missing else x


def packed_linear(x: Tensor, packed: Tensor) -> Tensor:
    """`padded_linear` for a weight of `pack_dense`: the same bits, sooner."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(padded(x), packed, None, "none", [], "")
    return product[: len(x)]


FINE_STEPS = 254
"""Steps of the fine activation code within one step of the coarse one."""
SMALLEST_MAXIMUM = 1e-30
"""Rows are never scaled by less, so that those of zeros stay zeros: the reciprocal of 0 would make them NaN."""


def integer_codes(x: Tensor, weight: Mapping[str, Tensor]) -> Tensor:
    """x [rows, in] times an int8 weight, stored or packed, in exact integer sums.

    A row of x is rounded to 16 bits by its own maximum and cut into a coarse and a fine int8 code, so that two integer
    products together keep bfloat16's precision. Eight bits alone would cost three times as much agreement with the
    unquantized model as the weights do (`docs/design.md`).
    """
    rows = len(x)
    row_max = x.abs().amax(dim=1, keepdim=True).float().clamp_(min=SMALLEST_MAXIMUM)
    fine = x.float().mul_(127.0 * FINE_STEPS / row_max).round_()
    coarse = (fine * (1 / FINE_STEPS)).round_()
    fine.sub_(coarse * FINE_STEPS)
    codes = torch.empty(2 * rows, x.shape[1], dtype=torch.int8, device=x.device)
    codes[:rows], codes[rows:] = coarse, fine
    packed = weight.get(PACKED)
    sums = integer_product(codes, weight["weight"]) if packed is None else packed_integer_product(codes, packed)
    # Two steps, not one with a factor: vectorized, that is fused, and would round otherwise than at the end of a row.
    both = sums[:rows].float().mul_(FINE_STEPS).add_(sums[rows:])
    return both.mul_(row_max / (127.0 * FINE_STEPS)).mul_(weight["SCB"] * (1 / 127.0)).to(x.dtype)


MIXED_COLUMNS_MULTIPLE = 16


def takes_mixed(weight: Mapping[str, Tensor]) -> bool:
    """Whether `mixed_int8` can read an int8 weight: it loads whole groups of columns from aligned addresses."""
    codes = weight["weight"]
    return codes.shape[1] % MIXED_COLUMNS_MULTIPLE == 0 and codes.data_ptr() % MIXED_COLUMNS_MULTIPLE == 0


def mixed_int8(x: Tensor, weight: Mapping[str, Tensor]) -> Tensor:
    """x bfloat16 [rows, in] times an int8 weight that `takes_mixed`, by a kernel that converts both as it reads them.

    Activations are not rounded; sums are rounded to bfloat16 before scales are applied in float32, and once more after.
    """
    codes = weight["weight"]
    sums = torch._weight_int8pack_mm(x.contiguous(), codes, x.new_ones(len(codes)))
    return sums.float().mul_(weight["SCB"] * (1 / 127.0)).to(x.dtype)


def integer_product(codes: Tensor, weight: Tensor) -> Tensor:
    """int8 [rows, in] @ int8 [out, in].T as int32 [rows, out]; two rows go one by one, where the kernel is fastest."""
    if not codes.is_cpu:
        return device_integer_product(codes, weight)
    if len(codes) == 2:
        return torch.cat([torch._int_mm(row[None], weight.t()) for row in codes])
    return torch._int_mm(codes, weight.t())


DEVICE_ROWS_MULTIPLE = 32
"""CUDA's integer product takes more than 16 rows, in whole groups of them."""
DEVICE_COLUMNS_MULTIPLE = 8
"""And both dimensions of the weight in multiples of this."""
EXACT_COLUMNS = 1024
"""Sums over so many products of int8 codes, at most 127 × 127 each, are exact in float32: below 2^24."""


def device_integer_product(codes: Tensor, weight: Tensor) -> Tensor:
    """`integer_product` on a device other than the CPU: the same sums.

    Where the integer product does not take the weight's shape, exact sums in float32 are added up as integers.
    """
    if weight.shape[0] % DEVICE_COLUMNS_MULTIPLE == weight.shape[1] % DEVICE_COLUMNS_MULTIPLE == 0:
        return torch._int_mm(padded(codes, DEVICE_ROWS_MULTIPLE), weight.t())[: len(codes)]
    sums = torch.zeros(len(codes), len(weight), dtype=torch.int32, device=codes.device)
    for start in range(0, codes.shape[1], EXACT_COLUMNS):
        part = slice(start, start + EXACT_COLUMNS)
        sums += (codes[:, part].float() @ weight[:, part].t().float()).to(torch.int32)
    return sums


UNSIGNED_ZERO = 128
"""What stands for 0 in unsigned codes, which is what the instructions of x86 take for activations."""


def packed_integer_product(codes: Tensor, packed: Tensor) -> Tensor:
    """`integer_product` for a weight of `pack_int8`, as float32: the same sums, each rounded once."""
    unsigned = codes.view(torch.uint8) ^ UNSIGNED_ZERO  # two's complement with its highest bit turned over
    one, zero = _no_scale()
    sums: Tensor = torch.ops.onednn.qlinear_pointwise(
        unsigned, 1.0, UNSIGNED_ZERO, packed, one, zero, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return sums


@cache
def _no_scale() -> tuple[Tensor, Tensor]:
    """Scale and zero point of a product that is wanted as it is."""
    return torch.ones(1), torch.zeros(1, dtype=torch.int32)


BY_ROWS, SCALES_BY_ROWS = "rows", "rows.absmax"
"""The components of an nf4 weight in the order that devices take (`shared.quant.arranged`), not the CPU's kernel: codes
uint8 [out, in/2], two columns of a row in a byte, the first in its high half; scales bf16 [out, in/64]."""
NF4_BLOCK = 64
"""Consecutive elements of a row that share one scale."""
NF4_ROW_GROUP = 32
"""Output rows that lie interleaved, so that one load brings the same two columns of all of them."""


def nf4_fused(x: Tensor, weight: Mapping[str, Tensor]) -> Tensor:
    """x [rows, in] times an nf4 weight, without ever writing the dequantized weight; where `has_nf4_kernel`.

    The kernel is used for any number of rows, though above about 500 dequantizing first would be somewhat faster: it
    rounds in another order, and a row must not depend on how many there are.
    """
    codes, scales = weight["weight"], weight["weight.absmax"]
    if not len(x):  # the kernel ends the process when there are no rows
        return x.new_empty(0, len(codes))
    shape = (codes.shape[0], codes.shape[1] * 2)
    product: Tensor = torch.ops.bitsandbytes.gemv_4bit(x, codes, shape, scales, nf4_values(), shape[1] // len(scales))
    return product


def nf4_by_dequantizing(x: Tensor, weight: Mapping[str, Tensor]) -> Tensor:
    """x [rows, in] times an nf4 weight, stored or arranged by rows, which is written in x's dtype first."""
    arranged = BY_ROWS in weight
    matrix = (
        _dequantized(weight[BY_ROWS], weight[SCALES_BY_ROWS], x.dtype) if arranged else nf4_dequantize(weight, x.dtype)
    )
    return padded_linear(x, matrix)


def nf4_dequantize(weight: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The matrix [out, in] that an nf4 weight stands for: code value × block scale, rounded once to dtype."""
    return _dequantized(nf4_separate(weight["weight"]), weight["weight.absmax"].t(), dtype)


def _dequantized(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The same from codes and scales by rows."""
    load_bitsandbytes()
    shape, absmax = (codes.shape[0], codes.shape[1] * 2), scales.float().flatten()
    block = shape[1] // scales.shape[1]
    matrix: Tensor = torch.ops.bitsandbytes.dequantize_4bit(codes, absmax, block, "nf4", shape, dtype)
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
def has_nf4_kernel() -> bool:
    """Whether `nf4_fused` runs on this processor."""
    load_bitsandbytes()
    from bitsandbytes.functional import has_avx512bf16

    return bool(has_avx512bf16())


@cache
def nf4_values() -> Tensor:
    """What the 16 codes stand for, ascending, float32 [16]."""
    load_bitsandbytes()
    from bitsandbytes.functional import get_4bit_type

    code: Tensor = get_4bit_type("nf4", device="cpu")
    return code


@cache
def load_bitsandbytes() -> None:
    """Registers its operators with torch. Imported late: it costs 120 MB that other schemes do not need."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of a download that is not wanted here
    import bitsandbytes  # noqa: F401
