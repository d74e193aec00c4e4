"""Products in float32: parts of a stored weight are widened into memory that stays in the cache, and multiplied there.

Processors without instructions for bfloat16 or int8 are fast in float32 only. Widening the whole weight would send four
times its size through memory; a tile is written and read where the cache holds it. Weights keep all of their precision,
and sums are rounded once, at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

import torch
from torch import Tensor

from shared.quant.kernels import NF4_ROW_GROUP, nf4_values, padded

TILE_BYTES = 4 << 20
"""Of widened weight at a time: larger tiles leave the cache, smaller ones leave the product too little to share out."""
_HALF_GROUP = NF4_ROW_GROUP // 2


def widened_dense(x: Tensor, weight: Mapping[str, Tensor]) -> Tensor:
    """x [rows, in] times a weight [out, in] of any dtype: [rows, out] in x's dtype."""
    return _sums(x, weight["weight"]).to(x.dtype)


def widened_int8(x: Tensor, weight: Mapping[str, Tensor]) -> Tensor:
    """x [rows, in] times an int8 weight, whose scales are applied to the sums; activations are not rounded."""
    return _sums(x, weight["weight"]).mul_(weight["SCB"] * (1 / 127.0)).to(x.dtype)


def _sums(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, in] @ weight.T in float32: [rows, out]."""
    rows = padded(x.float())
    sums = rows.new_empty(len(rows), len(weight))
    parts = list(_even_parts(len(weight), x.shape[1]))
    tile = rows.new_empty(max((part.stop - part.start for part in parts), default=0), x.shape[1])
    for part in parts:
        widened = tile[: part.stop - part.start].copy_(weight[part])
        torch.mm(rows, widened.t(), out=sums[:, part])
    return sums[: len(x)]


def widened_nf4(x: Tensor, weight: Mapping[str, Tensor]) -> Tensor:
    """x [rows, in] times a stored nf4 weight [out, in].

    A stored byte holds one column of two output rows, and the bytes of 16 such pairs lie side by side
    (`kernels.nf4_interleave`). So looking up the two values of each byte gives, for a group of 32 output rows, a matrix
    [columns, 32] that can be multiplied as it lies; only that even columns come before odd ones, and outputs are
    interleaved. Both are put right where it costs little: in x, and in the sums.
    """
    codes, scales = weight["weight"], weight["weight.absmax"]
    pairs, blocks = codes.shape[1], len(scales)
    groups, columns = len(codes) // NF4_ROW_GROUP, 2 * pairs
    rows = padded(x.float())
    rows = rows.view(len(rows), pairs, 2).transpose(1, 2).reshape(len(rows), columns)
    stored = codes.view(groups, pairs, _HALF_GROUP, 2).permute(0, 3, 1, 2)  # [groups, even or odd column, pairs, 16]
    scales = scales.float().view(blocks, groups, 2, _HALF_GROUP).permute(1, 0, 3, 2)
    scales = scales.reshape(groups, 1, blocks, 1, NF4_ROW_GROUP)
    step = min(groups, max(1, TILE_BYTES // (columns * NF4_ROW_GROUP * 4)))
    indices = torch.empty((step, *stored.shape[1:]), dtype=torch.int32)
    values = torch.empty(indices.numel(), dtype=torch.int64)
    sums = rows.new_empty(groups, len(rows), NF4_ROW_GROUP)
    for begin in range(0, groups, step):
        part = slice(begin, min(begin + step, groups))
        found = indices[: part.stop - begin].copy_(stored[part]).view(-1)
        torch.index_select(_nf4_pairs(), 0, found, out=values[: len(found)])
        tile = values[: len(found)].view(torch.float32)
        tile.view(-1, 2, blocks, pairs // blocks, NF4_ROW_GROUP).mul_(scales[part])
        torch.matmul(rows, tile.view(-1, columns, NF4_ROW_GROUP), out=sums[part])
    ordered = sums.view(groups, len(rows), _HALF_GROUP, 2)[:, : len(x)].permute(1, 0, 3, 2)
    return ordered.to(x.dtype).reshape(len(x), len(codes))


def tile_bytes(scheme: str, columns: int) -> int:
    """Most memory that a product with a matrix of so many columns takes for widened weights."""
    if scheme == "nf4":  # two indices of four bytes for every two values
        return max(TILE_BYTES, NF4_ROW_GROUP * columns * 4) * 3 // 2
    return max(TILE_BYTES, columns * 4)


def _even_parts(outputs: int, columns: int) -> Iterator[slice]:
    """Output rows whose widened weight fits into a tile, about as many in each part."""
    most = max(1, TILE_BYTES // (columns * 4))
    size = -(-outputs // -(-outputs // most)) if outputs else 1
    for begin in range(0, outputs, size):
        yield slice(begin, min(begin + size, outputs))


@cache
def _nf4_pairs() -> Tensor:
    """The float32 values of both codes of a byte, low half first, as one number of eight bytes: int64 [256]."""
    values, byte = nf4_values(), torch.arange(256)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=-1).view(torch.int64).flatten()
