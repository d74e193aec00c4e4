"""The architectures of GGUF files: how each one's metadata and tensor names map to a `ModelSpec` and to logical names.

What a file does not state is a constant of its architecture: the pattern of local layers, their rotary base, norms with
1 + weight (which files of Gemma hold as 1 + weight already).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.model.spec import LocalAttention, Multipliers
from shared.pack.sources.config import Config
from shared.pack.sources.rope_scaling import scaled_rope

LAYER_NAMES = {
    "attention_norm": "attn_norm",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "query_norm": "attn_q_norm",
    "key_norm": "attn_k_norm",
    "attention.output": "attn_output",
    "attention_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
    "mlp_post_norm": "post_ffw_norm",
}

COMMON_FIELDS = frozenset({
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
})  # fmt: skip

ONLY_VALUE: Mapping[str, Any] = {"expert_count": 0, "expert_used_count": 0}
"""Fields of which one value is understood."""

FREQUENCY_DIVISORS = "rope_freqs.weight"
"""The tensor that holds what Llama 3 divides its rotary frequencies by."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What one `general.architecture` means."""

    fields: frozenset[str] = frozenset()
    """Fields that `spec_fields` understands, beyond `COMMON_FIELDS`."""
    spec_fields: Callable[[Config], dict[str, Any]] = field(default=lambda _: {})
    """Fields of the spec beyond sizes and rotary embedding."""
    interleaved: bool = False
    """Rotary halves of queries and keys lie interleaved."""
    norm_offset: float = 0.0
    """What norm weights hold beyond those of the logical tensors."""


def rope_fields(fields: Config, head_dim: int, divisors: tuple[float, ...]) -> dict[str, Any]:
    """The spec's rotary embedding.

    Args:
        divisors: contents of `rope_freqs.weight`, none where the file has no such tensor.
    """
    names = {
        "rope.scaling.factor": "factor",
        "rope.scaling.original_context_length": "original_max_position_embeddings",
        "rope.scaling.yarn_beta_fast": "beta_fast",
        "rope.scaling.yarn_beta_slow": "beta_slow",
    }
    kind = fields.fields.get("rope.scaling.type", "linear" if "rope.scaling.factor" in fields.fields else "none")
    parameters = {"rope_type": "default"}
    if kind != "none":
        parameters = {"rope_type": kind} | {
            name: fields.fields[stored] for stored, name in names.items() if stored in fields.fields
        }
    rope = scaled_rope(
        Config(parameters, fields.checkpoint, f"{fields.place}rope.scaling."),
        fields.number("rope.freq_base", 10_000.0),
        head_dim,
        fields.integer("context_length"),
        None,
    )
    if divisors and rope.divisors:
        fields.refuse(f"{FREQUENCY_DIVISORS} and {fields.place}rope.scaling.type {kind!r} exclude each other")
    return rope.spec_fields | ({"rope_divisors": divisors} if divisors else {})


def _local_layers(fields: Config, pattern: int) -> tuple[int, ...]:
    """All layers but every `pattern`-th."""
    return tuple(layer for layer in range(fields.integer("block_count")) if (layer + 1) % pattern)


def _gemma(fields: Config, layers_of_27b: int) -> dict[str, Any]:
    """What Gemma 2 and 3 share. In the 27B models a head has other dimensions than its share of the features."""
    size, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    scalar = fields.integer("attention.key_length", size // heads)
    if fields.integer("block_count") == layers_of_27b:
        scalar = size // heads
    return {
        "activation": "gelu_tanh",
        "norms": "both",
        "norm_plus_one": True,
        "multipliers": Multipliers(embedding=size**0.5),
        "attention_scale": scalar**-0.5,
        "logit_soft_cap": fields.number_or_none("final_logit_softcapping"),
    }


def _gemma2(fields: Config) -> dict[str, Any]:
    window = fields.integer("attention.sliding_window", 4096)
    return _gemma(fields, layers_of_27b=46) | {
        "local_attention": LocalAttention(window=window, layers=_local_layers(fields, pattern=2)),
        "logit_soft_cap": fields.number("final_logit_softcapping", 30.0),
        "attention_soft_cap": fields.number("attn_logit_softcapping", 50.0),
    }


def _gemma3(fields: Config) -> dict[str, Any]:
    local = LocalAttention(
        window=fields.integer("attention.sliding_window"),
        layers=_local_layers(fields, fields.integer("attention.sliding_window_pattern", 6)),
        rope_theta=fields.number("rope.freq_base_swa", 10_000.0),
    )
    return _gemma(fields, layers_of_27b=62) | {"local_attention": local, "qk_norm": "head"}


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(interleaved=True),
    "qwen2": Architecture(spec_fields=lambda _: {"qkv_bias": True}),
    "qwen3": Architecture(spec_fields=lambda _: {"qk_norm": "head"}),
    "gemma2": Architecture(
        fields=frozenset({"attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}),
        spec_fields=_gemma2,
        norm_offset=1.0,
    ),
    "gemma3": Architecture(
        fields=frozenset(
            {
                "attention.sliding_window",
                "attention.sliding_window_pattern",
                "rope.freq_base_swa",
                "final_logit_softcapping",
            }
        ),
        spec_fields=_gemma3,
        norm_offset=1.0,
    ),
}
"""By `general.architecture`."""

OTHER_KINDS = {
    "clip": "the vision tower of a model; give the file of its language model",
    "bert": "an encoder model; give a decoder, which writes text",
    "nomic-bert": "an encoder model; give a decoder, which writes text",
    "jina-bert-v2": "an encoder model; give a decoder, which writes text",
    "modern-bert": "an encoder model; give a decoder, which writes text",
    "gemma-embedding": "an encoder model; give a decoder, which writes text",
    "t5": "an encoder model; give a decoder, which writes text",
    "t5encoder": "an encoder model; give a decoder, which writes text",
}
"""Architectures that are no text decoders, and what they are."""
