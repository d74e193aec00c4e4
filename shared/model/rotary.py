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
    signed_sin: Tensor
    """[tokens, 1, rotated dimensions], compute dtype; negative sines first, for those that are subtracted."""

    def apply(self, heads: Tensor) -> Tensor:
        """Rotates the leading dimensions of queries and keys, [tokens, heads, head_dim]."""
        dimensions = self.cos.shape[-1]
        if not dimensions:
            return heads
        turning = heads[..., :dimensions]
        # Two steps, not `addcmul`: vectorized, that is fused, and rounds otherwise than at the end of a row.
        turned = (turning * self.cos).add_(turning.roll(dimensions // 2, -1).mul_(self.signed_sin))
        return turned if dimensions == heads.shape[-1] else torch.cat((turned, heads[..., dimensions:]), dim=-1)

    def rows(self, chosen: slice | Tensor) -> Rotation:
        """The rotation of some of the tokens."""
        return Rotation(self.cos[chosen], self.signed_sin[chosen])


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
    cos, sin = ((turned * rope.amplitude).to(dtype)[:, None] for turned in (angles.cos(), angles.sin()))
    return Rotation(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))
