"""What layers compute between products is, to the last bit, what its formula says, and changes nothing that it gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shared.model.layers import norm
from shared.model.rotary import rotation
from shared.model.spec import ModelSpec, Rope

SPEC = ModelSpec(
    hidden_size=48,
    intermediate_size=32,
    layers=1,
    heads=3,
    kv_heads=1,
    head_dim=16,
    vocab_size=100,
    context_length=512,
    norm_epsilon=1e-5,
    rope_theta=1e4,
    tied_embeddings=True,
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
TOKENS = 7


@DTYPES
@pytest.mark.parametrize("size", [SPEC.hidden_size, SPEC.head_dim], ids=["all features", "each head"])
@pytest.mark.parametrize("plus_one", [False, True])
def test_a_norm_divides_by_the_root_of_the_mean_square(dtype: torch.dtype, size: int, plus_one: bool) -> None:
    x, weight = random(TOKENS, SPEC.hidden_size).to(dtype), random(size).to(dtype)
    before = x.clone()
    found = norm(replace(SPEC, norm_plus_one=plus_one), x, weight)
    parts = before.float().view(TOKENS, -1, size)
    normed = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + SPEC.norm_epsilon)
    expected = (normed * (1 + weight.float())).to(dtype) if plus_one else weight * normed.to(dtype)
    assert torch.equal(found, expected.view(TOKENS, -1))
    assert torch.equal(x, before)


@DTYPES
@pytest.mark.parametrize("dimensions", [0, 8, SPEC.head_dim])
def test_a_rotation_turns_pairs_of_the_two_halves(dtype: torch.dtype, dimensions: int) -> None:
    heads, positions = random(TOKENS, 4, SPEC.head_dim).to(dtype), torch.arange(100, 100 + TOKENS)
    before = heads.clone()
    found = rotation(Rope(theta=1e4, dimensions=dimensions) if dimensions else None, positions, dtype).apply(heads)
    expected = before.clone()
    half = dimensions // 2
    for pair in range(half):
        angles = positions.float() * (1.0 / torch.tensor(1e4) ** torch.tensor(2 * pair / dimensions))
        cos, sin = (turned.to(dtype)[:, None] for turned in (angles.cos(), angles.sin()))
        first, second = before[..., pair], before[..., pair + half]
        expected[..., pair] = first * cos + -second * sin
        expected[..., pair + half] = second * cos + first * sin
    assert torch.equal(found, expected)
    assert torch.equal(heads, before)


def random(*shape: int) -> Tensor:
    """float32, reproducible."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))
