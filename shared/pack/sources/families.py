"""The families of models: how each one's `config.json` and tensor names map to a `ModelSpec` and to logical names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.pack.sources import expert_fields, family_fields
from shared.pack.sources.config import Config, JsonObject

LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
POST_NORM_NAMES = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
FUSED_NAMES = {
    "attention.q": "self_attn.qkv_proj",
    "attention.k": "self_attn.qkv_proj",
    "attention.v": "self_attn.qkv_proj",
    "mlp.gate": "mlp.gate_up_proj",
    "mlp.up": "mlp.gate_up_proj",
}
"""Of Phi-3, which stores these together, rows after rows."""
EXPERT_NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
MIXTRAL_EXPERT_NAMES = {"gate": "w1", "up": "w3", "down": "w2"}


@dataclass(frozen=True, kw_only=True)
class Family:
    """What one architecture of Hugging Face `transformers` means."""

    name: str
    """For people."""
    architecture: str
    fields: frozenset[str] = frozenset()
    """Fields that `spec_fields` understands, beyond those of all families."""
    only: JsonObject = field(default_factory=lambda: {"hidden_act": "silu"})
    """Fields of which one value is understood; null and absent stand for it."""
    without_effect: frozenset[str] = frozenset()
    defaults: JsonObject = field(default_factory=dict)
    """Values of absent fields, where they are not those of Llama."""
    spec_fields: Callable[[Config], dict[str, Any]]
    """Fields of the spec beyond sizes, norm epsilon and tied embeddings."""
    layer_names: Mapping[str, str] = field(default_factory=lambda: LAYER_NAMES)
    """Logical module of a layer -> module in the checkpoint; several in one lie rows after rows."""
    mixture: str = "mlp"
    """Module of a layer that holds its router and experts."""
    expert_names: Mapping[str, str] = field(default_factory=lambda: EXPERT_NAMES)
    """Logical module of an expert -> module in the checkpoint."""


_QWEN_DEFAULTS = {
    "num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip
_QWEN_FIELDS = frozenset(["use_sliding_window", "sliding_window", "max_window_layers", "layer_types"])
_ROUTER_TRAINING = frozenset(["output_router_logits", "router_aux_loss_coef", "router_jitter_noise"])
_EXPERT_FIELDS = frozenset(["num_experts", "num_local_experts", "num_experts_per_tok"])
_GEMMA_DEFAULTS = {
    "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}  # fmt: skip
_GEMMA_FIELDS = frozenset(
    ["attention_bias", "query_pre_attn_scalar", "sliding_window", "layer_types", "final_logit_softcapping"]
)
_GEMMA_ONLY = {"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False}
_GEMMA_WITHOUT_EFFECT = frozenset(["hidden_act", "cache_implementation", "sliding_window_size"])

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        name="Llama",
        architecture="LlamaForCausalLM",
        fields=frozenset(["attention_bias", "mlp_bias"]),
        spec_fields=family_fields.llama,
    ),
    "qwen2": Family(
        name="Qwen2, Qwen2.5",
        architecture="Qwen2ForCausalLM",
        fields=_QWEN_FIELDS,
        defaults=_QWEN_DEFAULTS,
        spec_fields=family_fields.qwen2,
    ),
    "qwen3": Family(
        name="Qwen3",
        architecture="Qwen3ForCausalLM",
        fields=_QWEN_FIELDS | {"attention_bias"},
        defaults=_QWEN_DEFAULTS | {"head_dim": 128},
        spec_fields=family_fields.qwen3,
    ),
    "mistral": Family(
        name="Mistral",
        architecture="MistralForCausalLM",
        fields=frozenset({"sliding_window"}),
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
        spec_fields=family_fields.mistral,
    ),
    "smollm3": Family(
        name="SmolLM3",
        architecture="SmolLM3ForCausalLM",
        fields=frozenset(
            [
                "attention_bias",
                "mlp_bias",
                "no_rope_layers",
                "no_rope_layer_interval",
                "use_sliding_window",
                "sliding_window",
                "layer_types",
            ]
        ),
        without_effect=frozenset({"max_window_layers"}),
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "tie_word_embeddings": True,
            "rope_theta": 2e6,
            "no_rope_layer_interval": 4,
        },
        spec_fields=family_fields.smollm3,
    ),
    "gemma2": Family(
        name="Gemma 2",
        architecture="Gemma2ForCausalLM",
        fields=_GEMMA_FIELDS | {"attn_logit_softcapping"},
        only=_GEMMA_ONLY,
        without_effect=_GEMMA_WITHOUT_EFFECT,
        defaults=_GEMMA_DEFAULTS
        | {"max_position_embeddings": 8192, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        spec_fields=family_fields.gemma2,
        layer_names=LAYER_NAMES | POST_NORM_NAMES,
    ),
    "gemma3_text": Family(
        name="Gemma 3 (text)",
        architecture="Gemma3ForCausalLM",
        fields=_GEMMA_FIELDS | {"sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq"},
        only=_GEMMA_ONLY | {"attn_logit_softcapping": None},
        without_effect=_GEMMA_WITHOUT_EFFECT,
        defaults=_GEMMA_DEFAULTS | {"max_position_embeddings": 131_072},
        spec_fields=family_fields.gemma3,
        layer_names=LAYER_NAMES | POST_NORM_NAMES,
    ),
    "phi3": Family(
        name="Phi-3, Phi-4",
        architecture="Phi3ForCausalLM",
        fields=frozenset(["sliding_window", "partial_rotary_factor", "original_max_position_embeddings"]),
        only={
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "lm_head_bias": False,
            "full_attn_mod": 1,
            "interpolate_factor": 1,
        },
        without_effect=frozenset(["embd_pdrop", "resid_pdrop"]),
        defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        spec_fields=family_fields.phi3,
        layer_names=LAYER_NAMES | FUSED_NAMES,
    ),
    "olmo2": Family(
        name="OLMo 2",
        architecture="Olmo2ForCausalLM",
        fields=frozenset({"attention_bias"}),
        defaults={"rms_norm_eps": 1e-5},
        spec_fields=family_fields.olmo2,
        layer_names=LAYER_NAMES | POST_NORM_NAMES,
    ),
    "granite": Family(
        name="Granite 3",
        architecture="GraniteForCausalLM",
        fields=frozenset(
            [
                "attention_bias",
                "mlp_bias",
                "embedding_multiplier",
                "residual_multiplier",
                "logits_scaling",
                "attention_multiplier",
            ]
        ),
        spec_fields=family_fields.granite,
    ),
    "mixtral": Family(
        name="Mixtral",
        architecture="MixtralForCausalLM",
        fields=_EXPERT_FIELDS | {"sliding_window"},
        without_effect=_ROUTER_TRAINING,
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_experts_per_tok": 2,
        },
        spec_fields=expert_fields.mixtral,
        mixture="block_sparse_moe",
        expert_names=MIXTRAL_EXPERT_NAMES,
    ),
    "qwen3_moe": Family(
        name="Qwen3-MoE",
        architecture="Qwen3MoeForCausalLM",
        fields=_EXPERT_FIELDS
        | {
            "attention_bias",
            "use_sliding_window",
            "sliding_window",
            "moe_intermediate_size",
            "norm_topk_prob",
            "decoder_sparse_step",
            "mlp_only_layers",
        },
        without_effect=_ROUTER_TRAINING | {"max_window_layers"},
        defaults={
            "intermediate_size": 6144,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "sliding_window": 4096,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
        },
        spec_fields=expert_fields.qwen3_moe,
    ),
    "olmoe": Family(
        name="OLMoE",
        architecture="OlmoeForCausalLM",
        fields=_EXPERT_FIELDS | {"attention_bias", "clip_qkv", "norm_topk_prob"},
        without_effect=_ROUTER_TRAINING,
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_experts_per_tok": 8},
        spec_fields=expert_fields.olmoe,
    ),
}
"""By `model_type`."""
