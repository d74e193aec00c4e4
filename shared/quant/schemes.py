"""The storage schemes of weight matrices: fp32, bf16, int8 and nf4.

A scheme fixes the mathematics: what is stored, the dtype of scales, the precision of activations. The formats are those
of bitsandbytes (`SCB` and `weight` for int8, `weight` and `weight.absmax` for 4 bit), so packs are exchangeable.

| scheme | stored for a matrix of `out` rows and `in` columns          | activations                           |
|--------|--------------------------------------------------------------|---------------------------------------|
| fp32   | `weight` float32 [out, in]                                    | float32                               |
| bf16   | `weight` bfloat16 [out, in]                                   | bfloat16                              |
| int8   | `weight` int8 [out, in], `SCB` float32 [out] (row maxima)     | bfloat16, 16 bits per row in products |
| nf4    | `weight` uint8 [out, in/2], `weight.absmax` bf16 [in/64, out] | bfloat16                              |

nf4 lies as bitsandbytes' CPU kernel wants it: 32 rows interleaved, scales transposed (`kernels.nf4_interleave`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from shared.errors import ConfigurationError, UnsupportedModelError
from shared.quant import kernels, products
from shared.quant.candidates import CANDIDATES, ROWS, Rows, ranked
from shared.quant.kernels import NF4_BLOCK
from shared.quant.nf4_codes import nf4_codes

TensorShape = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class Scheme:
    """One way to store weight matrices, and to multiply by them."""

    name: str
    compute_dtype: torch.dtype
    """Dtype of activations, norms, biases, outer weights and KV."""
    components: Callable[[int, int], dict[str, TensorShape]]
    """(rows, columns) -> component suffix -> dtype and shape as stored."""
    encode: Callable[[Tensor], dict[str, Tensor]]
    """A float32 matrix [out, in] -> its encoded values, one leading entry per row; the model digest is over these."""
    fuse: Callable[[Sequence[Mapping[str, Tensor]]], dict[str, Tensor]]
    """Encoded matrices that read the same input -> the components of one stored matrix, rows after rows."""
    product: Callable[..., Tensor]
    """(x [rows, in] in `compute_dtype`, components) -> x @ weight.T, [rows, out] in `compute_dtype`."""
    dense: bool = False
    """Weights are not quantized."""
    rows: Rows = ROWS
    """Numbers of rows that products are likely to have: what they are chosen by (`shared.quant.candidates`)."""

    def for_rows(self, rows: Rows) -> Scheme:
        """The same scheme with the products that are the fastest here for other numbers of rows."""
        return replace(self, product=partial(SCHEMES[self.name].product, rows=rows), rows=rows)

    @property
    def product_name(self) -> str:
        """Of the candidate that multiplies on this CPU; measured where that is not known yet. Empty where it is one."""
        return ranked(self.name, self.rows)[0].name if self.name in CANDIDATES else ""


def _dense_components(dtype: torch.dtype) -> Callable[[int, int], dict[str, TensorShape]]:
    return lambda rows, columns: {"weight": (dtype, (rows, columns))}


def _dense_encode(dtype: torch.dtype) -> Callable[[Tensor], dict[str, Tensor]]:
    return lambda weight: {"weight": weight.to(dtype).contiguous()}


def _stack_rows(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {suffix: torch.cat([part[suffix] for part in parts]) for suffix in parts[0]}


def _int8_components(rows: int, columns: int) -> dict[str, TensorShape]:
    return {"weight": (torch.int8, (rows, columns)), "SCB": (torch.float32, (rows,))}


def _int8_encode(weight: Tensor) -> dict[str, Tensor]:
    """Row-wise absolute-maximum quantization (LLM.int8(), arXiv 2208.07339, without outlier columns)."""
    row_max = weight.abs().amax(dim=1).float()
    codes = (weight.float() * (127.0 / row_max.clamp(min=kernels.SMALLEST_MAXIMUM))[:, None]).round()
    return {"weight": codes.to(torch.int8), "SCB": row_max}


def _nf4_components(rows: int, columns: int) -> dict[str, TensorShape]:
    if columns % NF4_BLOCK:
        raise UnsupportedModelError(
            f"nf4 needs matrices with a multiple of {NF4_BLOCK} columns, found {columns}; use int8 or bf16"
        )
    if rows % kernels.NF4_ROW_GROUP:
        raise UnsupportedModelError(
            f"nf4 needs matrices with a multiple of {kernels.NF4_ROW_GROUP} rows, found {rows}; use int8 or bf16"
        )
    return {
        "weight": (torch.uint8, (rows, columns // 2)),
        "weight.absmax": (torch.bfloat16, (columns // NF4_BLOCK, rows)),
    }


def _nf4_encode(weight: Tensor) -> dict[str, Tensor]:
    """NormalFloat4 in blocks of 64 (QLoRA, arXiv 2305.14314), scales rounded to bfloat16 as kernels use them."""
    rows, columns = weight.shape
    _nf4_components(rows, columns)
    codes, maxima = nf4_codes(weight.float().contiguous(), NF4_BLOCK)
    return {
        "weight": codes.view(rows, columns // 2),
        "weight.absmax": maxima.view(rows, columns // NF4_BLOCK).to(torch.bfloat16),
    }


def _nf4_fuse(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    rows = _stack_rows(parts)
    return {
        "weight": kernels.nf4_interleave(rows["weight"]),
        "weight.absmax": rows["weight.absmax"].t().contiguous(),
    }


SCHEMES: Mapping[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme(
            "fp32",
            torch.float32,
            _dense_components(torch.float32),
            _dense_encode(torch.float32),
            _stack_rows,
            products.dense,
            dense=True,
        ),
        Scheme(
            "bf16",
            torch.bfloat16,
            _dense_components(torch.bfloat16),
            _dense_encode(torch.bfloat16),
            _stack_rows,
            products.dense,
            dense=True,
        ),
        Scheme("int8", torch.bfloat16, _int8_components, _int8_encode, _stack_rows, products.int8),
        Scheme("nf4", torch.bfloat16, _nf4_components, _nf4_encode, _nf4_fuse, products.nf4),
    )
}


def scheme_named(name: str) -> Scheme:
    """The scheme of that name.

    Raises:
        ConfigurationError: there is none; the message lists those that exist.
    """
    try:
        return SCHEMES[name]
    except KeyError:
        raise ConfigurationError(f"unknown scheme {name!r}; choose one of {', '.join(SCHEMES)}") from None
