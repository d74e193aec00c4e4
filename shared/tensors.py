"""Tensors as bytes, and back."""

from __future__ import annotations

import torch
from torch import Tensor


def to_bytes(tensor: Tensor) -> bytes:
    """The elements in row-major order, little-endian."""
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def from_bytes(data: bytes, dtype: torch.dtype) -> Tensor:
    """A one-dimensional tensor with its own memory; the inverse of `to_bytes`."""
    return torch.frombuffer(bytearray(data), dtype=dtype)
