"""Memory for tensors; tensors as bytes, and back."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Mapping

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
"""Bytes, as of x86 and most of ARM."""


def aligned_buffer(size_bytes: int, *, lazily: bool = False) -> Tensor:
    """Page-aligned memory, uint8 [size_bytes], as O_DIRECT needs it.

    In huge pages where the system has them: a read into small ones, scattered over the machine's memory, is cut into
    many requests (`docs/streaming.md` has the measurement).

    Args:
        lazily: small pages, each of which counts only once it is touched.
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    huge_bytes = size_bytes // HUGE_PAGE * HUGE_PAGE  # the rest in small ones: nothing beyond the end is to count
    if lazily or not huge_bytes or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.frombuffer(mmap.mmap(-1, size_bytes, flags=private), dtype=torch.uint8)
    memory = mmap.mmap(-1, size_bytes + HUGE_PAGE, flags=private)
    data = torch.frombuffer(memory, dtype=torch.uint8)
    start = -data.data_ptr() % HUGE_PAGE
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE, start, huge_bytes)
    return data[start : start + size_bytes]


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
