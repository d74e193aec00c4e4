"""A GGUF file as a source; weights are dequantized to float32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from shared.errors import UnsupportedModelError
from shared.model.spec import MOST_LAYERS, ModelSpec
from shared.pack.sources.config import Config
from shared.pack.sources.family_fields import MOST_HEAD_DIM
from shared.pack.sources.gguf_architectures import (
    ARCHITECTURES,
    COMMON_FIELDS,
    FREQUENCY_DIVISORS,
    LAYER_NAMES,
    ONLY_VALUE,
    OTHER_KINDS,
    Architecture,
    rope_fields,
)
from shared.pack.sources.gguf_reader import read_gguf
from shared.pack.sources.gguf_tokenizer import end_token_ids, special_tokens, tokenizer_json
from shared.pack.sources.source import Source, check_tensors, fingerprint_of, stored_rows

Metadata = Mapping[str, Any]

OUTER_NAMES = {
    "embedding.weight": "token_embd.weight",
    "final_norm.weight": "output_norm.weight",
    "output.weight": "output.weight",
}


def open_gguf(path: Path) -> Source:
    """Opens a GGUF file.

    Raises:
        UnsupportedModelError: another architecture, tokenizer or kind of quantization, or unknown fields or tensors.
        DataLossError: the file is damaged.
    """
    file = read_gguf(path)
    metadata = {name: _shortest(value) for name, value in file.metadata.items()}
    architecture = _architecture(metadata, path.name)
    _check_kinds(path.name, {tensor.kind for tensor in file.tensors.values()})
    divisors: tuple[float, ...] = ()
    if FREQUENCY_DIVISORS in file.tensors:
        tensor = file.tensors[FREQUENCY_DIVISORS]
        divisors = tuple(map(_shortest, tensor.values(np.arange(tensor.shape[0]))))
    spec = _spec(architecture, metadata, path.name, set(file.tensors), divisors)
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    places = stored_rows(spec, _stored_name)
    check_tensors(path.name, places, shapes, ignorable=lambda name: name == FREQUENCY_DIVISORS)

    def read_rows(logical_name: str, rows: slice) -> Tensor:
        place = places[logical_name]
        found = file.tensors[place.tensor].values(_row_order(architecture, logical_name, spec, place.shape[0])[rows])
        if logical_name.endswith("norm.weight"):
            found = found - architecture.norm_offset
        return torch.from_numpy(np.ascontiguousarray(found, dtype=np.float32))

    return Source(
        name=path.name,
        fingerprint=fingerprint_of([path]),
        spec=spec,
        tokenizer_json=tokenizer_json(metadata, path.name),
        chat_template=_chat_template(metadata, path.name),
        end_token_ids=end_token_ids(metadata),
        special_tokens=special_tokens(metadata),
        read_rows=read_rows,
    )


def _chat_template(metadata: Metadata, file: str) -> str | None:
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise UnsupportedModelError(f"{file}: tokenizer.chat_template is no text")
    return template


def _architecture(metadata: Metadata, file: str) -> Architecture:
    """The file's architecture, once it is clear that the file is a whole model of one that is understood."""
    if metadata.get("general.type", "model") != "model":
        raise UnsupportedModelError(
            f"{file} is of type {metadata['general.type']!r}, not a model; merge it into its base model and pack that"
        )
    if metadata.get("split.count", 1) not in (0, 1):
        raise UnsupportedModelError(f"{file} is one of {metadata['split.count']} parts; merge them into one file first")
    name = str(metadata.get("general.architecture"))
    if name in OTHER_KINDS:
        raise UnsupportedModelError(f"{file} is {OTHER_KINDS[name]} (architecture {name!r})")
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file} has architecture {name!r}; of GGUF files this version loads {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def _spec(
    architecture: Architecture, metadata: Metadata, file: str, tensors: set[str], divisors: tuple[float, ...]
) -> ModelSpec:
    prefix = f"{metadata['general.architecture']}."
    stated = {name.removeprefix(prefix): value for name, value in metadata.items() if name.startswith(prefix)}
    fields = Config(stated, file, prefix)
    _check_fields(architecture, fields)
    heads, hidden_size = fields.integer("attention.head_count"), fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", hidden_size // heads, most=MOST_HEAD_DIM)
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(name, head_dim) != head_dim:
            fields.refuse(
                f"{prefix}{name} is {fields.integer(name)}, but heads have {head_dim} dimensions; "
                "this version loads models where they are the same"
            )
    common: dict[str, Any] = {
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("feed_forward_length"),
        "layers": fields.integer("block_count", most=MOST_LAYERS),
        "heads": heads,
        "kv_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": fields.integer("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ()))),
        "context_length": fields.integer("context_length"),
        "norm_epsilon": fields.number("attention.layer_norm_rms_epsilon"),
        "tied_embeddings": OUTER_NAMES["output.weight"] not in tensors,
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
    }
    return ModelSpec(**common | rope_fields(fields, head_dim, divisors) | architecture.spec_fields(fields))


def _check_fields(architecture: Architecture, fields: Config) -> None:
    for name, only in ONLY_VALUE.items():
        if fields.fields.get(name, only) != only:
            fields.refuse(f"{fields.place}{name} is {fields.fields[name]!r}; this version loads {only!r} only")
    known = COMMON_FIELDS | architecture.fields | ONLY_VALUE.keys()
    if unknown := sorted(fields.fields.keys() - known):
        names = ", ".join(fields.place + name for name in unknown)
        fields.refuse(f"there are fields that this version does not know: {names}; ignoring them could be wrong")


def _check_kinds(file: str, kinds: set[GGMLQuantizationType]) -> None:
    for kind in kinds:
        block = np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
        try:
            dequantize(block, kind)
        except NotImplementedError:
            raise UnsupportedModelError(f"{file} has {kind.name} tensors, which cannot be dequantized here") from None


def _row_order(
    architecture: Architecture, logical_name: str, spec: ModelSpec, rows: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Logical row -> row in the file, which may interleave the rotary halves of queries and keys."""
    order = np.arange(rows)
    if architecture.interleaved and (".attention.q." in logical_name or ".attention.k." in logical_name):
        return order.reshape(-1, spec.head_dim // 2, 2).swapaxes(1, 2).reshape(rows)
    return order


def _stored_name(logical_name: str) -> str:
    if logical_name in OUTER_NAMES:
        return OUTER_NAMES[logical_name]
    _, layer, name = logical_name.split(".", 2)
    module, _, suffix = name.rpartition(".")
    return f"blk.{layer}.{LAYER_NAMES[module]}.{suffix}"


def _shortest(value: Any) -> Any:
    """GGUF holds float32: the shortest decimal that rounds to it is what its author wrote (1e-05, not 9.99…e-06)."""
    return float(str(np.float32(value))) if isinstance(value, float | np.float32) else value
