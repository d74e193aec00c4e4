"""The model specification: what it refuses, and its JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from shared.errors import UnsupportedModelError
from shared.model.spec import ModelSpec

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
    ],
)
def test_a_model_that_cannot_be_is_refused_by_the_field_that_is_wrong(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        dataclasses.replace(SPEC, **change)


def test_json_holds_everything() -> None:
    biased = dataclasses.replace(SPEC, attention_bias=True, mlp_bias=True)
    assert ModelSpec.from_json(biased.to_json()) == biased


def test_json_with_unknown_or_missing_fields_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="sliding_window"):
        ModelSpec.from_json(SPEC.to_json() | {"sliding_window": 4096})
    with pytest.raises(UnsupportedModelError, match="rope_theta"):
        ModelSpec.from_json({name: value for name, value in SPEC.to_json().items() if name != "rope_theta"})
