"""Memory for tensors; tensors as bytes, and back."""

from __future__ import annotations

import mmap
from collections.abc import Mapping

import torch
from torch import Tensor


def aligned_buffer(size_bytes: int) -> Tensor:
    """Page-aligned memory, uint8 [size_bytes], as O_DIRECT needs it. Its pages count once they are touched."""
    return torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)


def byte_view(tensor: Tensor) -> memoryview:
    """The memory of a uint8 tensor, for reading into and hashing."""
    return memoryview(tensor.numpy().data)


def on_device(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Tensors on a device: those themselves that are there."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def to_bytes(tensor: Tensor) -> bytes:
    """The elements in row-major order, little-endian, from any device."""
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def from_bytes(data: bytes, dtype: torch.dtype) -> Tensor:
    """A one-dimensional tensor with its own memory; the inverse of `to_bytes`."""
    return torch.frombuffer(bytearray(data), dtype=dtype)
