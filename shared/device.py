"""The device that computes: work beside its arithmetic, which is not to wait for it nor hold it up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

CPU = torch.device("cpu")


@contextmanager
def beside_arithmetic(device: torch.device) -> Iterator[None]:
    """What is asked of the device in here does not wait for what was asked for outside, and is done at the end.

    On a CPU this means nothing. On CUDA, which has never been tried, it is a stream of its own.
    """
    if device.type != "cuda":
        yield
        return
    stream = _side_stream(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # once: what is written to must have been made
    return stream
