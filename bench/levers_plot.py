"""The plot of `bench.levers`: how much cheaper each row is than the naive one."""

from __future__ import annotations

from pathlib import Path

from bench.report import plot, read_json


def draw(source: Path, picture: Path) -> None:
    """Draws what a run wrote: a panel for each setting and workload."""
    content = read_json(source)
    results = content["results"]
    panels = list(dict.fromkeys((result["setting"], result["budget"], result["shape"]) for result in results))
    with plot(picture, len(panels), f"{content['pack']}; cost is time on the machine × its price") as axes:
        for place, (setting, budget, shape) in zip(axes, panels, strict=True):
            shown = [result for result in results if (result["setting"], result["shape"]) == (setting, shape)]
            seconds = [result["wall_s"] / result["reports"] for result in shown]
            naive = [s for s, result in zip(seconds, shown, strict=True) if result["case"].startswith("naive")]
            cheaper = [sum(naive) / len(naive) / s for s in seconds]
            bars = place.barh([f"{result['case']} ({result['scheme']})" for result in shown], cheaper)
            place.bar_label(bars, [f"{times:.1f}" for times in cheaper], fontsize=7, padding=2)
            place.set(xlabel="times cheaper than naive", title=f"{setting} ({budget}), {shape} tokens")
            place.tick_params(axis="y", labelsize=7)
            place.invert_yaxis()
