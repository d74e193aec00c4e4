"""The layers of a pack in order, again and again: some resident for good, the others streamed.

On a device other than the CPU there are two rings, one behind the other (`shared.streaming.tiers`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from torch import Tensor

from shared.errors import UnsupportedModelError
from shared.model.layers import LayerWeights
from shared.pack.format import FUSED, bind
from shared.pack.reader import Pack
from shared.quant.packed import settle
from shared.streaming.copies import Copies
from shared.streaming.device_ring import DeviceRing
from shared.streaming.experts import ExpertStream
from shared.streaming.files import DataFile
from shared.streaming.loader import READERS
from shared.streaming.plan import Residency
from shared.streaming.ring import Ring, Slot
from shared.streaming.tiers import device_ring, device_slots, settle_on
from shared.tensors import aligned_buffer, byte_view


class LayerStream:
    """Walks a pack's layers. One walk at a time, from one thread."""

    def __init__(
        self,
        pack: Pack,
        residency: Residency,
        readers: int = READERS,
        *,
        verify_always: bool = False,
        copies: Copies | None = None,
    ) -> None:
        """Loads and verifies what is resident, and starts reading the first streamed layers.

        Args:
            verify_always: compare a streamed layer's digest whenever it is read, not only when it is new or changed.
            copies: what brings layers to the device that computes; None where it is the CPU.

        Raises:
            DataLossError, UnavailableError: a layer cannot be read as it was packed.
            UnsupportedModelError: the model has experts, and they are to be on a device.
        """
        if copies and pack.spec.experts:
            raise UnsupportedModelError(f"experts run on the CPU only, not on {copies.device}; leave --device out")
        self._pack = pack
        self._layers = pack.spec.layers
        self._copies = copies
        self._resident = self._load_all(sorted(residency.resident))
        streamed = [layer for layer in range(self._layers) if layer not in residency.resident]
        kept = self._keep_all(sorted(residency.host))
        on_device = device_slots(pack, residency, copies) if copies else {}
        files = self._open(layer for layer in streamed if layer not in kept)
        slots = [self._slot() for _ in range(residency.slots)]
        self.experts: ExpertStream | None = None
        """Where the layers' experts come from, in a model that has some."""
        with ExitStack() as opened:
            for file in files:
                opened.callback(file.close)
            if pack.spec.experts:
                self.experts = ExpertStream(pack, residency.expert_slots, readers, verify_always=verify_always)
            opened.pop_all()
        self._ring: Ring | DeviceRing | None = Ring(files, slots, readers, verify_always) if files else None
        if copies and streamed:
            self._ring = device_ring(streamed, kept, self._ring, on_device, copies)

    @property
    def streamed_bytes(self) -> int:
        """Bytes of streamed layers and experts that passes have used so far."""
        return (self._ring.bytes_read if self._ring else 0) + (self.experts.bytes_read if self.experts else 0)

    def walk(self) -> Iterator[tuple[int, LayerWeights]]:
        """One pass: every layer in order. A layer's weights are valid until the next one is asked for.

        A walk may be left at any layer; from the moment that another one begins, it must not be continued.

        Raises:
            DataLossError, UnavailableError: a layer cannot be read as it was packed; the next walk tries again.
        """
        if self._ring:
            # Here and not where a walk is left: a walk that ended in an error may be closed much later, by any thread.
            self._ring.rewind()
        for layer in range(self._layers):
            if layer in self._resident:
                yield layer, self._resident[layer]
            elif self._ring:
                slot = self._ring.take()
                yield layer, slot.weights
                self._ring.give_back(slot)

    def close(self) -> None:
        """Stops reading ahead."""
        if self._ring:
            self._ring.close()
        if self.experts:
            self.experts.close()

    def _open(self, layers: Iterator[int]) -> list[DataFile]:
        """Opens the files of those layers: all of them, or none."""
        with ExitStack() as opened:
            files = []
            for layer in layers:
                files.append(self._file(layer))
                opened.callback(files[-1].close)
            opened.pop_all()
        return files

    def _file(self, layer: int) -> DataFile:
        path = self._pack.layer_path(layer)
        return DataFile(path, self._pack.layer_layout, self._pack.layer_digest(layer), f"layer {layer}")

    def _slot(self) -> Slot:
        buffer = self._host_buffer()
        return Slot(buffer, LayerWeights.of(bind(buffer, self._pack.layer_layout), self._pack.scheme))

    def _host_buffer(self) -> Tensor:
        """Memory of the host for a layer as it is stored."""
        size_bytes = self._pack.layer_layout.data_bytes
        return self._copies.host_buffer(size_bytes) if self._copies else aligned_buffer(size_bytes)

    def _load_all(self, layers: Sequence[int]) -> dict[int, LayerWeights]:
        if not layers:
            return {}
        staging = aligned_buffer(self._pack.layer_layout.data_bytes)
        return {layer: self._load(layer, staging) for layer in layers}

    def _load(self, layer: int, staging: Tensor) -> LayerWeights:
        """A layer that stays, in the layout that is multiplied fastest.

        Args:
            staging: memory for a layer as it is stored.
        """
        self._read(layer, staging)
        if self._copies:
            return settle_on(self._pack, self._copies.device, staging)
        stored = bind(staging, self._pack.layer_layout)
        return LayerWeights.of(settle(stored, FUSED, self._pack.scheme), self._pack.scheme)

    def _keep_all(self, layers: Sequence[int]) -> dict[int, Tensor]:
        """Layers that stay in the host's memory as they are stored."""
        kept = {layer: self._host_buffer() for layer in layers}
        for layer, buffer in kept.items():
            self._read(layer, buffer)
        return kept

    def _read(self, layer: int, buffer: Tensor) -> None:
        """Reads and verifies a layer."""
        file, view = self._file(layer), byte_view(buffer)
        try:
            file.read(view, 0)
            file.verify(view)
        finally:
            file.close()
