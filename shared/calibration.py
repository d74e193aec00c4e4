"""How fast this machine is for a pack: measured once in a few seconds, and remembered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shared.machine import cached, machine_key
from shared.pack.reader import Pack
from shared.speed import disk_bytes_per_s, layer_seconds, memory_bytes_per_s, output_seconds
from shared.speed_attention import rest_seconds
from shared.speed_handoff import handoff_token_s


@dataclass(frozen=True)
class Calibration:
    """What a pack's parts take on this machine."""

    disk_bytes_per_s: float
    """Layer files read past the page cache, as the ring reads them."""
    memory_bytes_per_s: float
    """Reading memory with all compute threads."""
    streamed_layer_s: Mapping[int, float]
    """Rows -> seconds for one layer's matrix products, as it is stored, weights from memory."""
    resident_layer_s: Mapping[int, float]
    """The same for a layer that stays, in the layout it gets then."""
    output_s: Mapping[int, float]
    """Rows -> seconds for the output matrix and the choice of tokens."""
    decode_rest_s: Mapping[int, float]
    """Rows -> seconds for what one layer does besides products, for sequences with little context."""
    context_token_s: float
    """And for attention to each token of their contexts."""
    prompt_rest_s: Mapping[int, float]
    """Tokens of a prompt -> seconds for what one layer does with it besides products."""
    begin_s: Mapping[int, float]
    """Sequences -> seconds to lay out a decode pass over them."""
    handed_token_s: float
    """Of all cores, for a prompt token's keys and values on their way from stage to stage: either stage's share."""

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> Calibration:
        """The inverse of `dataclasses.asdict` and JSON, which makes rows into text."""
        read: dict[str, Any] = {
            name: {int(rows): float(s) for rows, s in found.items()} if isinstance(found, Mapping) else float(found)
            for name, found in value.items()
        }
        return cls(**read)


def calibrated(pack: Pack, threads: int, *, again: bool = False) -> Calibration:
    """The calibration for a pack, measured if the cache has none.

    Args:
        threads: compute threads that the service will have.
        again: measure even if the cache has one, and replace it.

    Raises:
        DataLossError, UnavailableError: a layer cannot be read.
    """
    key = {
        "scheme": pack.scheme.name,
        "products": pack.scheme.product_name,
        "spec": pack.spec.to_json(),
        "device": pack.path.stat().st_dev,
        "threads": threads,
        "machine": machine_key(),
    }
    return Calibration.of_json(cached("calibration", key, lambda: asdict(_measure(pack, threads)), again=again))


def _measure(pack: Pack, threads: int) -> Calibration:
    products, rest = layer_seconds(pack), rest_seconds(pack)
    return Calibration(
        disk_bytes_per_s=disk_bytes_per_s(pack),
        memory_bytes_per_s=memory_bytes_per_s(),
        streamed_layer_s=products.streamed,
        resident_layer_s=products.resident,
        output_s=output_seconds(pack),
        decode_rest_s=rest.decode,
        context_token_s=rest.context_token,
        prompt_rest_s=rest.prompt,
        begin_s=rest.beginning,
        handed_token_s=handoff_token_s(pack) / threads,
    )
