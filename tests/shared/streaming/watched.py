"""A pack's layer files that tell what is done to them, and fail on demand."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from queue import SimpleQueue

from shared.errors import UnavailableError
from shared.model.layers import LayerWeights
from shared.pack.format import bind
from shared.pack.reader import Pack
from shared.streaming.files import DataFile
from shared.streaming.ring import Slot
from shared.tensors import aligned_buffer

PATIENCE_S = 60
"""How long a test waits for an event that must come."""


@dataclass
class Disk:
    """What the files of a test have in common: who reads what, and what goes wrong."""

    reads: SimpleQueue[int] = field(default_factory=SimpleQueue)
    """The layer of every read, as it begins."""
    verified: SimpleQueue[int] = field(default_factory=SimpleQueue)
    """The layer of every digest that is compared."""
    failed: SimpleQueue[int] = field(default_factory=SimpleQueue)
    """The layer of every read that has failed."""
    broken: set[int] = field(default_factory=set)
    """Layers whose reads end in an input/output error."""
    flipping: set[int] = field(default_factory=set)
    """Layers of which every read brings another bit than the file has, silently."""


class WatchedFile(DataFile):
    """A layer's file on such a disk."""

    def __init__(self, pack: Pack, layer: int, disk: Disk) -> None:
        super().__init__(pack.layer_path(layer), pack.layer_layout, pack.layer_digest(layer), f"layer {layer}")
        self._layer = layer
        self._disk = disk

    def read(self, into: memoryview, offset: int) -> int:
        self._disk.reads.put(self._layer)
        if self._layer in self._disk.broken:
            self._disk.failed.put(self._layer)
            raise UnavailableError(f"{self.label} cannot be read: {os.strerror(errno.EIO)}; check the disk")
        size_bytes = super().read(into, offset)
        if self._layer in self._disk.flipping:
            into[-1] ^= 1
        return size_bytes

    def verify(self, data: memoryview) -> None:
        self._disk.verified.put(self._layer)
        super().verify(data)


def following(events: SimpleQueue[int], count: int) -> list[int]:
    """The next events of a kind, waiting for them to happen."""
    return [events.get(timeout=PATIENCE_S) for _ in range(count)]


def slot_for(pack: Pack) -> Slot:
    """A slot that holds any layer of the pack."""
    buffer = aligned_buffer(pack.layer_layout.data_bytes)
    return Slot(buffer, LayerWeights.of(bind(buffer, pack.layer_layout), pack.scheme))
