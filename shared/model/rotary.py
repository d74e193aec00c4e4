"""Rotary position embedding (RoFormer, arXiv 2104.09864), halves kept apart as Hugging Face stores them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shared.model.spec import Rope


@dataclass(frozen=True)
class Rotation:
    """The rotation of each token of a batch."""

    cos: Tensor
    """[tokens, 1, rotated dimensions], compute dtype."""
    sin: Tensor
    """[tokens, 1, rotated dimensions], compute dtype."""

    def apply(self, heads: Tensor) -> Tensor:
        """Rotates the leading dimensions of queries or keys, [tokens, heads, head_dim]."""
        rotated, rest = heads.tensor_split((self.cos.shape[-1],), dim=-1)
        first, second = rotated.chunk(2, dim=-1)
        rotated = rotated * self.cos + torch.cat((-second, first), dim=-1) * self.sin
        return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated

    def rows(self, chosen: slice | Tensor) -> Rotation:
        """The rotation of some of the tokens."""
        return Rotation(self.cos[chosen], self.sin[chosen])


class RotationOfRows(Protocol):
    """Tells the rotation of some of a batch's tokens."""

    def rows(self, chosen: slice) -> Rotation: ...


@dataclass(frozen=True)
class RotationOnDemand:
    """The rotation of a batch so large that it is worked out anew for each layer, a few rows at a time."""

    rope: Rope | None
    positions: Tensor
    """int64 [tokens]."""
    dtype: torch.dtype

    def rows(self, chosen: slice) -> Rotation:
        """The rotation of some of the tokens."""
        return rotation(self.rope, self.positions[chosen], self.dtype)


def rotation(rope: Rope | None, positions: Tensor, dtype: torch.dtype) -> Rotation:
    """The rotation for tokens at the given positions, int64 [tokens]; None rotates nothing.

    Angles are computed in float32.
    """
    if rope is None:
        nothing = torch.empty(len(positions), 1, 0, dtype=dtype, device=positions.device)
        return Rotation(nothing, nothing)
    exponents = torch.arange(0, rope.dimensions, 2, dtype=torch.float32) / rope.dimensions
    frequencies = 1.0 / rope.theta**exponents
    if rope.divisors:
        frequencies = frequencies / torch.tensor(rope.divisors, dtype=torch.float32)
    angles = positions.float()[:, None] * frequencies.to(positions.device)
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    return Rotation((angles.cos() * rope.amplitude).to(dtype), (angles.sin() * rope.amplitude).to(dtype))
