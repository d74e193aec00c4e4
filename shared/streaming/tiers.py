"""The memory of a device's tiers.

A layer stays on the device, stays in host memory, or is read from disk for each pass. Those that do not stay on the
device go through the same slots there (`shared.streaming.device_ring`), in the same order as ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shared.model.layers import LayerWeights
from shared.pack.format import FUSED, bind
from shared.pack.reader import Pack
from shared.quant.arranged import arranged
from shared.streaming.copies import Copies
from shared.streaming.device_ring import Arrange, DeviceRing
from shared.streaming.plan import Residency
from shared.streaming.ring import Ring, Slot


def device_slot(pack: Pack, device: torch.device) -> tuple[Slot, Arrange]:
    """Memory for a layer on a device, and what is to be done there with the bytes that were copied into it."""
    buffer = torch.zeros(pack.layer_layout.data_bytes, dtype=torch.uint8, device=device)
    tensors, arrange = arranged(bind(buffer, pack.layer_layout), FUSED, pack.scheme, device)
    return Slot(buffer, LayerWeights.of(tensors, pack.scheme)), arrange


def settle_on(pack: Pack, device: torch.device, stored: Tensor) -> LayerWeights:
    """A layer that stays on a device.

    Args:
        stored: its bytes in host memory.
    """
    slot, arrange = device_slot(pack, device)
    slot.buffer.copy_(stored)
    arrange()
    return slot.weights


def device_slots(pack: Pack, residency: Residency, copies: Copies) -> dict[Slot, Arrange]:
    """The slots of a device's ring."""
    return dict(device_slot(pack, copies.device) for _ in range(residency.device_slots))


def device_ring(
    layers: Sequence[int], kept: Mapping[int, Tensor], host: Ring | None, slots: Mapping[Slot, Arrange], copies: Copies
) -> DeviceRing:
    """The ring through which layers come to a device.

    Args:
        layers: those that do not stay there, ascending.
        kept: layer -> its bytes, of those that stay in host memory; the others come from `host`.
    """
    places = {layers.index(layer): stored for layer, stored in kept.items()}
    return DeviceRing(host, places, len(layers), slots, copies)
