"""The picture of `bench.streaming`: one panel a pack, time over rows: reading, arithmetic, and the streamed pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.machine import Machine
from bench.report import plot, read_json


def draw(source: Path, out: Path) -> None:
    """Draws the JSON file `source` into the picture `out`."""
    content = read_json(source)
    results: list[dict[str, Any]] = content["results"]
    packs = list(dict.fromkeys(result["pack"] for result in results))
    with plot(out, len(packs), str(Machine(**content["machine"]))) as panels:
        for axes, pack in zip(panels, packs, strict=True):
            _panel(axes, [result for result in results if result["pack"] == pack])
            axes.set_title(pack)


def _panel(axes: Any, results: list[dict[str, Any]]) -> None:
    shares = list(dict.fromkeys(result["resident_percent"] for result in results))
    for color, percent in enumerate(shares):
        cases = sorted((r for r in results if r["resident_percent"] == percent), key=lambda result: result["rows"])
        rows = [case["rows"] for case in cases]
        axes.plot(rows, [case["pass_s"] for case in cases], f"C{color}o-", label=f"pass, {percent} % resident")
        axes.plot(rows, [case["read_s"] for case in cases], f"C{color}:", label=f"reading alone, {percent} %")
    cases = sorted((r for r in results if r["resident_percent"] == shares[0]), key=lambda result: result["rows"])
    axes.plot([case["rows"] for case in cases], [case["compute_s"] for case in cases], "k--", label="arithmetic alone")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("rows in the pass")
    axes.set_ylabel("seconds")
    axes.legend(fontsize=6)
