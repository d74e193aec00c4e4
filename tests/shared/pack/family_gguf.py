"""Writes the tiny checkpoints of families as GGUF, with the tensor names that the gguf library gives them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGUFWriter
from safetensors.torch import load_file

FIELDS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "vocab_size": "vocab_size",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Field of `config.json` -> field of the metadata."""

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
}


def write_family_gguf(path: Path, checkpoint: Path, architecture: str, divisors: tuple[float, ...] = ()) -> Path:
    """A float32 GGUF file of a Hugging Face checkpoint.

    Args:
        divisors: of rotary frequencies, written as Llama 3's are.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    writer = GGUFWriter(path, architecture)
    writer.add_name("tiny")
    for field, name in FIELDS.items():
        value = config.get(field)
        if isinstance(value, float):
            writer.add_float32(f"{architecture}.{name}", value)
        elif value is not None:
            writer.add_uint32(f"{architecture}.{name}", value)
    rope = config["rope_parameters"]
    theta = rope.get("full_attention", rope)["rope_theta"]
    writer.add_float32(f"{architecture}.rope.freq_base", theta)
    add_byte_level_tokenizer(writer, json.loads((checkpoint / "tokenizer.json").read_text()))
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], config["num_hidden_layers"])
    for stored, tensor in load_file(checkpoint / "model.safetensors").items():
        values = tensor.numpy()
        if architecture == "llama" and (".q_proj." in stored or ".k_proj." in stored):
            values = _interleaved(values, config["head_dim"])
        if architecture.startswith("gemma") and "norm" in stored:
            values = values + 1
        name = names.get_name(stored, try_suffixes=(".weight", ".bias"))
        assert name is not None, stored
        writer.add_tensor(name, values)
    if divisors:
        writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_byte_level_tokenizer(writer: GGUFWriter, tokenizer: Any, pre: str = "gpt-2") -> None:
    """The metadata of a byte-level BPE tokenizer, from its `tokenizer.json`."""
    vocabulary = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if token in special else 1 for token, _ in vocabulary])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(1)


def _interleaved(values: np.ndarray, head_dim: int) -> np.ndarray:
    halves = values.reshape(-1, 2, head_dim // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
