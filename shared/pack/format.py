"""The pack format: one folder, one safetensors file per layer, and a manifest.

    manifest.json          version, spec, scheme, layout, sizes, digests (written last: a folder without it is no pack)
    outer.safetensors      embedding.weight, final_norm.weight and, unless tied, output.weight
    layers/00000.safetensors …
    experts/00000.safetensors …      the experts of each layer, where a model has experts
    tokenizer.json         as the `tokenizers` library reads it
    chat_template.jinja    where the model has one

Every layer file has the same offset table (`LayerLayout`), a pure function of spec and scheme. Tensor data starts on a
4 KiB boundary, ends on one, and each tensor starts on a 64-byte boundary inside: a layer is one contiguous, aligned
read. Safetensors allows no holes, so gaps are explicit tensors named `pad.N`.

Matrices that read the same input are stored fused, rows after rows (`FUSED`); norms, biases and routers in the compute
dtype.

A layer's experts lie in a file of their own, all with one offset table (`expert_layout`), each on a 4 KiB boundary and
padded to one: an expert is one contiguous, aligned read, and the manifest has a digest for each of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from shared.model.spec import ModelSpec
from shared.quant.schemes import Scheme, TensorShape

FORMAT_VERSION = 1
PAGE = 4096
"""Alignment of tensor data in a file: what O_DIRECT needs."""
TENSOR_ALIGNMENT = 64

FUSED: Mapping[str, tuple[str, ...]] = {
    "attention.qkv": ("attention.q", "attention.k", "attention.v"),
    "attention.output": ("attention.output",),
    "mlp.gate_up": ("mlp.gate", "mlp.up"),
    "mlp.down": ("mlp.down",),
}
"""Stored matrix -> the logical matrices whose rows it holds, in order."""
EXPERT_FUSED: Mapping[str, tuple[str, ...]] = {"gate_up": ("gate", "up"), "down": ("down",)}
"""The same for one expert."""

SAFETENSORS_DTYPES: Mapping[torch.dtype, str] = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
}


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies inside a file's data section."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the data section; a multiple of 64."""

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FileLayout:
    """The offset table of a file: its tensors in order, and the padding between them."""

    entries: tuple[TensorEntry, ...]
    data_bytes: int
    """Size of the data section; a multiple of 4096."""

    @classmethod
    def of(cls, tensors: Mapping[str, TensorShape]) -> FileLayout:
        """Lays the tensors out in the given order."""
        entries, offset = [], 0
        for name, (dtype, shape) in tensors.items():
            entries.append(TensorEntry(name, dtype, shape, offset))
            offset = _align(offset + entries[-1].size_bytes, TENSOR_ALIGNMENT)
        return cls(tuple(entries), _align(offset, PAGE))

    def entry(self, name: str) -> TensorEntry:
        """A tensor by its name."""
        return next(entry for entry in self.entries if entry.name == name)

    def header(self) -> bytes:
        """The safetensors header, padded with spaces so that data starts on a page boundary."""
        table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name, dtype, shape, begin, end in self._with_padding():
            table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(table, separators=(",", ":")).encode()
        text = text.ljust(_align(len(text) + 8, PAGE) - 8)
        return len(text).to_bytes(8, "little") + text

    @property
    def data_start(self) -> int:
        """Offset of the data section in the file; a multiple of 4096."""
        return len(self.header())

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.data_start + self.data_bytes

    def _with_padding(self) -> Iterator[tuple[str, str, list[int], int, int]]:
        end, pads = 0, 0
        for entry in self.entries:
            if entry.offset > end:
                yield f"pad.{pads}", "U8", [entry.offset - end], end, entry.offset
                pads += 1
            end = entry.offset + entry.size_bytes
            yield entry.name, SAFETENSORS_DTYPES[entry.dtype], list(entry.shape), entry.offset, end
        if self.data_bytes > end:
            yield f"pad.{pads}", "U8", [self.data_bytes - end], end, self.data_bytes

    def repeated(self, count: int, prefix: str) -> FileLayout:
        """The table of that many times the same tensors, one after the other; `prefix.3.NAME` is the fourth NAME."""
        entries = (
            TensorEntry(
                f"{prefix}.{number}.{entry.name}", entry.dtype, entry.shape, number * self.data_bytes + entry.offset
            )
            for number in range(count)
            for entry in self.entries
        )
        return FileLayout(tuple(entries), count * self.data_bytes)


def bind(buffer: Tensor, layout: FileLayout) -> dict[str, Tensor]:
    """Views of a buffer, uint8 [data_bytes], as the tensors of a file."""
    return {
        entry.name: buffer[entry.offset : entry.offset + entry.size_bytes].view(entry.dtype).view(entry.shape)
        for entry in layout.entries
        if entry.offset + entry.size_bytes <= len(buffer)
    }


def matrix_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Logical matrix -> (rows, columns) = (outputs, inputs) in one layer, without experts."""
    attention = {
        "attention.q": (spec.query_size, spec.hidden_size),
        "attention.k": (spec.kv_size, spec.hidden_size),
        "attention.v": (spec.kv_size, spec.hidden_size),
        "attention.output": (spec.hidden_size, spec.query_size),
    }
    return attention | ({} if spec.experts else {f"mlp.{name}": shape for name, shape in mlp_shapes(spec).items()})


def mlp_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Logical matrix -> (rows, columns) in the MLP of a layer, or in one expert."""
    return {
        "gate": (spec.intermediate_size, spec.hidden_size),
        "up": (spec.intermediate_size, spec.hidden_size),
        "down": (spec.hidden_size, spec.intermediate_size),
    }


def router_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """The matrix of a layer that chooses experts; never quantized, since a choice has no small errors."""
    return {"router": (spec.experts.count, spec.hidden_size)} if spec.experts else {}


def expert_prefixes(spec: ModelSpec) -> list[str]:
    """The logical names of a layer's experts: `experts.0` …"""
    return [f"experts.{expert}" for expert in range(spec.experts.count)] if spec.experts else []


def fused_matrices(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """The part of `FUSED` that a layer of this spec has."""
    present = matrix_shapes(spec).keys()
    return {stored: parts for stored, parts in FUSED.items() if parts[0] in present}


def norm_shapes(spec: ModelSpec) -> dict[str, tuple[int]]:
    """Each norm of a layer -> its size."""
    shapes: dict[str, tuple[int]] = {}
    if spec.norms != "after":
        shapes |= dict.fromkeys(("attention_norm", "mlp_norm"), (spec.hidden_size,))
    if spec.norms != "before":
        shapes |= dict.fromkeys(("attention_post_norm", "mlp_post_norm"), (spec.hidden_size,))
    if spec.qk_norm == "head":
        shapes |= dict.fromkeys(("query_norm", "key_norm"), (spec.head_dim,))
    if spec.qk_norm == "projection":
        shapes |= {"query_norm": (spec.query_size,), "key_norm": (spec.kv_size,)}
    return shapes


def has_bias(spec: ModelSpec, matrix: str) -> bool:
    """Whether a matrix, stored or logical, has a bias beside it."""
    if matrix.startswith("mlp."):
        return spec.mlp_bias
    return spec.attention_bias or (spec.qkv_bias and matrix != "attention.output")


def layer_layout(spec: ModelSpec, scheme: Scheme) -> FileLayout:
    """The one offset table that all layers share."""
    shapes = matrix_shapes(spec)
    tensors: dict[str, TensorShape] = {}
    for norm, norm_shape in norm_shapes(spec).items():
        tensors[f"{norm}.weight"] = (scheme.compute_dtype, norm_shape)
    for router, router_shape in router_shapes(spec).items():
        tensors[f"{router}.weight"] = (scheme.compute_dtype, router_shape)
    for stored, parts in fused_matrices(spec).items():
        rows, columns = sum(shapes[part][0] for part in parts), shapes[parts[0]][1]
        for suffix, shape in scheme.components(rows, columns).items():
            tensors[f"{stored}.{suffix}"] = shape
        if has_bias(spec, stored):
            tensors[f"{stored}.bias"] = (scheme.compute_dtype, (rows,))
    return FileLayout.of(tensors)


def expert_layout(spec: ModelSpec, scheme: Scheme) -> FileLayout:
    """The offset table that all experts share, counted from the start of each."""
    shapes = mlp_shapes(spec)
    tensors: dict[str, TensorShape] = {}
    for stored, parts in EXPERT_FUSED.items():
        rows, columns = sum(shapes[part][0] for part in parts), shapes[parts[0]][1]
        for suffix, shape in scheme.components(rows, columns).items():
            tensors[f"{stored}.{suffix}"] = shape
    return FileLayout.of(tensors)


def experts_layout(spec: ModelSpec, scheme: Scheme) -> FileLayout:
    """The offset table of the file that holds all experts of a layer."""
    return expert_layout(spec, scheme).repeated(len(expert_prefixes(spec)), "experts")


def outer_layout(spec: ModelSpec, scheme: Scheme) -> FileLayout:
    """The offset table of the weights outside the layers. An embedding that nothing else needs comes last."""
    matrix = (scheme.compute_dtype, (spec.vocab_size, spec.hidden_size))
    tensors: dict[str, TensorShape] = {"final_norm.weight": (scheme.compute_dtype, (spec.hidden_size,))}
    if not spec.tied_embeddings:
        tensors["output.weight"] = matrix
    tensors["embedding.weight"] = matrix
    return FileLayout.of(tensors)


def layer_file_name(layer: int) -> str:
    """Path of a layer's file inside the pack."""
    return f"layers/{layer:05d}.safetensors"


def experts_file_name(layer: int) -> str:
    """Path of the file of a layer's experts inside the pack."""
    return f"experts/{layer:05d}.safetensors"


OUTER_FILE = "outer.safetensors"
MANIFEST_FILE = "manifest.json"
TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"


@dataclass(frozen=True)
class FileRecord:
    """Size and digest of one file of the pack."""

    size_bytes: int
    sha256: str
    expert_sha256: tuple[str, ...] = ()
    """Of each expert's bytes, padding included, in a file of experts."""


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says.

    `model_digest` is a SHA-256 over spec, scheme and the logical tensors' encoded values, in logical order: it does not
    depend on fusing, padding or file boundaries, and identifies the weights in every handoff.
    """

    spec: ModelSpec
    scheme: str
    model_digest: str
    files: Mapping[str, FileRecord]
    """Every file of the pack but the manifest, by its path inside the folder."""
    source: str
    """What it was packed from, for people; never a full path."""
    end_token_ids: tuple[int, ...]
    """Tokens that end an answer."""
    special_tokens: Mapping[str, str]
    """bos_token, eos_token … as the chat template names them."""


def _align(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment
