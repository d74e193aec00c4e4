"""Which experts to keep: the share of uses that a cache finds in memory, by policy, in a simulation without a disk.

    python -m bench.expert_cache [--json FILE]

Each pass goes through all layers; each of its tokens uses a few experts of each, drawn by popularity (1 / rank^skew,
ranks shuffled for each layer). Every `--drift` passes, popularity is drawn anew. `usage` is what the services do, by
its half-life in passes; `lru` evicts the least recently used; `best fixed` keeps those that will be used most, known
beforehand.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench.machine import this_machine
from bench.report import show_table, write_json
from shared.streaming import expert_usage
from shared.streaming.expert_usage import ExpertUsage

Use = tuple[int, list[int]]
"""A layer, and the experts of it that a pass uses."""


@dataclass(frozen=True)
class Result:
    """One kind of traffic."""

    tokens: int
    """In a pass."""
    skew: float
    kept: float
    """Share of experts that fit."""
    found: dict[str, float]
    """Policy -> share of uses that were in memory."""


def main() -> None:
    """Simulates what the command line asks for, and reports it."""
    arguments = _arguments()
    results = [
        simulate(arguments, tokens, skew, kept)
        for tokens in (1, 8, 32)
        for skew in (0.0, 0.7)
        for kept in arguments.kept
    ]
    machine = this_machine()
    policies = list(results[0].found)
    columns = ("tokens", "skew", "kept", *policies)
    rows = [
        (str(result.tokens), f"{result.skew:g}", f"{result.kept:.0%}", *(f"{result.found[p]:.0%}" for p in policies))
        for result in results
    ]
    show_table("uses found in memory", columns, rows, machine)
    if arguments.json:
        write_json(arguments.json, machine, results=[asdict(result) for result in results])


def simulate(arguments: argparse.Namespace, tokens: int, skew: float, kept: float) -> Result:
    """All policies over the same passes."""
    layers, experts = arguments.layers, arguments.experts
    capacity = int(layers * experts * kept)
    found: dict[str, float] = {}
    for half_life in (8, expert_usage.HALF_LIFE_PASSES, 512):
        usage = UsageCache(layers, experts, capacity, half_life)
        found[f"usage, {half_life}"] = found_share(_traffic(arguments, tokens, skew), usage.use)
    found["lru"] = found_share(_traffic(arguments, tokens, skew), LruCache(experts, capacity).use)
    found["best fixed"] = _best_fixed(arguments, tokens, skew, capacity)
    return Result(tokens, skew, kept, found)


def found_share(traffic: Iterable[Use], use: Callable[[int, list[int]], int]) -> float:
    """The share of uses that a cache finds."""
    uses = hits = 0
    for layer, needed in traffic:
        uses += len(needed)
        hits += use(layer, needed)
    return hits / uses


class UsageCache:
    """What the services do."""

    def __init__(self, layers: int, experts: int, capacity: int, half_life: int) -> None:
        self._usage = ExpertUsage(layers, experts, capacity, half_life)
        self._experts = experts
        self._kept: set[int] = set()

    def use(self, layer: int, needed: list[int]) -> int:
        """Uses experts of a layer; returns how many were kept."""
        keys = [layer * self._experts + expert for expert in needed]
        self._usage.count(layer, needed)
        missing = [key for key in keys if key not in self._kept]
        for key in missing:
            gone = self._usage.keep(key, keys)
            if gone != key:
                self._kept.add(key)
                self._kept.discard(-1 if gone is None else gone)
        return len(keys) - len(missing)


class LruCache:
    """Evicts the least recently used."""

    def __init__(self, experts: int, capacity: int) -> None:
        self._experts, self._capacity = experts, capacity
        self._kept: OrderedDict[int, None] = OrderedDict()

    def use(self, layer: int, needed: list[int]) -> int:
        """Uses experts of a layer; returns how many were kept."""
        hits = 0
        for key in (layer * self._experts + expert for expert in needed):
            hits += key in self._kept
            self._kept[key] = None
            self._kept.move_to_end(key)
            if len(self._kept) > self._capacity:
                self._kept.popitem(last=False)
        return hits


def _best_fixed(arguments: argparse.Namespace, tokens: int, skew: float, capacity: int) -> float:
    """Chosen from the traffic itself, anew for each popularity; nothing is counted for reading it in."""
    uses, hits, counts = 0, 0, np.zeros((arguments.layers, arguments.experts))
    for number, (layer, needed) in enumerate(_traffic(arguments, tokens, skew), start=1):
        counts[layer, needed] += 1
        if number % (arguments.drift * arguments.layers) == 0:
            uses += counts.sum()
            hits += np.sort(counts.flatten())[::-1][:capacity].sum()
            counts[:] = 0
    return float(hits / uses)


def _traffic(arguments: argparse.Namespace, tokens: int, skew: float) -> Iterable[Use]:
    random = np.random.default_rng(0)
    popularity = 1.0 / np.arange(1, arguments.experts + 1) ** skew
    popularity /= popularity.sum()
    for number in range(arguments.passes):
        if number % arguments.drift == 0:
            shares = [random.permutation(popularity) for _ in range(arguments.layers)]
        for layer in range(arguments.layers):
            # The largest of logarithms of weights with Gumbel noise: a draw without replacement for each token.
            noise = random.gumbel(size=(tokens, arguments.experts))
            chosen = np.argpartition(-(np.log(shares[layer]) + noise), arguments.chosen - 1, axis=1)
            yield layer, np.unique(chosen[:, : arguments.chosen]).tolist()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--layers", type=int, default=8)
    add("--experts", type=int, default=64)
    add("--chosen", type=int, default=4)
    add("--passes", type=int, default=600)
    add("--drift", type=int, default=200, help="passes before popularity changes (%(default)s)")
    add("--kept", type=float, nargs="+", default=[0.25, 0.5])
    add("--json", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
