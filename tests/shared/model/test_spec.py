"""The model specification: what it refuses, and its JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from shared.errors import UnsupportedModelError
from shared.model.spec import LocalAttention, ModelSpec, Multipliers

SPEC = ModelSpec(
    hidden_size=64,
    intermediate_size=128,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab_size=100,
    context_length=512,
    norm_epsilon=1e-5,
    rope_theta=1e4,
    tied_embeddings=True,
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"hidden_size": 64.0}, "hidden_size is 64.0"),
        ({"norm_epsilon": 0.0}, "norm_epsilon is 0.0"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"kv_heads": 3}, "4 heads cannot share 3"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"rotated_dimensions": 18}, "18 dimensions are rotated"),
        ({"rope_divisors": (1.0,)}, "rope_divisors must be 8"),
        ({"rope_divisors": (0.0,) * 8}, "rope_divisors must be 8 positive"),
        ({"unrotated_layers": (2,)}, "unrotated_layers names layers"),
        ({"local_attention": LocalAttention(window=4, layers=(5,))}, "local_attention names layers"),
        ({"local_attention": LocalAttention(window=0, layers=(1,))}, "window"),
        ({"attention_soft_cap": -1.0}, "attention_soft_cap is -1.0"),
        ({"multipliers": Multipliers(residual=float("nan"))}, r"multipliers\.residual is nan"),
        ({"norms": "never"}, "norms is 'never'"),
    ],
)
def test_a_model_that_cannot_be_is_refused_by_the_field_that_is_wrong(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        dataclasses.replace(SPEC, **change)


EVERYTHING = dataclasses.replace(
    SPEC,
    attention_bias=True,
    mlp_bias=True,
    activation="gelu_tanh",
    norms="both",
    norm_plus_one=True,
    qk_norm="head",
    rotated_dimensions=8,
    rope_divisors=(1.0, 2.0, 4.0, 8.0),
    rope_amplitude=1.5,
    unrotated_layers=(1,),
    local_attention=LocalAttention(window=7, layers=(0,), rope_theta=500.0),
    attention_scale=0.5,
    attention_soft_cap=50.0,
    logit_soft_cap=30.0,
    multipliers=Multipliers(embedding=8.0, residual=0.5),
)


def test_json_holds_everything() -> None:
    assert ModelSpec.from_json(json.loads(json.dumps(EVERYTHING.to_json()))) == EVERYTHING


def test_the_json_of_a_plain_llama_model_has_no_field_that_it_does_not_need() -> None:
    assert SPEC.to_json() == {
        "hidden_size": 64, "intermediate_size": 128, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16,
        "vocab_size": 100, "context_length": 512, "norm_epsilon": 1e-5, "rope_theta": 1e4, "tied_embeddings": True,
        "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip


def test_layers_differ_as_the_spec_says() -> None:
    (local, unrotated), (near, far) = EVERYTHING.ropes, EVERYTHING.attention_rules
    assert local is not None
    assert (local.theta, local.dimensions, local.divisors) == (500.0, 8, ())
    assert unrotated is None
    assert (near.window, far.window, far.scale, far.soft_cap) == (7, None, 0.5, 50.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": 4096}, "sliding_window"),
        ({"activation": "relu"}, "activation is 'relu'"),
        ({"rope_divisors": [1.0, "2"]}, "rope_divisors is '2'"),
        ({"local_attention": {"window": 7}}, "layers"),
        ({"local_attention": {"window": 7.5, "layers": []}}, "window is 7.5"),
        ({"local_attention": 7}, "local_attention is 7"),
        ({"multipliers": {"attention": 2.0}}, "attention"),
        ({"qkv_bias": 1}, "qkv_bias is 1"),
        ({"attention_scale": "1"}, "attention_scale is '1'"),
    ],
)
def test_json_with_unknown_missing_or_mistyped_fields_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        ModelSpec.from_json(SPEC.to_json() | change)
    with pytest.raises(UnsupportedModelError, match="rope_theta"):
        ModelSpec.from_json({name: value for name, value in SPEC.to_json().items() if name != "rope_theta"})
