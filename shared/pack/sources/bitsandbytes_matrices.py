"""Matrices that bitsandbytes has quantized, as `transformers` saves them, read without quantizing them again.

| stored                                                                | as                              |
|------------------------------------------------------------------------|---------------------------------|
| `weight` int8 [out, in], `SCB` float32 [out] beside it                 | int8, row by row (LLM.int8())   |
| `weight` [out · in / 2 bytes], `weight.quant_state.bitsandbytes__nf4`, | nf4 or fp4, block by block      |
| `weight.absmax`, `weight.quant_map` and, where scales are quantized    | (QLoRA, arXiv 2305.14314)       |
| themselves, `weight.nested_absmax`, `weight.nested_quant_map`          |                                 |
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shared.errors import DataLossError, UnsupportedModelError
from shared.pack.sources.stored_tensors import Shape, StoredTensors
from shared.quant.kernels import NF4_BLOCK, load_bitsandbytes

FOUR_BIT_KINDS = ("nf4", "fp4")
STATE_SUFFIX = ".quant_state.bitsandbytes__"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
MOST_STATE_BYTES = 4096


class QuantizedMatrix(Protocol):
    """One stored matrix."""

    @property
    def shape(self) -> Shape:
        """[out, in]."""

    @property
    def stored_as(self) -> str:
        """The name of the scheme whose codes these are; otherwise a description that is no scheme's name."""

    @property
    def parts(self) -> frozenset[str]:
        """Names of the tensors that belong to it, beside the weight."""

    def dequantized(self, rows: slice) -> Tensor:
        """Rows [n, in] as bitsandbytes dequantizes them, to the last bit."""

    def encoded(self, rows: slice) -> dict[str, Tensor]:
        """Rows as the scheme `stored_as` encodes them: the codes as they are."""


def quantized_matrices(checkpoint: str, stored: StoredTensors) -> dict[str, QuantizedMatrix]:
    """Every quantized matrix by the name of its weight.

    Raises:
        UnsupportedModelError: one is in a form that this version does not know.
        DataLossError: its parts do not fit together.
    """
    matrices: dict[str, QuantizedMatrix] = {}
    for name in stored.files:
        weight, is_four_bit, kind = name.partition(STATE_SUFFIX)
        if is_four_bit:
            matrices[weight] = _four_bit(checkpoint, stored, weight, kind)
        elif name.endswith(".SCB"):
            weight = f"{name.removesuffix('.SCB')}.weight"
            matrices[weight] = _eight_bit(checkpoint, stored, weight, name)
    return matrices


@dataclass(frozen=True)
class EightBitMatrix:
    """Rows of int8 codes; a code of 127 stands for the row's maximum, SCB."""

    stored: StoredTensors
    weight: str
    scales: str
    shape: Shape
    parts: frozenset[str]
    stored_as: str = "int8"

    def dequantized(self, rows: slice) -> Tensor:
        """float32 [n, in]."""
        load_bitsandbytes()
        from bitsandbytes.functional import int8_vectorwise_dequant

        values: Tensor = int8_vectorwise_dequant(*self.encoded(rows).values())
        return values

    def encoded(self, rows: slice) -> dict[str, Tensor]:
        """int8 [n, in] and float32 [n]."""
        return {"weight": self.stored.rows(self.weight, rows), "SCB": self.stored.rows(self.scales, rows)}


@dataclass(frozen=True)
class FourBitMatrix:
    """Two codes a byte, in blocks that run over the rows' ends; each block has a scale, its absmax."""

    stored: StoredTensors
    weight: str
    kind: str
    shape: Shape
    block: int
    dtype: torch.dtype
    """What bitsandbytes dequantizes to."""
    nested_block: int | None
    """Scales that share a scale of their own; None: scales are float32."""
    nested_offset: float

    @property
    def parts(self) -> frozenset[str]:
        nested = [] if self.nested_block is None else [".nested_absmax", ".nested_quant_map"]
        suffixes = [".absmax", ".quant_map", f"{STATE_SUFFIX}{self.kind}", *nested]
        return frozenset(f"{self.weight}{suffix}" for suffix in suffixes)

    @property
    def stored_as(self) -> str:
        if self.block == NF4_BLOCK and not self.shape[1] % self.block:
            return self.kind
        return f"{self.kind} in blocks of {self.block}"

    def dequantized(self, rows: slice) -> Tensor:
        """[n, in] in `dtype`."""
        load_bitsandbytes()
        from bitsandbytes.functional import QuantState, dequantize_4bit

        columns, whole = self.shape[1], bool(self.shape[1] % self.block)
        start, stop, _ = slice(None).indices(self.shape[0]) if whole else rows.indices(self.shape[0])
        blocks = slice(start * columns // self.block, -(-stop * columns // self.block))
        state = QuantState(
            absmax=self._scales()[blocks].contiguous(),
            shape=torch.Size((stop - start, columns)),
            dtype=self.dtype,
            blocksize=self.block,
            quant_type=self.kind,
        )
        values: Tensor = dequantize_4bit(self._codes(slice(start, stop)), state)
        return values[rows] if whole else values

    def encoded(self, rows: slice) -> dict[str, Tensor]:
        """uint8 [n, in/2] and, rounded as bitsandbytes' fast CPU kernels and the scheme nf4 do, bfloat16 [n, in/64]."""
        scales = self._scales().view(self.shape[0], -1)[rows]
        return {"weight": self._codes(rows), "weight.absmax": scales.to(torch.bfloat16)}

    def _codes(self, rows: slice) -> Tensor:
        """uint8 [n, in/2]. They may be stored as another dtype, which then holds several bytes an element."""
        start, stop, _ = rows.indices(self.shape[0])
        bytes_a_row, item_bytes = self.shape[1] // 2, _ITEM_BYTES[self.stored.dtypes[self.weight]]
        first, last = start * bytes_a_row, stop * bytes_a_row
        begin, end = first // item_bytes, -(-last // item_bytes)
        stored_rows = self.stored.shapes[self.weight]
        if math.prod(stored_rows[1:]) == 1:
            read = self.stored.rows(self.weight, slice(begin, end))
        else:
            read = self.stored.rows(self.weight).flatten()[begin:end]
        codes = read.contiguous().flatten().view(torch.uint8)[first - begin * item_bytes :][: last - first]
        return codes.view(stop - start, bytes_a_row)

    def _scales(self) -> Tensor:
        """float32 [blocks]."""
        scales = self.stored.rows(f"{self.weight}.absmax")
        if self.nested_block is None:
            return scales
        load_bitsandbytes()
        from bitsandbytes.functional import QuantState, dequantize_blockwise

        state = QuantState(
            absmax=self.stored.rows(f"{self.weight}.nested_absmax"),
            code=self.stored.rows(f"{self.weight}.nested_quant_map"),
            blocksize=self.nested_block,
            dtype=torch.float32,
        )
        restored: Tensor = dequantize_blockwise(scales, state)
        return restored + torch.tensor(self.nested_offset)


def _eight_bit(checkpoint: str, stored: StoredTensors, weight: str, scales: str) -> EightBitMatrix:
    layout = weight.removesuffix(".weight") + ".weight_format"
    if layout in stored.files and (stored.dtypes[layout] != "U8" or stored.shapes[layout] or stored.rows(layout) != 0):
        raise UnsupportedModelError(
            f"{checkpoint}: the int8 codes of {weight} lie in an order of older versions of bitsandbytes; "
            "save the checkpoint again with a newer one"
        )
    shape = stored.shapes.get(weight, ())
    if len(shape) != 2 or stored.dtypes[weight] != "I8":
        raise DataLossError(f"{checkpoint}: {scales} belongs to no int8 matrix {weight}; the checkpoint is damaged")
    _require_part(checkpoint, stored, scales, "F32", shape[0])
    return EightBitMatrix(stored, weight, scales, shape, frozenset({scales, layout}))


def _four_bit(checkpoint: str, stored: StoredTensors, weight: str, kind: str) -> FourBitMatrix:
    state = _State(checkpoint, weight, _state(checkpoint, stored, f"{weight}{STATE_SUFFIX}{kind}"))
    if kind not in FOUR_BIT_KINDS:
        state.refuse("quant_type", kind)
    state.require("quant_type", lambda value: value == kind)
    state.require("dtype", lambda value: value in DTYPES)
    state.require("blocksize", lambda value: value in BLOCK_SIZES)
    state.require("shape", _is_shape)
    rows, columns = state["shape"]
    nested = "nested_blocksize" in state.fields
    if nested:
        state.require("nested_blocksize", lambda value: value in BLOCK_SIZES)
        state.require("nested_dtype", lambda value: value == "float32")
        state.require("nested_offset", lambda value: isinstance(value, float) and math.isfinite(value))
    matrix = FourBitMatrix(
        stored,
        weight,
        kind,
        (rows, columns),
        state["blocksize"],
        DTYPES[state["dtype"]],
        state["nested_blocksize"] if nested else None,
        state["nested_offset"] if nested else 0.0,
    )
    _check_parts(checkpoint, stored, matrix)
    return matrix


def _check_parts(checkpoint: str, stored: StoredTensors, matrix: FourBitMatrix) -> None:
    """What bitsandbytes' kernels rely on: they read where these sizes lead them."""
    weight, elements = matrix.weight, math.prod(matrix.shape)
    found = stored.shapes.get(weight)
    size = 0 if found is None else math.prod(found) * _ITEM_BYTES.get(stored.dtypes[weight], 0)
    if size * 2 != elements:
        raise DataLossError(
            f"{checkpoint}: {weight} has {size:,} bytes of 4-bit codes, its shape {list(matrix.shape)} asks for "
            f"{elements // 2:,}; the checkpoint is damaged"
        )
    blocks = -(-elements // matrix.block)
    _require_part(checkpoint, stored, f"{weight}.absmax", "F32" if matrix.nested_block is None else "U8", blocks)
    _require_part(checkpoint, stored, f"{weight}.quant_map", "F32", 16)
    if matrix.nested_block is not None:
        _require_part(checkpoint, stored, f"{weight}.nested_absmax", "F32", -(-blocks // matrix.nested_block))
        _require_part(checkpoint, stored, f"{weight}.nested_quant_map", "F32", 256)
    load_bitsandbytes()
    from bitsandbytes.functional import get_4bit_type

    if not torch.equal(stored.rows(f"{weight}.quant_map"), get_4bit_type(matrix.kind, device="cpu")):
        raise UnsupportedModelError(
            f"{checkpoint}: {weight} has a code table of its own (quant_map), other than that of {matrix.kind}; "
            "give the unquantized checkpoint"
        )


def _require_part(checkpoint: str, stored: StoredTensors, name: str, dtype: str, size: int) -> None:
    if name not in stored.files:
        raise DataLossError(f"{checkpoint} has no tensor {name}, which a quantized matrix needs; download it again")
    found = stored.dtypes[name], stored.shapes[name]
    if found != (dtype, (size,)):
        raise DataLossError(
            f"{checkpoint}: {name} is {found[0]} {list(found[1])}, expected {dtype} [{size}]; the checkpoint is damaged"
        )


def _state(checkpoint: str, stored: StoredTensors, name: str) -> Mapping[str, Any]:
    """The JSON object that is stored as a tensor of bytes."""
    value: Any = None
    if stored.dtypes[name] == "U8" and math.prod(stored.shapes[name]) <= MOST_STATE_BYTES:
        try:
            value = json.loads(bytes(stored.rows(name).flatten().tolist()))
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, dict):
        raise DataLossError(f"{checkpoint}: {name} holds no description of a quantized matrix; download it again")
    return value


@dataclass(frozen=True)
class _State:
    """What bitsandbytes says about a matrix."""

    checkpoint: str
    weight: str
    fields: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def require(self, name: str, holds: Any) -> None:
        """Refuses a value that is not understood."""
        value = self.fields.get(name)
        if not isinstance(value, list | str | int | float) or not holds(value):
            self.refuse(name, value)

    def refuse(self, name: str, value: Any) -> None:
        """Raises UnsupportedModelError."""
        raise UnsupportedModelError(
            f"{self.checkpoint}: {self.weight} is quantized by bitsandbytes with {name} {value!r}, which this version "
            "does not know; give the unquantized checkpoint"
        )


def _is_shape(value: Any) -> bool:
    integers = isinstance(value, list) and all(type(size) is int and 0 < size < 2**31 for size in value)
    return integers and len(value) == 2 and value[1] % 2 == 0


_ITEM_BYTES = {"U8": 1, "I8": 1, "BF16": 2, "F16": 2, "F32": 4}
