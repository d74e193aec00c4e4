"""The contents of a pack's weight files: a source's tensors, encoded by the scheme, as a stream of bytes.

Pieces are made one matrix at a time and handed on at once, so memory holds about one matrix, never a model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, MutableMapping, Sequence

import torch
from torch import Tensor

from shared.pack.format import (
    EXPERT_FUSED,
    FileLayout,
    expert_layout,
    expert_prefixes,
    experts_layout,
    fused_matrices,
    has_bias,
    layer_layout,
    norm_shapes,
    outer_layout,
    router_shapes,
)
from shared.pack.sources.source import Source
from shared.quant.schemes import Scheme

PIECE_BYTES = 64 << 20
"""About how much of a float32 outer matrix is in memory at a time."""

EncodedDigests = MutableMapping[str, str]
"""Logical name of an encoded tensor -> SHA-256 of its dtype, shape and values; filled as the pieces go by."""

TensorPieces = tuple[str, Iterable[Tensor]]
"""Stored name, and the tensor as consecutive rows."""


def layer_file_pieces(source: Source, layer: int, scheme: Scheme, digests: EncodedDigests) -> Iterator[memoryview]:
    """The bytes of a layer's file, in order."""
    return _file_pieces(layer_layout(source.spec, scheme), _layer_tensors(source, layer, scheme, digests))


def experts_file_pieces(
    source: Source, layer: int, scheme: Scheme, digests: EncodedDigests, expert_sha256: list[str]
) -> Iterator[memoryview]:
    """The bytes of the file of a layer's experts, in order, an expert at a time.

    Args:
        expert_sha256: takes the SHA-256 of each expert's bytes as it has gone by.
    """
    layout = expert_layout(source.spec, scheme)
    yield memoryview(experts_layout(source.spec, scheme).header())
    for expert in expert_prefixes(source.spec):
        digest = hashlib.sha256()
        tensors = (
            tensor
            for stored, parts in EXPERT_FUSED.items()
            for tensor in _fused(source, layer, scheme, digests, stored, [f"{expert}.{part}" for part in parts])
        )
        for piece in _data_pieces(layout, tensors):
            digest.update(piece)
            yield piece
        expert_sha256.append(digest.hexdigest())


def outer_file_pieces(source: Source, scheme: Scheme, digests: EncodedDigests) -> Iterator[memoryview]:
    """The bytes of the file of the weights outside the layers, in order."""
    return _file_pieces(outer_layout(source.spec, scheme), _outer_tensors(source, scheme, digests))


def _file_pieces(layout: FileLayout, tensors: Iterable[TensorPieces]) -> Iterator[memoryview]:
    """Header, tensors and padding."""
    yield memoryview(layout.header())
    yield from _data_pieces(layout, tensors)


def _data_pieces(layout: FileLayout, tensors: Iterable[TensorPieces]) -> Iterator[memoryview]:
    """Tensors and padding."""
    position = 0
    for entry, (name, pieces) in zip(layout.entries, tensors, strict=True):
        yield memoryview(bytes(entry.offset - position))
        position = entry.offset
        for piece in pieces:
            yield values_of(piece)
            position += piece.nbytes
        if (name, position) != (entry.name, entry.offset + entry.size_bytes):
            raise ValueError(f"layout has {entry}, but {name} of {position - entry.offset} bytes was encoded")
    yield memoryview(bytes(layout.data_bytes - position))


def _layer_tensors(source: Source, layer: int, scheme: Scheme, digests: EncodedDigests) -> Iterator[TensorPieces]:
    def in_compute_dtype(name: str) -> Tensor:
        tensor = source.layer_tensor(layer, name).to(scheme.compute_dtype)
        digests[f"layers.{layer}.{name}"] = encoded_digest(tensor)
        return tensor

    for plain in (*norm_shapes(source.spec), *router_shapes(source.spec)):
        yield f"{plain}.weight", [in_compute_dtype(f"{plain}.weight")]
    for stored, parts in fused_matrices(source.spec).items():
        yield from _fused(source, layer, scheme, digests, stored, parts)
        if has_bias(source.spec, stored):
            yield f"{stored}.bias", [in_compute_dtype(f"{part}.bias") for part in parts]


def _fused(
    source: Source, layer: int, scheme: Scheme, digests: EncodedDigests, stored: str, parts: Sequence[str]
) -> Iterator[TensorPieces]:
    """The components of one stored matrix, from the logical matrices whose rows it holds."""
    encoded = []
    for part in parts:
        components = source.encoded(layer, part, scheme)
        for suffix, tensor in components.items():
            digests[f"layers.{layer}.{part}.{suffix}"] = encoded_digest(tensor)
        encoded.append(components)
    for suffix, tensor in scheme.fuse(encoded).items():
        yield f"{stored}.{suffix}", [tensor]


def _outer_tensors(source: Source, scheme: Scheme, digests: EncodedDigests) -> Iterator[TensorPieces]:
    for entry in outer_layout(source.spec, scheme).entries:
        yield entry.name, _rows_in_compute_dtype(source, entry.name, entry.shape, scheme, digests)


def _rows_in_compute_dtype(
    source: Source, name: str, shape: tuple[int, ...], scheme: Scheme, digests: EncodedDigests
) -> Iterator[Tensor]:
    columns = shape[1] if len(shape) > 1 else 1
    step = max(1, PIECE_BYTES // (columns * torch.float32.itemsize))
    digest = _digest_of(scheme.compute_dtype, shape)
    for begin in range(0, shape[0], step):
        piece = source.tensor(name, slice(begin, begin + step)).to(scheme.compute_dtype)
        digest.update(values_of(piece))
        yield piece
    digests[name] = digest.hexdigest()


def encoded_digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's dtype, shape and values."""
    digest = _digest_of(tensor.dtype, tuple(tensor.shape))
    digest.update(values_of(tensor))
    return digest.hexdigest()


def values_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes as they are stored."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def _digest_of(dtype: torch.dtype, shape: tuple[int, ...]) -> hashlib._Hash:
    return hashlib.sha256(f"{str(dtype).removeprefix('torch.')} {list(shape)}\n".encode())
