"""The fast way to NF4 makes the codes of bitsandbytes, to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shared.quant import nf4_codes as module
from shared.quant.kernels import load_bitsandbytes
from shared.quant.nf4_codes import PIECE_ELEMENTS, nf4_codes

BLOCK = 64
RANDOM = torch.Generator().manual_seed(0)

MATRICES: dict[str, Callable[[], Tensor]] = {
    "one piece": lambda: torch.randn(32, 192, generator=RANDOM),
    "several pieces, the last of them partial": lambda: torch.randn(PIECE_ELEMENTS * 5 // 2 // BLOCK, BLOCK),
    "heavy tails": lambda: torch.randn(96, 640, generator=RANDOM) ** 5,
    "bfloat16": lambda: torch.randn(96, 640, generator=RANDOM).bfloat16().float(),
    "zeros": lambda: torch.zeros(2, 128),
    "one value that is not zero": lambda: torch.eye(64, 128),
    "too small to divide by": lambda: torch.randn(4, 128, generator=RANDOM) * 1e-39,
    "as large as there is": lambda: torch.randn(4, 128, generator=RANDOM).clamp(-1, 1) * 3.4e38,
}


@pytest.mark.parametrize("make", MATRICES.values(), ids=MATRICES)
def test_codes_and_scales_are_those_of_bitsandbytes(make: Callable[[], Tensor]) -> None:
    assert_equal_to_bitsandbytes(make())


def test_values_midway_between_two_codes_go_where_bitsandbytes_puts_them() -> None:
    bounds = torch.tensor(module._bounds())
    around = torch.stack([bounds, bounds.nextafter(torch.tensor(1.0)), bounds.nextafter(torch.tensor(-1.0))]).flatten()
    block = torch.cat([around, torch.tensor([1.0, -1.0, 0.0, -0.0]), torch.zeros(BLOCK - len(around) - 4)])
    assert_equal_to_bitsandbytes(torch.stack([block, block * 0.3, -block]))


def assert_equal_to_bitsandbytes(matrix: Tensor) -> None:
    load_bitsandbytes()
    from bitsandbytes.functional import quantize_4bit

    expected, state = quantize_4bit(matrix, blocksize=BLOCK, quant_type="nf4")
    codes, maxima = nf4_codes(matrix, BLOCK)
    assert torch.equal(codes, expected.view(-1))
    assert torch.equal(maxima, state.absmax)
