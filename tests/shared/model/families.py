"""Tiny random checkpoints of every family, written by transformers itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.models import BOS, BOS_ID, EOS, tiny_tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "bos_token_id": BOS_ID,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 2.0, 2.5],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
}
FULL, SLIDING = "full_attention", "sliding_attention"

CASES: dict[str, dict[str, Any]] = {
    "Llama 2": {"model_type": "llama", "num_key_value_heads": 4},
    "Llama 3.1": {"model_type": "llama", "rope_parameters": LLAMA3},
    "Llama 3.2": {"model_type": "llama", "rope_parameters": LLAMA3 | {"factor": 32.0}, "tie_word_embeddings": True},
    "Llama, linear": {"model_type": "llama", "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    "Llama, dynamic": {"model_type": "llama", "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
    "Llama, yarn": {"model_type": "llama", "rope_parameters": YARN},
    "Qwen2": {"model_type": "qwen2"},
    "Qwen2, windows in later layers": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 40,
        "max_window_layers": 2,
    },
    "Qwen2.5, yarn": {"model_type": "qwen2", "rope_parameters": YARN | {"rope_theta": 1e6}},
    "Qwen3": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "Qwen3, biases": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
    "Mistral 0.1": {"model_type": "mistral", "sliding_window": 40},
    "Mistral Nemo": {"model_type": "mistral", "sliding_window": None, "head_dim": 32},
    "SmolLM3": {"model_type": "smollm3"},
    "SmolLM3, windows and biases": {
        "model_type": "smollm3",
        "use_sliding_window": True,
        "sliding_window": 40,
        "no_rope_layers": [0, 1, 1, 0],
        "attention_bias": True,
        "mlp_bias": True,
    },
    "Gemma 2": {"model_type": "gemma2", "head_dim": 16, "sliding_window": 40, "query_pre_attn_scalar": 24},
    "Gemma 3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "sliding_window": 40,
        "query_pre_attn_scalar": 24,
    },
    "Gemma 3, scaled": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 40,
        "layer_types": [SLIDING, FULL, SLIDING, FULL],
        "final_logit_softcapping": 20.0,
        "rope_parameters": {
            FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            SLIDING: {"rope_type": "default", "rope_theta": 5000.0},
        },
    },
    "Gemma 2 file": {"model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 40},
    "Gemma 3 file": {"model_type": "gemma3_text", "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 40},
    "Phi-3 mini": {"model_type": "phi3", "sliding_window": 47},
    "Phi-4 mini": {
        "model_type": "phi3",
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 512,
        "rope_parameters": LONGROPE,
        "tie_word_embeddings": True,
    },
    "OLMo 2": {"model_type": "olmo2", "num_key_value_heads": 4},
    "OLMo 2, grouped heads and biases": {"model_type": "olmo2", "attention_bias": True},
    "Granite 3": {
        "model_type": "granite",
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.11,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
        "tie_word_embeddings": True,
    },
    "Mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "Mixtral, one expert a token and windows": {
        "model_type": "mixtral",
        "num_local_experts": 3,
        "num_experts_per_tok": 1,
        "sliding_window": 40,
        "head_dim": 32,
    },
    "Qwen3-MoE": {
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "num_experts": 12,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
    "Qwen3-MoE, probabilities as they are, windows and biases": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 40,
        "tie_word_embeddings": True,
    },
    "OLMoE": {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 3},
    "OLMoE, clamped": {
        "model_type": "olmoe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 4,
        "clip_qkv": 0.8,
        "norm_topk_prob": True,
        "attention_bias": True,
    },
}
"""Name -> configuration, beyond `SIZES`."""


def family_checkpoint(folder: Path, case: str, scale: float = 0.2, seed: int = 0) -> Path:
    """Writes the case's model with random weights, norms and biases, and returns its folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**SIZES | CASES[case])
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # A tied embedding favours the token just read, the more so the larger it is; any other makes text vary.
    embedding = 0.02 if config.tie_word_embeddings else 1.0
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # 0 or 1, as the family initializes its norms: they are random around it, so that each of them counts
            centre = parameter.mean() if "norm" in name else 0.0
            deviation = embedding if "embed_tokens" in name else scale
            parameter.copy_(centre + deviation * torch.randn(parameter.shape, generator=random))
    model.save_pretrained(folder)  # type: ignore[operator]
    tiny_tokenizer(SIZES["vocab_size"]).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS, "eos_token": EOS}))
    return folder
