"""NormalFloat4 codes of a matrix, as bitsandbytes makes them, in pieces that stay in the processor's cache."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from shared.quant.kernels import load_bitsandbytes

PIECE_ELEMENTS = 1 << 17
"""A piece as float32 is 512 KiB. Larger ones fall out of the cache; for smaller ones, calls cost more than work."""
SMALLEST_SCALE = 1e-38


def nf4_codes(weight: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Quantizes in blocks of consecutive elements (QLoRA, arXiv 2305.14314); bit-equal to `quantize_4bit`.

    Bitsandbytes' own operator also finds out where in its block each maximum lies, and searches where this one counts,
    which needs no branches; on one core it takes three times as long (`docs/packing.md`).

    Args:
        weight: float32, finite, contiguous; a multiple of `block` elements.

    Returns:
        uint8 [elements / 2], two codes a byte, the first in its high half; float32 [elements / block], the maxima.
    """
    values = weight.view(-1)
    codes = torch.empty(values.numel() // 2, dtype=torch.uint8)
    maxima = torch.empty(values.numel() // block)
    bounds = _bounds()
    step = PIECE_ELEMENTS // block * block
    for begin in range(0, values.numel(), step):
        piece = values[begin : begin + step].view(-1, block)
        scales = maxima[begin // block : begin // block + len(piece)]
        torch.amax(piece.abs(), dim=1, out=scales)
        scaled = (piece * (1.0 / scales.clamp(min=SMALLEST_SCALE))[:, None]).clamp_(-1, 1).view(-1)
        found = torch.zeros(len(scaled), dtype=torch.uint8)
        for bound in bounds:  # how many bounds lie below a value is the number of the code value that is nearest
            found += (scaled > bound).view(torch.uint8)
        codes[begin // 2 : begin // 2 + len(found) // 2] = (found[::2] << 4) | found[1::2]
    return codes, maxima


@cache
def _bounds() -> tuple[float, ...]:
    """What lies midway between neighbouring code values."""
    load_bitsandbytes()
    from bitsandbytes.functional import get_4bit_type

    values: Tensor = get_4bit_type("nf4", device="cpu")
    return tuple(((values[:-1] + values[1:]) / 2).tolist())
