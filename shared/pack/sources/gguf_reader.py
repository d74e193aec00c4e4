"""The structure of a GGUF file: its metadata, and where its tensors lie.

Every count and size is held against the size of the file before it is used, so that a damaged or hostile file is
refused at once, whatever it claims. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from shared.errors import DataLossError, UnsupportedModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MOST_DIMENSIONS = 4

SCALARS: Mapping[int, np.dtype[Any]] = {
    number: np.dtype(name)
    for number, name in {
        0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
    }.items()
}  # fmt: skip
"""Number of a type -> the type of one value."""
STRING, ARRAY = 8, 9

UNQUANTIZED: Mapping[GGMLQuantizationType, str] = {
    GGMLQuantizationType.F32: "<f4",
    GGMLQuantizationType.F16: "<f2",
    GGMLQuantizationType.F64: "<f8",
}
"""Kinds whose values lie as numbers; all others are blocks of bytes."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor as it is stored; its bytes are read from disk when they are used."""

    shape: tuple[int, ...]
    """Rows first."""
    kind: GGMLQuantizationType
    stored: np.ndarray[Any, Any]
    """Rows first; the last axis counts numbers, or bytes of blocks."""

    def values(self, rows: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, Any]:
        """Some rows (of a vector: some elements), dequantized."""
        vector = len(self.shape) == 1
        found: np.ndarray[Any, Any] = dequantize(self.stored if vector else self.stored[rows], self.kind)
        return found[rows] if vector else found


@dataclass(frozen=True)
class GgufFile:
    """The contents of a file."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def is_gguf(path: Path) -> bool:
    """Whether a file begins as a GGUF file does."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_gguf(path: Path) -> GgufFile:
    """Reads metadata and the table of tensors.

    Raises:
        DataLossError: the file is shorter than it says, or not built as the format asks.
        UnsupportedModelError: another version of the format, or a kind of quantization that is not known.
    """
    data = np.memmap(path, mode="r")
    try:
        return _parse(_Cursor(data), data, path.name)
    except (_DamagedError, UnicodeDecodeError) as error:
        raise DataLossError(f"{path.name} is no complete GGUF file ({error}); download it again") from None


class _DamagedError(Exception):
    """What is wrong with the file."""


class _Cursor:
    """Reads a file from its beginning, never past its end."""

    def __init__(self, data: np.ndarray[Any, Any]) -> None:
        self._data = data.data
        self.position = 0

    def take(self, count: int) -> memoryview:
        end = self.position + count
        if end > len(self._data):
            raise _DamagedError(f"it ends at byte {len(self._data):,}, where {end:,} are needed")
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def number(self, form: str) -> int:
        (value,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return int(value)

    def string(self) -> str:
        return str(self.take(self.number("<Q")), "utf-8")

    def value(self) -> Any:
        kind = self.number("<I")
        if kind == STRING:
            return self.string()
        return self._array() if kind == ARRAY else self._scalars(kind, 1)[0]

    def _array(self) -> list[Any]:
        kind, count = self.number("<I"), self.number("<Q")
        return [self.string() for _ in range(count)] if kind == STRING else self._scalars(kind, count)

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in SCALARS:
            raise _DamagedError(f"unknown type {kind}")
        values: list[Any] = np.frombuffer(self.take(count * SCALARS[kind].itemsize), SCALARS[kind]).tolist()
        return values


def _parse(cursor: _Cursor, data: np.ndarray[Any, Any], file: str) -> GgufFile:
    if bytes(cursor.take(len(MAGIC))) != MAGIC:
        raise _DamagedError("it does not begin as one")
    version = cursor.number("<I")
    if version not in VERSIONS:
        raise UnsupportedModelError(f"{file} has version {version} of the GGUF format; this version reads {VERSIONS}")
    tensor_count, field_count = cursor.number("<Q"), cursor.number("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(field_count):
        name = cursor.string()
        if name in metadata:
            raise _DamagedError(f"it has the field {name!r} twice")
        metadata[name] = cursor.value()
    table: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(tensor_count):
        name, dimensions = cursor.string(), cursor.number("<I")
        if name in table or not 1 <= dimensions <= MOST_DIMENSIONS:
            raise _DamagedError(f"tensor {name!r} is there twice, or has {dimensions} dimensions")
        shape = tuple(cursor.number("<Q") for _ in range(dimensions))[::-1]
        table[name] = (shape, cursor.number("<I"), cursor.number("<Q"))
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    start = _aligned(cursor.position, alignment)
    tensors = {name: _tensor(data, start, name, file, *entry) for name, entry in table.items()}
    _check_apart(tensors, {name: offset for name, (_, _, offset) in table.items()}, alignment)
    return GgufFile(metadata, tensors)


def _aligned(position: int, alignment: Any) -> int:
    if not isinstance(alignment, int) or alignment < 1:
        raise _DamagedError(f"its alignment is {alignment!r}")
    return -(-position // alignment) * alignment


def _check_apart(tensors: Mapping[str, GgufTensor], offsets: Mapping[str, int], alignment: int) -> None:
    """Tensors lie on boundaries and share no byte: with a wrong offset, one would have the weights of another."""
    end = 0
    for name in sorted(offsets, key=offsets.__getitem__):
        if offsets[name] % alignment or offsets[name] < end:
            raise _DamagedError(
                f"tensor {name!r} has the offset {offsets[name]:,}, which lies in another tensor, "
                f"or on no boundary of {alignment} bytes"
            )
        end = offsets[name] + tensors[name].stored.nbytes


def _tensor(
    data: np.ndarray[Any, Any], start: int, name: str, file: str, shape: tuple[int, ...], kind_number: int, offset: int
) -> GgufTensor:
    try:
        kind = GGMLQuantizationType(kind_number)
    except ValueError:
        raise UnsupportedModelError(f"{file}: tensor {name} has the unknown kind {kind_number}") from None
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise _DamagedError(f"tensor {name!r} has rows of {shape[-1]}, no multiple of {block}")
    row_bytes = shape[-1] // block * block_bytes
    begin, size = start + offset, prod(shape[:-1]) * row_bytes
    if begin + size > len(data):
        raise _DamagedError(f"it ends at byte {len(data):,}, but tensor {name!r} at {begin + size:,}")
    stored = data[begin : begin + size].reshape(*shape[:-1], row_bytes)
    return GgufTensor(shape, kind, stored.view(UNQUANTIZED[kind]) if kind in UNQUANTIZED else stored)
