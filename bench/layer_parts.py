"""What a layer of a decode pass spends its time on, by number of sequences: products, attention, and what is left.

    python -m bench.layer_parts PACK [--sequences 1 8 32] [--context 300] [--json FILE]

Passes of one new token a sequence through all layers, which stay in memory. Numbers of sequences take turns, and
medians are shown, in microseconds a layer. *Keeping* puts new keys and values into their
blocks, *gathering* brings those of the sequences together, *attention* is the arithmetic on them and how its queries
and results are moved. *The rest* is norms, rotation, activation, sums, and Python. *Laying out* is done once a pass,
and its share of each layer is shown: tokens, positions, rotations, addresses of blocks.
"""

from __future__ import annotations

from shared.threads import wait_passively

wait_passively()

import argparse  # noqa: E402  torch is loaded below, after the line above
import statistics  # noqa: E402
import time  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Callable, Iterator, Sequence  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from dataclasses import dataclass, replace  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from bench.machine import this_machine  # noqa: E402
from bench.report import show_table, write_json  # noqa: E402
from shared.errors import ConfigurationError  # noqa: E402
from shared.kv.paged import BLOCK_TOKENS, PagedKeyValues, PagedPass  # noqa: E402
from shared.model.batch import TokenBatch  # noqa: E402
from shared.model.layers import LayerWeights  # noqa: E402
from shared.model.mlp import Linear, Mlp  # noqa: E402
from shared.model.model import Model  # noqa: E402
from shared.model.spec import AttentionRule  # noqa: E402
from shared.pack.reader import Pack  # noqa: E402
from shared.quant.candidates import DECODE_ROWS  # noqa: E402
from shared.streaming.plan import Residency  # noqa: E402

PARTS = ("products", "keeping", "gathering", "attention", "the rest", "laying out")


class Clock:
    """Seconds by part; what is timed inside of another part counts for the inner one alone."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()
        self._open: list[str] = []
        self._since_s = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Everything in here is that part."""
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def taken(self) -> dict[str, float]:
        """Seconds of all parts since this was asked last."""
        seconds = {name: self._seconds[name] for name in PARTS}
        self._seconds.clear()
        return seconds

    def _charge(self) -> None:
        now_s = time.perf_counter()
        if self._open:
            self._seconds[self._open[-1]] += now_s - self._since_s
        self._since_s = now_s


@dataclass(frozen=True)
class TimedLinear(Linear):
    """A matrix whose products are timed."""

    clock: Clock

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        with self.clock.part("products"):
            return super().__call__(x)


class TimedKeyValues(PagedKeyValues):
    """A pool that says what is done to it."""

    clock: Clock

    def store(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """See `PagedKeyValues`."""
        with self.clock.part("keeping"):
            super().store(layer, rows, keys, values)

    def gather(self, layer: int, pieces: Tensor) -> tuple[Tensor, Tensor]:
        """See `PagedKeyValues`."""
        with self.clock.part("gathering"):
            return super().gather(layer, pieces)


@dataclass(frozen=True)
class TimedPass:
    """A pass's keys and values, whose attention is timed."""

    paged: PagedPass
    clock: Clock

    def parts(self, tokens: int) -> Sequence[slice]:
        """See `PagedPass`."""
        return self.paged.parts(tokens)

    def attend(self, layer: int, rule: AttentionRule, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See `PagedPass`."""
        with self.clock.part("attention"):
            return self.paged.attend(layer, rule, queries, keys, values)


def main() -> None:
    """Measures what the command line asks for, and reports it."""
    arguments = _arguments()
    clock, machine, pack = Clock(), this_machine(), Pack.open(arguments.pack).for_rows(DECODE_ROWS)
    if pack.spec.experts is not None:
        raise ConfigurationError(f"{arguments.pack} has experts, which are not measured here; give another pack")
    with torch.inference_mode():
        model = Model(pack, Residency(frozenset(range(pack.spec.layers)), slots=0))
        layers = [(layer, _timed(weights, clock)) for layer, weights in model.walk()]
        passes = [_passes(model, layers, count, arguments.context, clock) for count in arguments.sequences]
        samples = [[one() for one in passes] for _ in range(arguments.rounds + 2)][2:]
    medians = [
        {part: statistics.median(sample[part] for sample in column) / len(layers) * 1e6 for part in PARTS}
        for column in zip(*samples, strict=True)
    ]
    results = dict(zip(arguments.sequences, medians, strict=True))
    rows = [[part, *(f"{microseconds[part]:,.0f}" for microseconds in results.values())] for part in PARTS]
    title = f"{pack.scheme.name}, {arguments.context} tokens of context: microseconds a layer, by sequences"
    show_table(title, ("part", *map(str, results)), rows, machine)
    if arguments.json:
        write_json(arguments.json, machine, context=arguments.context, microseconds=results)
    model.close()


def _timed(weights: LayerWeights, clock: Clock) -> LayerWeights:
    def linear(stored: Linear) -> Linear:
        return TimedLinear(stored.scheme, stored.components, stored.bias, clock)

    mlp = weights.mlp and Mlp(linear(weights.mlp.gate_up), linear(weights.mlp.down))
    return replace(weights, qkv=linear(weights.qkv), attention_output=linear(weights.attention_output), mlp=mlp)


def _passes(
    model: Model, layers: Sequence[tuple[int, LayerWeights]], sequences: int, context: int, clock: Clock
) -> Callable[[], dict[str, float]]:
    """Takes sequences of that length through all layers and tells the seconds of each part."""
    blocks = -(-(context + 1) // BLOCK_TOKENS)
    pool = TimedKeyValues(model.spec, model.dtype, sequences * blocks)
    pool.clock = clock
    # Blocks are handed out as sequences grow: those of one are apart.
    tables = [range(first, sequences * blocks, sequences) for first in range(sequences)]

    def one() -> dict[str, float]:
        with clock.part("laying out"):
            batch = TokenBatch.of(([1], context) for _ in range(sequences))
            kv, current = TimedPass(pool.for_pass(batch.segments, tables), clock), model.begin(batch)
        with clock.part("the rest"):
            for layer, weights in layers:
                current.compute(layer, weights, kv)
        return clock.taken()

    return one


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("pack", type=Path)
    add("--sequences", type=int, nargs="+", default=[1, 8, 32])
    add("--context", type=int, default=300, help="tokens that each sequence has")
    add("--rounds", type=int, default=15)
    add("--json", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
