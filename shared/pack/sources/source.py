"""A checkpoint to pack, whatever it is stored in: its spec, its tokenizer, and its tensors by logical name.

Logical names are those of `shared.pack.format` before fusing: `embedding.weight`, `final_norm.weight`, `output.weight`
(unless tied) and, per layer, `layers.3.attention.q.weight`, `layers.3.mlp_norm.weight` …
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from shared.errors import DataLossError, UnsupportedModelError
from shared.model.spec import ModelSpec
from shared.pack.format import expert_prefixes, has_bias, matrix_shapes, mlp_shapes, norm_shapes, router_shapes
from shared.parallel import in_parallel
from shared.quant.schemes import SCHEMES, Scheme

Shape = tuple[int, ...]

PIECE_BYTES = 4 << 20
"""About how much of a float32 matrix one core works on at a time."""
PIECE_ROWS = 32
"""Pieces have a multiple of so many rows, as nf4 groups them."""
LARGEST_VALUE = torch.finfo(torch.bfloat16).max
"""No model has larger values, and most schemes would make them infinite."""
FLOATING_SCHEMES = ("bf16", "fp32")
"""Schemes that hold any matrix without quantizing it."""


@dataclass(frozen=True)
class Source:
    """One checkpoint, opened and understood; weights are read when asked for."""

    name: str
    """For people: a file or folder name, never a full path."""
    fingerprint: str
    """Changes when a file of the checkpoint does; an interrupted packing resumes only on the same one."""
    spec: ModelSpec
    tokenizer_json: str
    """As the `tokenizers` library reads it."""
    chat_template: str | None
    end_token_ids: tuple[int, ...]
    special_tokens: Mapping[str, str]
    """bos_token, eos_token … as the chat template names them."""
    read_rows: Callable[[str, slice], Tensor]
    """(logical name, rows) -> the rows in any floating dtype, with rotary halves side by side, not interleaved."""
    stored_as: Mapping[str, str] = field(default_factory=dict)
    """Logical name of a matrix that is quantized in a scheme's own format -> the scheme, or what else its codes are."""
    read_encoded: Callable[[str], Mapping[str, Tensor]] | None = None
    """Logical name of such a matrix -> its values as that scheme encodes them; None where there is none."""

    def require_scheme(self, scheme: Scheme) -> None:
        """Refuses to quantize a second time what is quantized already.

        Raises:
            UnsupportedModelError: a layer's matrix holds other codes than those of the scheme, which is none of floats.
        """
        for name, stored_as in self.stored_as.items():
            if name.startswith("layers.") and scheme.name not in (stored_as, *FLOATING_SCHEMES):
                fitting = [*([stored_as] if stored_as in SCHEMES else []), *FLOATING_SCHEMES]
                raise UnsupportedModelError(
                    f"{self.name}: {name} is quantized in {stored_as}; {scheme.name} would quantize it a second time. "
                    f"Pack it in {' or '.join(fitting)}, or give the unquantized checkpoint"
                )

    def encoded(self, layer: int, matrix: str, scheme: Scheme) -> Mapping[str, Tensor]:
        """A layer's matrix, `attention.q` for one, as the scheme encodes it; its own codes are taken as they are.

        Raises:
            DataLossError: it holds values, or scales, that are not finite.
        """
        name = layer_tensor_name(layer, f"{matrix}.weight")
        if self.read_encoded is None or self.stored_as.get(name) != scheme.name:
            return self._encoded_in_pieces(name, self._layer_shapes[f"{matrix}.weight"], scheme)
        components = self.read_encoded(name)
        if not all(bool(torch.isfinite(tensor).all()) for tensor in components.values()):
            raise DataLossError(f"{self.name}: {name} has scales that are not finite; the checkpoint is damaged")
        return components

    def tensor(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Reads a tensor, or some of its rows, as float32.

        Raises:
            DataLossError: it holds values that are not finite, or would not be once they are rounded to bfloat16.
        """
        values = self.read_rows(name, rows).to(torch.float32)
        # Not torch.isfinite, which makes several copies; and the extremes are NaN where any value is.
        if values.numel() and not all(abs(float(extreme)) <= LARGEST_VALUE for extreme in values.aminmax()):
            raise DataLossError(
                f"{self.name}: {name} holds values that are not finite in bfloat16; the checkpoint is damaged"
            )
        return values

    @cached_property
    def _layer_shapes(self) -> dict[str, Shape]:
        return layer_shapes(self.spec)

    def _encoded_in_pieces(self, name: str, shape: Shape, scheme: Scheme) -> dict[str, Tensor]:
        """Encodes some rows at a time, on all cores. That makes no difference: schemes encode each row by itself."""
        step = max(1, PIECE_BYTES // (shape[1] * torch.float32.itemsize * PIECE_ROWS)) * PIECE_ROWS
        parts = [slice(begin, begin + step) for begin in range(0, shape[0], step)]
        pieces = in_parallel(lambda rows: scheme.encode(self.tensor(name, rows)), parts)
        return {suffix: torch.cat([piece[suffix] for piece in pieces]) for suffix in pieces[0]}

    def layer_tensor(self, layer: int, name: str) -> Tensor:
        """Reads a layer's tensor, `attention.q.weight` for one, as float32."""
        return self.tensor(layer_tensor_name(layer, name))


def layer_tensor_name(layer: int, name: str) -> str:
    """The logical name of a layer's tensor."""
    return f"layers.{layer}.{name}"


def logical_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Every tensor that a checkpoint of this spec has, in logical order, with its shape."""
    shapes: dict[str, Shape] = {"embedding.weight": (spec.vocab_size, spec.hidden_size)}
    for layer in range(spec.layers):
        for name, shape in layer_shapes(spec).items():
            shapes[layer_tensor_name(layer, name)] = shape
    shapes["final_norm.weight"] = (spec.hidden_size,)
    if not spec.tied_embeddings:
        shapes["output.weight"] = (spec.vocab_size, spec.hidden_size)
    return shapes


def layer_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """The tensors of one layer, in logical order, with their shapes."""
    plain: dict[str, Shape] = {**norm_shapes(spec), **router_shapes(spec)}
    shapes = {f"{name}.weight": shape for name, shape in plain.items()}
    for matrix, (rows, columns) in matrix_shapes(spec).items():
        shapes[f"{matrix}.weight"] = (rows, columns)
        if has_bias(spec, matrix):
            shapes[f"{matrix}.bias"] = (rows,)
    for expert in expert_prefixes(spec):
        shapes |= {f"{expert}.{matrix}.weight": shape for matrix, shape in mlp_shapes(spec).items()}
    return shapes


@dataclass(frozen=True)
class StoredRows:
    """Where a logical tensor lies in a checkpoint: rows of a stored tensor."""

    tensor: str
    first: int
    shape: Shape
    stacked: int | None = None
    """Which of the matrices that the stored tensor, [matrices, rows, columns], holds; None: it is a matrix itself."""

    def select(self, rows: slice) -> slice:
        """Rows of the logical tensor, as rows of the stored one."""
        start, stop, _ = rows.indices(self.shape[0])
        return slice(self.first + start, self.first + stop)


def stored_rows(
    spec: ModelSpec, stored_name: Callable[[str], str], stacked: Callable[[str], int | None] = lambda _: None
) -> dict[str, StoredRows]:
    """Each logical tensor's place; those of one stored matrix lie rows after rows, in logical order.

    Args:
        stacked: which of several matrices in a stored tensor a logical tensor is part of, where there are several.
    """
    places: dict[str, StoredRows] = {}
    used: dict[tuple[str, int | None], int] = {}
    for name, shape in logical_shapes(spec).items():
        tensor, number = stored_name(name), stacked(name)
        first = used.get((tensor, number), 0)
        places[name] = StoredRows(tensor, first, shape, number)
        used[tensor, number] = first + shape[0]
    return places


def check_tensors(
    checkpoint: str,
    places: Mapping[str, StoredRows],
    found: Mapping[str, Shape],
    ignorable: Callable[[str], bool],
) -> None:
    """Compares the tensors that a checkpoint has with those that its spec asks for, before anything is written.

    Args:
        checkpoint: its name, for messages.
        places: logical name -> where it lies (`stored_rows`).
        found: shapes by name in the checkpoint.
        ignorable: whether a tensor without a logical name changes nothing.

    Raises:
        UnsupportedModelError: one is missing, has another shape, or has a meaning that this version does not know.
    """
    expected = {}
    for place in places.values():  # the last place in a tensor tells its size
        matrices = () if place.stacked is None else (place.stacked + 1,)
        expected[place.tensor] = (*matrices, place.first + place.shape[0], *place.shape[1:])
    for name, shape in expected.items():
        if name not in found:
            raise UnsupportedModelError(f"{checkpoint} has no tensor {name}; the checkpoint is incomplete")
        if found[name] != shape:
            raise UnsupportedModelError(
                f"{checkpoint}: tensor {name} has shape {list(found[name])}, but its description asks for {list(shape)}"
            )
    if unknown := sorted(name for name in found.keys() - expected.keys() if not ignorable(name)):
        raise UnsupportedModelError(
            f"{checkpoint} has tensors that this version does not know: {', '.join(unknown[:5])}"
            f"{' …' if len(unknown) > 5 else ''}; without them its output would be wrong"
        )


def fingerprint_of(files: Iterable[Path]) -> str:
    """A digest over the names, sizes and modification times of a checkpoint's files."""
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(files)]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()
