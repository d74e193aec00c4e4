"""Draws `docs/plots` from `bench/results`: `python docs/plots_from_results.py` (`make plots`); needs matplotlib.

Benchmarks that can draw what they measured do it themselves; those that only print tables are drawn here. Each picture
says in its first lines which files it was made from, with their digests: a test can tell a stale one without drawing.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, PLOTS = ROOT / "bench/results", ROOT / "docs/plots"
MARK = "<!-- made from {name} {digest} -->"
OWN = ("decode", "forecast", "levers", "prefill", "products", "streaming")
"""Benchmarks with a function `draw` (FILE, PICTURE)."""


def main() -> None:
    """Draws every result that can be drawn; tells which ones an older version of a benchmark wrote."""
    os.environ["SOURCE_DATE_EPOCH"] = "0"  # the same picture from the same file
    import matplotlib as mpl

    mpl.rcParams.update({"svg.hashsalt": "headrace", "svg.fonttype": "none"})
    PLOTS.mkdir(exist_ok=True)
    for name, sources in _grouped().items():
        picture = PLOTS / f"{name}.svg"
        try:
            _drawing(name)(sources, picture)
        except (KeyError, TypeError) as error:
            print(
                f"{name}: not in the form that its benchmark writes today ({error!r}); measure again", file=sys.stderr
            )
            continue
        picture.write_text("".join(f"{mark(source)}\n" for source in sources) + _without_declaration(picture))


def mark(source: Path) -> str:
    """What a picture says of a file that it was made from."""
    return MARK.format(name=source.relative_to(ROOT), digest=hashlib.sha256(source.read_bytes()).hexdigest()[:16])


def _without_declaration(picture: Path) -> str:
    """An XML declaration may only stand first, and is not needed."""
    text = picture.read_text(encoding="utf-8")
    return text[text.index("<svg") :]


def _grouped() -> dict[str, list[Path]]:
    """Picture -> the results that are drawn in it; budgets belong together."""
    drawable = (*OWN, *TOGETHER)
    sources = [path for path in sorted(RESULTS.glob("*.json")) if path.stem.partition("-")[0] in drawable]
    return {name: list(group) for name, group in groupby(sources, lambda path: _picture(path.stem))}


def _picture(stem: str) -> str:
    benchmark = stem.partition("-")[0]
    return benchmark if benchmark in TOGETHER else stem


def _drawing(name: str) -> Callable[[Sequence[Path], Path], None]:
    benchmark = name.partition("-")[0]
    if benchmark in TOGETHER:
        return TOGETHER[benchmark]
    import importlib

    draw = importlib.import_module(f"bench.{benchmark}").draw
    return lambda sources, picture: draw(sources[0], picture)


def _draw_budgets(sources: Sequence[Path], picture: Path) -> None:
    from bench.report import plot

    runs = [(source.stem.removeprefix("budget-"), peak) for source in sources for peak in _read(source)["peaks"]]
    with plot(picture, 1, "MiB; the peak of each process inside its budget (bench.budget)") as (axes,):
        names = [f"{name}\n{peak['stage']}" for name, peak in runs]
        for shift, key, label in ((-0.2, "budget_bytes", "budget"), (0.2, "peak_rss_bytes", "peak")):
            axes.bar([at + shift for at in range(len(runs))], [peak[key] / 2**20 for _, peak in runs], 0.4, label=label)
        axes.set_xticks(range(len(runs)), names, fontsize=5)
        axes.set(ylabel="MiB")
        axes.legend()


def _draw_quality(sources: Sequence[Path], picture: Path) -> None:
    from bench.report import plot

    variants = _read(sources[0])[1:]
    names = [variant["name"] for variant in variants]
    with plot(picture, 2, "SmolLM2-135M-Instruct against fp32 (bench.quality)") as (loss, agreement):
        loss.barh(names, [100 * (variant["perplexity_ratio"] - 1) for variant in variants])
        loss.set(xlabel="perplexity above fp32, %")
        agreement.barh(names, [100 * variant["agreement"] for variant in variants])
        agreement.set(xlabel="positions with the same likeliest token, %")
        for axes in (loss, agreement):
            axes.tick_params(axis="y", labelsize=6)
            axes.invert_yaxis()


def _draw_overcommit(sources: Sequence[Path], picture: Path) -> None:
    from bench.report import plot

    results = _read(sources[0])
    panels = list(dict.fromkeys(result["weights"] for result in results))
    with plot(picture, len(panels), "tokens/s ÷ those without over-commit, simulated (bench.overcommit)") as places:
        for axes, weights in zip(places, panels, strict=True):
            shown = [result for result in results if result["weights"] == weights]
            for key in dict.fromkeys((result["shape"], result["lengths"]) for result in shown):
                line = [result for result in shown if (result["shape"], result["lengths"]) == key]
                rates = [result["tokens_per_s"] / line[0]["tokens_per_s"] for result in line]
                axes.plot([result["factor"] for result in line], rates, marker="o", markersize=3, label=", ".join(key))
            axes.set(title=weights, xlabel="over-commit", ylabel="×")
            axes.legend(fontsize=5)


TOGETHER: Mapping[str, Callable[[Sequence[Path], Path], None]] = {
    "budget": _draw_budgets,
    "overcommit": _draw_overcommit,
    "quality": _draw_quality,
}
"""Benchmarks whose results are one picture each, drawn here."""


def _read(source: Path) -> Any:
    return json.loads(source.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
