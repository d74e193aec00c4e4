"""How fast this machine is for a pack: measured once in a few seconds, and remembered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shared.machine import cached, machine_key
from shared.pack.reader import Pack
from shared.speed import disk_bytes_per_s, layer_seconds, memory_bytes_per_s, output_seconds


@dataclass(frozen=True)
class Calibration:
    """What a pack's parts take on this machine."""

    disk_bytes_per_s: float
    """Layer files read past the page cache, as the ring reads them."""
    memory_bytes_per_s: float
    """Reading memory with all compute threads."""
    layer_s: Mapping[int, float]
    """Rows -> seconds for one layer's matrix products, weights from memory."""
    output_s: Mapping[int, float]
    """Rows -> seconds for the output matrix."""

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> Calibration:
        """The inverse of `dataclasses.asdict` and JSON, which makes rows into text."""
        tables = {name: {int(rows): float(s) for rows, s in value[name].items()} for name in ("layer_s", "output_s")}
        return cls(float(value["disk_bytes_per_s"]), float(value["memory_bytes_per_s"]), **tables)


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
        "spec": pack.spec.to_json(),
        "device": pack.path.stat().st_dev,
        "threads": threads,
        "machine": machine_key(),
    }
    return Calibration.of_json(cached("calibration", key, lambda: asdict(_measure(pack)), again=again))


def _measure(pack: Pack) -> Calibration:
    return Calibration(disk_bytes_per_s(pack), memory_bytes_per_s(), layer_seconds(pack), output_seconds(pack))
