"""The layers of a pack in order, again and again: some resident for good, the others streamed."""

from __future__ import annotations

from collections.abc import Iterator

from shared.model.layers import LayerWeights
from shared.pack.format import bind
from shared.pack.reader import Pack
from shared.streaming.files import DataFile
from shared.streaming.plan import Residency
from shared.streaming.ring import Ring, Slot
from shared.tensors import aligned_buffer


class LayerStream:
    """Walks a pack's layers. One walk at a time, from one thread."""

    def __init__(self, pack: Pack, residency: Residency, readers: int = 2) -> None:
        """Loads and verifies the resident layers, and starts reading the first streamed ones.

        Raises:
            DataLossError, UnavailableError: a layer cannot be read as it was packed.
        """
        self._pack = pack
        self._layers = pack.spec.layers
        self._resident = {layer: self._load(layer) for layer in sorted(residency.resident)}
        streamed = [layer for layer in range(self._layers) if layer not in residency.resident]
        self._ring = (
            Ring([self._file(layer) for layer in streamed], [self._slot() for _ in range(residency.slots)], readers)
            if streamed
            else None
        )

    @property
    def streamed_bytes(self) -> int:
        """Bytes of streamed layers that passes have used so far."""
        return self._ring.bytes_read if self._ring else 0

    def walk(self) -> Iterator[tuple[int, LayerWeights]]:
        """One pass: every layer in order. A layer's weights are valid until the next one is asked for.

        A walk that is left early (nobody waits for it any more) starts the ring again.

        Raises:
            DataLossError, UnavailableError: a layer cannot be read as it was packed; the next walk retries.
        """
        try:
            for layer in range(self._layers):
                if layer in self._resident:
                    yield layer, self._resident[layer]
                elif self._ring:
                    slot = self._ring.take()
                    yield layer, slot.weights
                    self._ring.give_back(slot)
        except GeneratorExit:
            if self._ring:
                self._ring.rewind()
            raise

    def close(self) -> None:
        """Stops reading ahead."""
        if self._ring:
            self._ring.close()

    def _file(self, layer: int) -> DataFile:
        path = self._pack.layer_path(layer)
        return DataFile(path, self._pack.layer_layout, self._pack.layer_digest(layer), f"layer {layer}")

    def _slot(self) -> Slot:
        buffer = aligned_buffer(self._pack.layer_layout.data_bytes)
        return Slot(buffer, LayerWeights.of(bind(buffer, self._pack.layer_layout), self._pack.scheme))

    def _load(self, layer: int) -> LayerWeights:
        slot, file = self._slot(), self._file(layer)
        try:
            file.read(slot.buffer, 0)
            file.verify(slot.buffer)
        finally:
            file.close()
        return slot.weights
