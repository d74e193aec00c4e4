"""Checkpoints for the pack tests: tiny GGUF files, and edits of a checkpoint's JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import load_file

from shared.pack.sources import families, gguf_file, safetensors_folder
from tests.models import CHAT_TEMPLATE

FULL = {"tied": False, "attention_bias": True, "mlp_bias": True}
"""Options of a tiny checkpoint that has every tensor there is."""


def write_gguf(path: Path, checkpoint: Path, kind: str = "F32", *, omit: tuple[str, ...] = (), **metadata: Any) -> Path:
    """Writes a Hugging Face checkpoint as GGUF: matrices in `kind`, the rest in float32, q and k interleaved.

    Args:
        omit: names of metadata to leave out.
        metadata: replaces or adds fields, with `__` for a dot.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    vocabulary = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    special = {token["content"] for token in tokenizer["added_tokens"]}
    fields: dict[str, Any] = {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.key_length": config["head_dim"],
        "llama.attention.value_length": config["head_dim"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config["rope_parameters"]["rope_theta"],
        "llama.rope.dimension_count": config["head_dim"],
        "llama.vocab_size": config["vocab_size"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [token for token, _ in vocabulary],
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token, _ in vocabulary],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.chat_template": CHAT_TEMPLATE,
    } | {name.replace("__", "."): value for name, value in metadata.items()}
    writer = GGUFWriter(path, fields.pop("general.architecture", "llama"))
    for name, value in fields.items():
        if name not in omit:
            _add_field(writer, name, value)
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        logical = _logical_name(name)
        values = tensor.numpy()
        for projection, its_heads in (("attention.q.", heads), ("attention.k.", kv_heads)):
            if projection in logical:
                halves = values.reshape(its_heads, 2, config["head_dim"] // 2, -1)
                values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        dtype = GGMLQuantizationType[kind if values.ndim == 2 else "F32"]
        writer.add_tensor(gguf_file._stored_name(logical), quantize(values, dtype), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def edit_json(path: Path, **changes: Any) -> None:
    """Sets fields of a JSON file; None removes one."""
    value = json.loads(path.read_text()) if path.exists() else {}
    value |= changes
    path.write_text(json.dumps({name: field for name, field in value.items() if field is not None}))


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _add_field(writer: GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)


def _logical_name(stored: str) -> str:
    outer = {name: logical for logical, name in safetensors_folder.OUTER_NAMES.items()}
    if stored in outer:
        return outer[stored]
    _, _, layer, name = stored.split(".", 3)
    module, _, suffix = name.rpartition(".")
    modules = {name: logical for logical, name in families.LAYER_NAMES.items()}
    return f"layers.{layer}.{modules[module]}.{suffix}"
