"""A GGUF file as a source; weights are dequantized to float32.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from torch import Tensor

from shared.errors import DataLossError, UnsupportedModelError
from shared.model.spec import ModelSpec
from shared.pack.sources.gguf_tokenizer import end_token_ids, special_tokens, tokenizer_json
from shared.pack.sources.source import Source, check_tensors, fingerprint_of, stored_rows

Metadata = Mapping[str, Any]

MAGIC = b"GGUF"
ARCHITECTURE = "llama"

OUTER_NAMES = {
    "embedding.weight": "token_embd.weight",
    "final_norm.weight": "output_norm.weight",
    "output.weight": "output.weight",
}
LAYER_NAMES = {
    "attention_norm": "attn_norm",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.output": "attn_output",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
}

UNDERSTOOD = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count",
}  # fmt: skip

ONLY_VALUE: Metadata = {"expert_count": 0, "expert_used_count": 0, "rope.scaling.type": "none"}
"""Fields of which this version understands one value."""


def is_gguf(path: Path) -> bool:
    """Whether a file begins as a GGUF file does."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def open_gguf(path: Path) -> Source:
    """Opens a GGUF file of the Llama architecture.

    Raises:
        UnsupportedModelError: another architecture, tokenizer or kind of quantization, or unknown fields or tensors.
        DataLossError: the file is damaged.
    """
    try:
        reader = GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise DataLossError(f"{path.name} is no complete GGUF file ({error}); download it again") from None
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    spec = _spec(metadata, path.name, set(tensors))
    shapes = {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in tensors.items()}
    check_tensors(path.name, stored_rows(spec, _stored_name), shapes, ignorable=lambda _: False)
    _check_kinds(path.name, {tensor.tensor_type for tensor in tensors.values()})

    def read_rows(logical_name: str, rows: slice) -> Tensor:
        tensor = tensors[_stored_name(logical_name)]
        index = _row_order(logical_name, spec, tensor.shape[-1].item())[rows]
        if len(tensor.shape) == 1:
            values = dequantize(tensor.data, tensor.tensor_type)[index]
        else:
            values = dequantize(tensor.data[index], tensor.tensor_type)
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))

    return Source(
        name=path.name,
        fingerprint=fingerprint_of([path]),
        spec=spec,
        tokenizer_json=tokenizer_json(metadata, path.name),
        chat_template=metadata.get("tokenizer.chat_template"),
        end_token_ids=end_token_ids(metadata),
        special_tokens=special_tokens(metadata),
        read_rows=read_rows,
    )


def _spec(metadata: Metadata, file: str, tensors: set[str]) -> ModelSpec:
    _check_metadata(metadata, file)

    def value(name: str, default: Any = None) -> Any:
        return metadata.get(f"{ARCHITECTURE}.{name}", default)

    def integer(name: str, default: int | None = None) -> int:
        found = value(name, default)
        if not isinstance(found, int) or found < 1:
            raise UnsupportedModelError(f"{file}: {ARCHITECTURE}.{name} is {found!r}; expected a positive integer")
        return found

    heads, hidden_size = integer("attention.head_count"), integer("embedding_length")
    head_dim = integer("attention.key_length", hidden_size // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if integer(name, head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{file}: {ARCHITECTURE}.{name} is {integer(name)}, but heads have {head_dim} dimensions; "
                "this version loads models where they are the same"
            )
    return ModelSpec(
        hidden_size=hidden_size,
        intermediate_size=integer("feed_forward_length"),
        layers=integer("block_count"),
        heads=heads,
        kv_heads=integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=integer("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ()))),
        context_length=integer("context_length"),
        norm_epsilon=_shortest(value("attention.layer_norm_rms_epsilon", 0.0)),
        rope_theta=_shortest(value("rope.freq_base", 10_000.0)),
        tied_embeddings=OUTER_NAMES["output.weight"] not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
    )


def _check_metadata(metadata: Metadata, file: str) -> None:
    if metadata.get("general.type", "model") != "model":
        raise UnsupportedModelError(
            f"{file} is of type {metadata['general.type']!r}, not a model; merge it into its base model and pack that"
        )
    architecture = metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise UnsupportedModelError(f"{file} has architecture {architecture!r}; this version loads {ARCHITECTURE!r}")
    if metadata.get("split.count", 1) > 1:
        raise UnsupportedModelError(f"{file} is one of {metadata['split.count']} parts; merge them into one file first")
    prefix = f"{ARCHITECTURE}."
    fields = {name.removeprefix(prefix): value for name, value in metadata.items() if name.startswith(prefix)}
    for name, only in ONLY_VALUE.items():
        if fields.get(name, only) != only:
            raise UnsupportedModelError(f"{file}: {prefix}{name} is {fields[name]!r}; this version loads {only!r} only")
    if unknown := sorted(fields.keys() - UNDERSTOOD - ONLY_VALUE.keys()):
        raise UnsupportedModelError(
            f"{file} has fields that this version does not know: {', '.join(prefix + name for name in unknown)}; "
            "ignoring them could make its output wrong"
        )


def _check_kinds(file: str, kinds: set[GGMLQuantizationType]) -> None:
    for kind in kinds:
        block = np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
        try:
            dequantize(block, kind)
        except NotImplementedError:
            raise UnsupportedModelError(f"{file} has {kind.name} tensors, which cannot be dequantized here") from None


def _row_order(logical_name: str, spec: ModelSpec, rows: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Logical row -> row in the file, which interleaves the rotary halves of queries and keys."""
    order = np.arange(rows)
    if ".attention.q." in logical_name or ".attention.k." in logical_name:
        return order.reshape(-1, spec.head_dim // 2, 2).swapaxes(1, 2).reshape(rows)
    return order


def _stored_name(logical_name: str) -> str:
    if logical_name in OUTER_NAMES:
        return OUTER_NAMES[logical_name]
    _, layer, name = logical_name.split(".", 2)
    module, _, suffix = name.rpartition(".")
    return f"blk.{layer}.{LAYER_NAMES[module]}.{suffix}"


def _shortest(value: float) -> float:
    """GGUF holds float32: the shortest decimal that rounds to it is what its author wrote (1e-05, not 9.99…e-06)."""
    return float(str(np.float32(value)))
