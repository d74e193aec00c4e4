"""Rotary position embedding (RoFormer, arXiv 2104.09864), halves kept apart as Hugging Face stores them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.model.spec import ModelSpec


@dataclass(frozen=True)
class Rotation:
    """The rotation of each token of a batch."""

    cos: Tensor
    """[tokens, 1, head_dim], compute dtype."""
    sin: Tensor
    """[tokens, 1, head_dim], compute dtype."""

    def apply(self, heads: Tensor) -> Tensor:
        """Rotates queries or keys, [tokens, heads, head_dim]."""
        first, second = heads.chunk(2, dim=-1)
        return heads * self.cos + torch.cat((-second, first), dim=-1) * self.sin

    def rows(self, chosen: slice | Tensor) -> Rotation:
        """The rotation of some of the tokens."""
        return Rotation(self.cos[chosen], self.sin[chosen])


def rotation(spec: ModelSpec, positions: Tensor, dtype: torch.dtype) -> Rotation:
    """The rotation for tokens at the given positions, int64 [tokens]. Angles are computed in float32."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    frequencies = 1.0 / spec.rope_theta**exponents
    angles = positions.float()[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))
