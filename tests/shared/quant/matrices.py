"""Matrices to quantize, and what a stored matrix stands for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shared.quant.kernels import nf4_dequantize
from shared.quant.schemes import SCHEMES


def random_matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Float32 weights, some rows a hundred times larger than others, as in trained models."""
    random = torch.Generator().manual_seed(seed)
    sizes = 10 ** (2 * torch.rand(rows, 1, generator=random) - 2)
    return torch.randn(rows, columns, generator=random) * sizes


def random_activations(rows: int, columns: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Activations with a few columns that stand out, as in trained models."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=random)
    x[:, :: columns // 5] *= 40
    return x.to(dtype)


def stored(scheme: str, *matrices: Tensor) -> dict[str, Tensor]:
    """The components of one stored matrix that holds the rows of all."""
    return SCHEMES[scheme].fuse([SCHEMES[scheme].encode(matrix) for matrix in matrices])


def meaning(scheme: str, components: Mapping[str, Tensor]) -> Tensor:
    """The matrix that components stand for, float64 [out, in]."""
    if scheme == "nf4":
        return nf4_dequantize(components, torch.float32).double()
    matrix = components["weight"].double()
    return matrix * components["SCB"].double()[:, None] / 127 if scheme == "int8" else matrix
