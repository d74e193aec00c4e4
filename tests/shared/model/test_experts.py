"""The mixture: a token's choice and sum are its own, whatever comes beside it and in whatever order experts come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from shared.model.experts import HELD_TOKENS, mixture, route
from shared.model.mlp import Mlp
from shared.model.spec import Experts, ModelSpec
from shared.pack.format import bind, expert_layout
from shared.quant.schemes import Scheme, scheme_named
from shared.tensors import byte_view

COUNT, CHOSEN, SIZE = 16, 4, 64
SPEC = ModelSpec(
    hidden_size=SIZE,
    intermediate_size=96,
    layers=1,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab_size=100,
    context_length=64,
    norm_epsilon=1e-6,
    rope_theta=1e4,
    tied_embeddings=True,
    experts=Experts(count=COUNT, chosen=CHOSEN, normalized=True, rounded=True),
)


class Shuffled:
    """Experts in memory that come in another order each time, unless one is asked for."""

    def __init__(self, scheme: Scheme) -> None:
        random = torch.Generator().manual_seed(3)
        self._random = torch.Generator().manual_seed(4)
        self.mlps = [self._expert(scheme, random) for _ in range(COUNT)]
        self.brought: list[list[int]] = []

    def bring(self, layer: int, needed: Sequence[int], *, in_order: bool) -> Iterator[tuple[int, Mlp]]:
        order = range(len(needed)) if in_order else torch.randperm(len(needed), generator=self._random).tolist()
        self.brought.append([needed[place] for place in order])
        return ((expert, self.mlps[expert]) for expert in self.brought[-1])

    @staticmethod
    def _expert(scheme: Scheme, random: torch.Generator) -> Mlp:
        layout = expert_layout(SPEC, scheme)
        buffer = torch.zeros(layout.data_bytes, dtype=torch.uint8)
        tensors = bind(buffer, layout)
        for name, rows, columns in (("gate_up", 192, SIZE), ("down", SIZE, 96)):
            encoded = scheme.fuse([scheme.encode(torch.randn(rows, columns, generator=random) * 0.2)])
            for suffix, tensor in encoded.items():
                tensors[f"{name}.{suffix}"].copy_(tensor)
        assert len(byte_view(buffer)) % 4096 == 0
        return Mlp.of(tensors, "", scheme)


@pytest.fixture(params=["fp32", "bf16", "int8"])
def scheme(request: pytest.FixtureRequest) -> Scheme:
    return scheme_named(request.param)


def inputs(scheme: Scheme, tokens: int) -> tuple[Tensor, Tensor]:
    """Features of that many tokens, and a router."""
    random = torch.Generator().manual_seed(5)
    router = torch.randn(COUNT, SIZE, generator=random).to(scheme.compute_dtype)
    return torch.randn(tokens, SIZE, generator=random).to(scheme.compute_dtype), router


def test_a_token_is_routed_as_if_it_were_alone(scheme: Scheme) -> None:
    x, router = inputs(scheme, 300)
    for kind in (SPEC.experts, Experts(count=COUNT, chosen=CHOSEN, normalized=False, rounded=False)):
        assert kind is not None
        together = route(kind, x, router)
        for token in range(0, 300, 7):
            alone = route(kind, x[token : token + 1], router)
            assert torch.equal(alone.experts[0], together.experts[token])
            assert torch.equal(alone.weights[0], together.weights[token])


def test_a_token_gets_the_same_to_the_last_bit_alone_and_beside_others_in_any_order_of_experts(scheme: Scheme) -> None:
    experts = Shuffled(scheme)
    x, router = inputs(scheme, HELD_TOKENS + 44)
    many = mixture(SPEC, 0, x, router, experts)
    for tokens in (slice(0, HELD_TOKENS), slice(50, 70), slice(50, 70), slice(61, 62), slice(299, 300)):
        assert torch.equal(mixture(SPEC, 0, x[tokens], router, experts), many[tokens])


def test_each_expert_that_is_needed_is_brought_once_and_no_other(scheme: Scheme) -> None:
    experts = Shuffled(scheme)
    x, router = inputs(scheme, 5)
    mixture(SPEC, 0, x, router, experts)
    assert SPEC.experts is not None
    assert sorted(experts.brought[0]) == route(SPEC.experts, x, router).experts.unique().tolist()


def test_the_sum_is_that_of_the_definition() -> None:
    scheme = scheme_named("fp32")
    experts, (x, router) = Shuffled(scheme), inputs(scheme, 9)
    expected = torch.zeros(9, SIZE)
    for token, features in enumerate(x):
        probabilities = torch.softmax(router @ features, dim=0)
        chosen = probabilities.argsort(descending=True)[:CHOSEN]
        for expert in chosen.tolist():
            made = experts.mlps[expert](features[None], torch.nn.functional.silu)[0]
            expected[token] += probabilities[expert] / probabilities[chosen].sum() * made
    assert torch.allclose(mixture(SPEC, 0, x, router, experts), expected, atol=1e-5)
