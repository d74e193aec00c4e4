"""Configurations of every family: defaults, older spellings, rotary scaling, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shared.errors import UnsupportedModelError
from shared.model.rotary import rotation
from shared.model.spec import LocalAttention, ModelSpec
from shared.pack.sources.config_json import spec_of_config
from shared.pack.sources.families import FAMILIES
from tests.shared.model.families import CASES, LLAMA3, LONGROPE, SIZES, YARN

OBLIGATORY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "vocab_size": 320,
}


def transformers_config(**fields: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**fields)


def spec_of(**fields: Any) -> ModelSpec:
    return spec_of_config(fields, "model")


@pytest.mark.parametrize("case", CASES)
def test_what_transformers_writes_means_the_same_as_what_it_was_given(case: str) -> None:
    written = transformers_config(**SIZES | CASES[case]).to_dict()
    assert spec_of_config(written, "model") == spec_of(**SIZES | CASES[case])


@pytest.mark.parametrize("model_type", FAMILIES)
def test_absent_fields_have_the_defaults_of_transformers(model_type: str) -> None:
    fields = OBLIGATORY | {"model_type": model_type}
    assert spec_of(**fields) == spec_of_config(transformers_config(**fields).to_dict(), "model")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_field_that_no_family_knows_is_refused_by_name(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match="does not know: attention_sinks;"):
        spec_of(**OBLIGATORY, model_type=model_type, attention_sinks=4)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        LLAMA3,
        LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192},
        YARN,
        YARN | {"attention_factor": 1.25, "beta_fast": 16, "beta_slow": 2},
        YARN | {"mscale": 0.7, "mscale_all_dim": 1.0, "truncate": False},
        {"rope_type": "yarn", "factor": 40.0, "rope_theta": 1e6},
        LONGROPE | {"partial_rotary_factor": 1.0, "short_factor": [1.5] * 8, "long_factor": [3.0] * 8},
    ],
    ids=lambda parameters: parameters["rope_type"],
)
def test_scaled_rotations_are_those_of_transformers(parameters: dict[str, Any]) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    fields = SIZES | {"model_type": "llama", "rope_parameters": parameters, "max_position_embeddings": 2048}
    config, positions = transformers_config(**fields), torch.arange(2000)
    expected_cos, expected_sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    found = rotation(spec_of(**fields).ropes[0], positions, torch.float32)
    assert torch.allclose(found.cos[:, 0], expected_cos[0], atol=2e-4)
    negative, positive = found.signed_sin[:, 0].chunk(2, dim=-1)
    assert torch.allclose(torch.cat((-negative, positive), dim=-1), expected_sin[0], atol=2e-4)


def test_older_configurations_mean_the_same_as_newer_ones() -> None:
    llama = OBLIGATORY | {"model_type": "llama", "max_position_embeddings": 4096}
    scaling = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    assert spec_of(**llama, rope_parameters=LLAMA3) == spec_of(**llama, rope_theta=5e5, rope_scaling=scaling)
    gemma = OBLIGATORY | {"model_type": "gemma3_text"}
    newer = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    older = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert spec_of(**gemma, rope_parameters=newer) == spec_of(**gemma, **older, sliding_window_pattern=6)


def test_longrope_serves_the_context_that_the_model_was_trained_for() -> None:
    """Beyond it every earlier key would have to be rotated anew."""
    spec = spec_of(**SIZES | CASES["Phi-4 mini"])
    assert (spec.context_length, spec.rotated_dimensions) == (512, 12)
    assert spec.rope_divisors == tuple(LONGROPE["short_factor"])


def test_yarn_extends_the_context() -> None:
    qwen = OBLIGATORY | {"model_type": "qwen2", "max_position_embeddings": 32_768}
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    assert spec_of(**qwen, rope_scaling=scaling).context_length == 131_072


def test_windows_lie_where_the_family_has_them() -> None:
    def local(model_type: str, **fields: Any) -> LocalAttention | None:
        return spec_of(**OBLIGATORY | {"model_type": model_type, "sliding_window": 16} | fields).local_attention

    assert local("mistral") == LocalAttention(window=16, layers=tuple(range(8)))
    assert local("mistral", sliding_window=None) is None
    assert local("qwen2", max_window_layers=6) is None
    assert local("qwen2", max_window_layers=6, use_sliding_window=True) == LocalAttention(window=16, layers=(6, 7))
    assert local("gemma2") == LocalAttention(window=16, layers=(0, 2, 4, 6))
    assert local("gemma3_text") == LocalAttention(window=16, layers=(0, 1, 2, 3, 4, 6, 7), rope_theta=1e4)


@pytest.mark.parametrize(
    ("model_type", "fields", "named"),
    [
        ("qwen2", {"layer_types": ["sliding_attention"] * 8}, "sliding_window is off"),
        ("qwen2", {"layer_types": ["linear_attention"] * 8}, "layer_types is"),
        ("qwen2", {"layer_types": ["full_attention"] * 7}, "expected 8 of"),
        ("qwen2", {"max_window_layers": "6", "use_sliding_window": True}, "max_window_layers is '6'"),
        ("qwen2", {"attention_bias": True}, "attention_bias is True"),
        ("llama", {"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ("llama", {"head_dim": 10**9}, "head_dim"),
        ("llama", {"rope_scaling": {"type": ["linear"]}}, "rotary scaling"),
        ("mistral", {"layer_types": ["full_attention"] * 8}, "layer_types"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "expected full_attention and sliding"),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}}, "rope_type is 'linear'"),
        ("phi3", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "'yarn'"),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "factor is"),
        ("phi3", {"lm_head_bias": True}, "lm_head_bias"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv"),
        ("granite", {"attention_multiplier": "big"}, "attention_multiplier"),
    ],
)
def test_values_that_are_not_understood_are_refused_by_name(
    model_type: str, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        spec_of(**OBLIGATORY | {"head_dim": 4, "model_type": model_type} | fields)
