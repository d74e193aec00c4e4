"""A pack's layer files that tell what is read of them, and fail on demand."""

from __future__ import annotations

from queue import SimpleQueue

from torch import Tensor

from shared.errors import UnavailableError
from shared.model.layers import LayerWeights
from shared.pack.format import bind
from shared.pack.reader import Pack
from shared.streaming.files import DataFile
from shared.streaming.ring import Slot
from shared.tensors import aligned_buffer

PATIENCE_S = 60
"""How long a test waits for an event that must come."""


class WatchedFile(DataFile):
    """Reports the start of every read."""

    def __init__(self, pack: Pack, layer: int, reads: SimpleQueue[int]) -> None:
        super().__init__(pack.layer_path(layer), pack.layer_layout, pack.layer_digest(layer), f"layer {layer}")
        self.broken = False
        self._layer = layer
        self._reads = reads

    def read(self, into: Tensor, offset: int) -> int:
        self._reads.put(self._layer)
        if self.broken:
            raise UnavailableError(f"{self.label} cannot be read: broken by the test")
        return super().read(into, offset)


def slot_for(pack: Pack) -> Slot:
    """A slot that holds any layer of the pack."""
    buffer = aligned_buffer(pack.layer_layout.data_bytes)
    return Slot(buffer, LayerWeights.of(bind(buffer, pack.layer_layout), pack.scheme))
