"""What a prefill and a decode process need of the host and of a device, from what they need where there is none."""

from __future__ import annotations

from dataclasses import replace

from shared.demand import (
    HISTORY_BYTES_PER_TOKEN,
    PREFIX_ENTRY_BYTES,
    SORTING_VECTORS,
    DecodeSettings,
    PrefillSettings,
    decode_demand,
    prefill_demand,
    sampling_bytes,
)
from shared.draft_pack import DraftPack
from shared.errors import UnsupportedModelError
from shared.kv.handoff import FRAME_BYTES
from shared.kv.paged import BLOCK_TOKENS
from shared.limits import SCORED_ROWS
from shared.model.workspace import WIDE
from shared.pack.format import FUSED
from shared.pack.reader import Pack
from shared.quant.arranged import arranging_bytes
from shared.streaming.device_plan import TieredDemand
from shared.streaming.plan import Demand

FRAMES_IN_HAND = 4
"""Copies of a handoff's frame on the host while it is taken from the device, or brought there."""


def prefill_tiers(pack: Pack, settings: PrefillSettings, runtime_bytes: int, device_runtime_bytes: int) -> TieredDemand:
    """What a prefill process needs; see `shared.demand.prefill_demand`.

    Args:
        runtime_bytes: what the process takes of the host without any weights.
        device_runtime_bytes: the same of the device.

    Raises:
        ConfigurationError: as there; UnsupportedModelError: the model cannot be on a device.
    """
    alone = prefill_demand(pack, settings, runtime_bytes)
    logits_bytes = (SCORED_ROWS + SORTING_VECTORS) * pack.spec.vocab_size * WIDE
    return _divided(pack, alone, device_runtime_bytes, logits_bytes, 0, PREFIX_ENTRY_BYTES, _loading_bytes(pack))


def decode_tiers(
    pack: Pack, draft: DraftPack | None, settings: DecodeSettings, runtime_bytes: int, device_runtime_bytes: int
) -> TieredDemand:
    """What a decode process needs; see `shared.demand.decode_demand`.

    Args:
        draft: the pack of a draft that is a model; it stays on the device.
        runtime_bytes: what the process takes of the host without any weights.
        device_runtime_bytes: the same of the device.

    Raises:
        UnsupportedModelError: the model, or the draft's, cannot be on a device.
    """
    alone = decode_demand(pack, draft, settings, runtime_bytes)
    choosing_bytes = sampling_bytes(pack.spec)
    logits_bytes = settings.scored_rows * pack.spec.vocab_size * WIDE
    history_bytes = BLOCK_TOKENS * HISTORY_BYTES_PER_TOKEN
    loading_bytes = max(_loading_bytes(each) for each in (pack, *([draft.pack] if draft else [])))
    return _divided(
        pack, alone, device_runtime_bytes, logits_bytes + choosing_bytes, choosing_bytes, history_bytes, loading_bytes
    )


def _divided(
    pack: Pack,
    alone: Demand,
    device_runtime_bytes: int,
    working_bytes: int,
    moved_bytes: int,
    block_bytes: int,
    loading_bytes: int,
) -> TieredDemand:
    """Divides the demand of a process without a device.

    Args:
        working_bytes: what passes take on the host, besides frames.
        moved_bytes: the part of `alone`'s workspace that is never on the device.
        block_bytes: the part of a KV block that is on the host.
        loading_bytes: what loading takes on the host, before anything else needs it.
    """
    device = replace(
        alone,
        runtime_bytes=device_runtime_bytes,
        workspace_bytes=alone.workspace_bytes - moved_bytes + arranging_bytes(pack.scheme, _largest_matrix_bytes(pack)),
        transfer_bytes=0,
        kv_block_bytes=alone.kv_block_bytes - block_bytes,
        budget_name="device memory budget",
    )
    host = Demand(
        runtime_bytes=alone.runtime_bytes,
        outer_bytes=0,
        workspace_bytes=max(working_bytes + FRAMES_IN_HAND * FRAME_BYTES, loading_bytes),
        transfer_bytes=alone.transfer_bytes,
        layers=alone.layers,
        layer_bytes=alone.layer_bytes,
        kv_block_bytes=block_bytes,
        kv_name="what goes with KV blocks",
    )
    return TieredDemand(host=host, device=device)


def _loading_bytes(pack: Pack) -> int:
    """What loading a pack takes on the host at one time: its outer weights, or a layer, on their way to the device."""
    if pack.spec.experts:
        raise UnsupportedModelError(f"{pack.path.name} has experts, which run on the CPU only; leave --device out")
    return max(pack.outer_bytes, pack.layer_layout.data_bytes)


def _largest_matrix_bytes(pack: Pack) -> int:
    entries = pack.layer_layout.entries
    return max(entry.size_bytes for entry in entries if entry.name.removesuffix(".weight") in FUSED)
