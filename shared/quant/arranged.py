"""Stored weights as the products of a device take them.

Packs store nf4 in the order of the CPU's kernel. On any other device the weight is dequantized and multiplied, and
what dequantizes wants codes and scales row after row. So they are put in that order once, in their own memory, each
time that a layer arrives; other schemes are taken as they are stored. Plain tensor operations, the same on every
device: they have run on the CPU only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from shared.quant.kernels import BY_ROWS, SCALES_BY_ROWS, nf4_separate
from shared.quant.schemes import Scheme

ARRANGING_COPIES = 5
"""Bytes that arranging a matrix takes meanwhile ÷ bytes of its codes: `nf4_separate` holds four copies at most."""


def arranged(
    stored: Mapping[str, Tensor], matrices: Collection[str], scheme: Scheme, device: torch.device
) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """The tensors that a device computes with, in the memory of stored ones, and what makes them of what is stored.

    Args:
        stored: by their stored names, on the device.
        matrices: the names that those which are quantized may have, without the suffixes of their components.
    """
    if scheme.name != "nf4" or device.type == "cpu":
        return dict(stored), _nothing
    codes = {name: stored[f"{name}.weight"] for name in matrices if f"{name}.weight" in stored}
    scales = {name: stored[f"{name}.weight.absmax"] for name in codes}
    replaced = {f"{name}.weight{suffix}" for name in codes for suffix in ("", ".absmax")}
    tensors = {name: tensor for name, tensor in stored.items() if name not in replaced}
    rows = {name: tensor.view(tensor.shape[1], tensor.shape[0]) for name, tensor in scales.items()}
    tensors |= {f"{name}.{BY_ROWS}": tensor for name, tensor in codes.items()}
    tensors |= {f"{name}.{SCALES_BY_ROWS}": tensor for name, tensor in rows.items()}

    def arrange() -> None:
        for name, tensor in codes.items():
            tensor.copy_(nf4_separate(tensor))
            rows[name].copy_(scales[name].t().clone())  # the same memory in another order

    return tensors, arrange


def arranging_bytes(scheme: Scheme, largest_bytes: int) -> int:
    """Memory that arranging takes for a moment, on a device.

    Args:
        largest_bytes: of the largest stored matrix, without its scales.
    """
    return ARRANGING_COPIES * largest_bytes if scheme.name == "nf4" else 0


def _nothing() -> None:
    pass
