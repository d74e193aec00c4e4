"""Copying layers to a device beside its arithmetic: the narrow seam between the streaming code and CUDA.

A device does what it is asked to in streams, each in its own order, and an event marks a point in one of them. Copies
go through a stream of their own; what is computed is told to come after a copy, and a copy after what is computed with
the memory that it overwrites. Everything else in this package is the same on every device.

`CudaCopies` has never run: no GPU was there when it was written. `SynchronousCopies` is the reference that the tests
run the whole tiering with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from shared.errors import ConfigurationError
from shared.tensors import aligned_buffer


class Event(Protocol):
    """A point in the work of a device."""

    def wait(self) -> None:
        """Returns when the device has come there."""
        ...


class Copies(Protocol):
    """A device's copy stream, and what ties it to the arithmetic. `host_buffer` is called before any thread copies."""

    @property
    def device(self) -> torch.device:
        """Where copies go."""
        ...

    def host_buffer(self, size_bytes: int) -> Tensor:
        """Page-aligned memory that copies come from: uint8 [size_bytes]."""
        ...

    def copy(self, source: Tensor, target: Tensor, arrange: Callable[[], None], after: Event) -> Event:
        """Begins to copy; another copy that was asked for before is done before. Called by one thread.

        Args:
            source: of `host_buffer`; to be left alone until the event has come.
            target: on the device; uint8, of the same size.
            arrange: what is then done on the device with what came.
            after: what is computed with the target until then.
        """
        ...

    def record(self) -> Event:
        """Marks the end of everything that the calling thread has asked the device to compute."""
        ...

    def order_after(self, event: Event) -> None:
        """What the calling thread asks the device to compute from now on comes after the event."""
        ...

    def close(self) -> None:
        """Gives up what it holds of the host's memory; nothing may be copying."""
        ...


class _Now:
    """What was done at once."""

    def wait(self) -> None:
        pass


class SynchronousCopies:
    """For a device whose work is done when asking for it returns: the CPU."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def host_buffer(self, size_bytes: int) -> Tensor:
        """See `Copies`."""
        return aligned_buffer(size_bytes)

    def copy(self, source: Tensor, target: Tensor, arrange: Callable[[], None], after: Event) -> Event:
        """See `Copies`."""
        after.wait()
        target.copy_(source)
        arrange()
        return _Now()

    def record(self) -> Event:
        """See `Copies`."""
        return _Now()

    def order_after(self, event: Event) -> None:
        """See `Copies`."""
        event.wait()

    def close(self) -> None:
        """See `Copies`."""


class _CudaEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(blocking=True)  # a waiting thread sleeps
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()


class CudaCopies:
    """A CUDA device. Never run: see the module's docstring."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pinned: list[Tensor] = []

    def host_buffer(self, size_bytes: int) -> Tensor:
        """See `Copies`. Pinned.

        Raises:
            ConfigurationError: the memory cannot be pinned.
        """
        # Not torch's own pinned memory, which is rounded up to a power of two.
        buffer = aligned_buffer(size_bytes)
        status = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size_bytes, 0))
        if status:
            raise ConfigurationError(
                f"CUDA cannot pin {size_bytes:,} bytes of host memory (error {status}); raise the limit of locked "
                "memory, or give less --memory"
            )
        self._pinned.append(buffer)
        return buffer

    def copy(self, source: Tensor, target: Tensor, arrange: Callable[[], None], after: Event) -> Event:
        """See `Copies`."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._wait(self._stream, after)
            target.copy_(source, non_blocking=True)
            arrange()
        return _CudaEvent(self._stream)

    def record(self) -> Event:
        """See `Copies`."""
        return _CudaEvent(torch.cuda.current_stream(self.device))

    def order_after(self, event: Event) -> None:
        """See `Copies`."""
        self._wait(torch.cuda.current_stream(self.device), event)

    def close(self) -> None:
        """See `Copies`."""
        for buffer in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
        self._pinned.clear()

    @staticmethod
    def _wait(stream: torch.cuda.Stream, event: Event) -> None:
        if isinstance(event, _CudaEvent):
            stream.wait_event(event.event)
        else:
            event.wait()
