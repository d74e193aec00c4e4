"""Whether streaming is as fast as the disk, and hides the arithmetic: passes over packs, against their parts alone.

    python -m bench.streaming PACK … [--json FILE] [--plot FILE]
    python -m bench.streaming --quick                    the 135M model, in under a minute
    python -m bench.streaming --draw FILE --plot FILE    only draws what was measured before

Everything is measured in turns, round after round, so that a machine whose speed changes changes all of it:

    raw       the streamed layers' bytes with O_DIRECT: the ring's own requests and threads, and nothing else
    read      a walk over the stream without arithmetic
    compute   a pass with all layers in memory
    pass      a pass with the stream

A pass takes one prompt of some rows through all layers (no logits); each comes right after another of its kind, as in
a busy service, so nothing was read ahead that it did not pay for. `read ÷ raw` compares bandwidths. `pass ÷ max` is the
pass time over the longer of read and compute: 1 means that the shorter one is hidden. The limit is what disk, memory
and matrix products allow at the speeds measured in the same run. Where arithmetic takes as long as reading is the
crossover, found on the line through the two largest numbers of rows; from 1.5 times of it on (marked *), streaming
should cost nothing.
"""

from __future__ import annotations

from shared.threads import wait_passively

wait_passively()

import argparse  # noqa: E402  torch is loaded below, after the line above
import statistics  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Iterator, Sequence  # noqa: E402
from contextlib import closing  # noqa: E402
from dataclasses import asdict, dataclass  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402

from bench.embedded import embedded_pack  # noqa: E402
from bench.machine import (  # noqa: E402
    matrix_operations_per_s,
    memory_bytes_per_s,
    read_direct,
    this_machine,
)
from bench.report import show_table, write_json  # noqa: E402
from bench.streaming_plot import draw  # noqa: E402
from shared.kv.prompt import PromptKeyValues  # noqa: E402
from shared.model.batch import TokenBatch  # noqa: E402
from shared.model.model import Model  # noqa: E402
from shared.pack.format import matrix_shapes  # noqa: E402
from shared.pack.reader import Pack  # noqa: E402
from shared.streaming.loader import READERS, split  # noqa: E402
from shared.streaming.plan import Residency  # noqa: E402
from shared.tensors import aligned_buffer  # noqa: E402

QUICK = {"rows": [1, 64, 256], "resident": [0, 50], "rounds": 5}
BEYOND_CROSSOVER = 1.5


@dataclass(frozen=True)
class Limits:
    """What this machine can do at most, measured in this run."""

    memory_bytes_per_s: float
    operations_per_s: dict[str, float]
    """By scheme: in its fastest kind of matrix product."""

    def pass_s(self, pack: Pack, rows: int, streamed_bytes: int, raw_bytes_per_s: float) -> float:
        """The shortest time that a pass could take."""
        layers = pack.spec.layers
        weights = layers * sum(rows * columns for rows, columns in matrix_shapes(pack.spec).values())
        return max(
            streamed_bytes / raw_bytes_per_s,
            layers * pack.layer_layout.data_bytes / self.memory_bytes_per_s,
            2 * rows * weights / self.operations_per_s[pack.scheme.name],
        )


@dataclass(frozen=True)
class Result:
    """One pack, one share of it in memory, one number of rows: medians over the rounds."""

    pack: str
    scheme: str
    resident_percent: int
    rows: int
    streamed_bytes: int
    raw_bytes_per_s: float
    read_over_raw: float
    """Bandwidth of a walk ÷ raw bandwidth."""
    read_s: float
    compute_s: float
    pass_s: float
    pass_over_longest: float
    """Pass time ÷ max(read time, compute time)."""
    limit_s: float
    beyond_crossover: bool
    """The rows are at least 1.5 times those at which arithmetic takes as long as reading, and it did take longer."""

    @property
    def over_resident(self) -> float:
        """Throughput ÷ that with all layers in memory."""
        return self.compute_s / self.pass_s


def main() -> None:
    """Measures what the command line asks for, and reports it."""
    arguments = _arguments()
    if not arguments.draw:
        torch.set_num_threads(arguments.threads)
        with torch.inference_mode():
            _measure_all(arguments)
    if arguments.plot:
        draw(arguments.draw or arguments.json, arguments.plot)


def _measure_all(arguments: argparse.Namespace) -> None:
    machine = this_machine()
    limits = measure_limits()
    results: list[Result] = []
    for path in arguments.packs:
        for result in measure_pack(Pack.open(path), path.name, arguments, limits):
            results.append(result)
            print(f"{result.pack}, {result.resident_percent} % resident, {result.rows} rows: {result.pass_s:.3f} s")
    show_table("streamed passes", COLUMNS, map(cells, results), machine)
    if arguments.json:
        write_json(arguments.json, machine, limits=asdict(limits), results=[asdict(result) for result in results])


def measure_limits() -> Limits:
    """Memory and matrix products; the disk is measured with each case."""
    wide, narrow, integer = (matrix_operations_per_s(dtype) for dtype in (torch.float32, torch.bfloat16, torch.int8))
    return Limits(memory_bytes_per_s(), {"fp32": wide, "bf16": narrow, "nf4": narrow, "int8": max(integer, narrow)})


def measure_pack(pack: Pack, name: str, arguments: argparse.Namespace, limits: Limits) -> Iterator[Result]:
    """All shares in memory and all numbers of rows, and with nothing in memory one more: beyond the crossover."""
    everything = Residency(frozenset(range(pack.spec.layers)), 0)
    with closing(Model(pack, everything)) as resident:
        for percent in arguments.resident:
            residency = residency_of(pack.spec.layers, percent, arguments.slots)
            with closing(Model(pack, residency)) as streaming:
                case = _Case(pack, name, percent, residency, resident, streaming, limits, arguments.rounds)
                walk(streaming)  # verifies the digests
                measured = [case.measure(rows) for rows in arguments.rows]
                yield from measured
                rows = rows_beyond_crossover(measured)
                if percent == 0 and rows is not None and rows <= arguments.most_rows:
                    yield case.measure(rows, beyond_crossover=True)


def residency_of(layers: int, percent: int, slots: int) -> Residency:
    """That share of the layers in memory, the others evenly between them."""
    streamed = layers - layers * percent // 100
    return Residency(frozenset(range(layers)) - {i * layers // streamed for i in range(streamed)}, min(slots, streamed))


def rows_beyond_crossover(results: Sequence[Result]) -> int | None:
    """1.5 times the rows at which arithmetic takes as long as reading, on the line through the two largest cases."""
    *_, smaller, larger = sorted(results, key=lambda result: result.rows)
    slope = (larger.compute_s - smaller.compute_s) / (larger.rows - smaller.rows)
    if slope <= 0:
        return None
    crossover = larger.rows + (larger.read_s - larger.compute_s) / slope
    return max(-(-int(BEYOND_CROSSOVER * crossover) // 16) * 16, 16)


def walk(model: Model) -> None:
    """Reads every streamed layer once."""
    for _ in model.walk():
        pass


def compute(model: Model, rows: int) -> None:
    """One pass over one prompt."""
    current = model.begin(TokenBatch.of([(list(range(1, rows + 1)), 0)]))
    kv = PromptKeyValues(current.batch.segments)
    for layer, weights in model.walk():
        current.compute(layer, weights, kv)
        kv.clear()


@dataclass(frozen=True)
class _Case:
    pack: Pack
    name: str
    percent: int
    residency: Residency
    resident: Model
    streaming: Model
    limits: Limits
    rounds: int

    def measure(self, rows: int, *, beyond_crossover: bool = False) -> Result:
        samples = [self._round(rows) for _ in range(self.rounds)]
        raw, read_s, compute_s, pass_s = (statistics.median(column) for column in zip(*samples, strict=True))
        return Result(
            pack=self.name,
            scheme=self.pack.scheme.name,
            resident_percent=self.percent,
            rows=rows,
            streamed_bytes=self.streamed_bytes,
            raw_bytes_per_s=raw,
            read_over_raw=statistics.median(self.streamed_bytes / read / raw for raw, read, _, _ in samples),
            read_s=read_s,
            compute_s=compute_s,
            pass_s=pass_s,
            pass_over_longest=statistics.median(whole / max(read, alone) for _, read, alone, whole in samples),
            limit_s=self.limits.pass_s(self.pack, rows, self.streamed_bytes, raw),
            beyond_crossover=beyond_crossover and compute_s > read_s,
        )

    @property
    def streamed(self) -> list[int]:
        return [layer for layer in range(self.pack.spec.layers) if layer not in self.residency.resident]

    @property
    def streamed_bytes(self) -> int:
        return len(self.streamed) * self.pack.layer_layout.data_bytes

    def _round(self, rows: int) -> tuple[float, float, float, float]:
        """Raw bandwidth, and seconds of read, compute and pass."""
        compute_s = timed(lambda: compute(self.resident, rows))  # first: until then, the stream is still reading ahead
        raw = self._raw_bytes_per_s()
        read_s = timed(lambda: walk(self.streaming))
        return raw, read_s, compute_s, timed(lambda: compute(self.streaming, rows))

    def _raw_bytes_per_s(self) -> float:
        layout = self.pack.layer_layout
        parts = split(aligned_buffer(layout.data_bytes), READERS)
        ranges = [(layout.data_start + start, len(view)) for view, start in parts]
        paths = [self.pack.layer_path(layer) for layer in self.streamed]
        readings = [read_direct(paths, ranges, READERS) for _ in range(2)]  # the second one counts, as for the others
        return readings[-1].bytes_per_s


def timed(work: Callable[[], None]) -> float:
    """Seconds that it takes the second time in a row."""
    work()
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


COLUMNS = (
    *("pack", "resident", "rows", "raw GB/s", "read ÷ raw", "read s", "compute s", "pass s", "pass ÷ max"),
    *("÷ resident", "limit s", "of limit"),
)


def cells(result: Result) -> list[str]:
    """One line of the table."""
    return [
        result.pack,
        f"{result.resident_percent} %",
        f"{result.rows}{' *' if result.beyond_crossover else ''}",
        f"{result.raw_bytes_per_s / 1e9:.2f}",
        f"{result.read_over_raw:.2f}",
        f"{result.read_s:.3f}",
        f"{result.compute_s:.3f}",
        f"{result.pass_s:.3f}",
        f"{result.pass_over_longest:.2f}",
        f"{result.over_resident:.2f}",
        f"{result.limit_s:.3f}",
        f"{result.limit_s / result.pass_s:.0%}",
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("packs", nargs="*", type=Path, metavar="PACK")
    add("--quick", action="store_true", help="few cases; without a pack: the embedded model in int8")
    add("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    add("--resident", type=int, nargs="+", default=[0, 25, 50], metavar="PERCENT", help="100 is measured anyway")
    add("--most-rows", type=int, default=4096, help="leave the case beyond the crossover out above this")
    add("--slots", type=int, default=4)
    add("--rounds", type=int, default=5)
    add("--threads", type=int, default=torch.get_num_threads())
    add("--json", type=Path, metavar="FILE")
    add("--plot", type=Path, metavar="FILE", help="needs --json or --draw")
    add("--draw", type=Path, metavar="FILE", help="JSON of an earlier run, to be plotted")
    arguments = parser.parse_args()
    if arguments.plot and not (arguments.json or arguments.draw):
        parser.error("a plot is drawn from JSON: give --json or --draw")
    if arguments.quick:
        vars(arguments).update(QUICK)
        arguments.packs = arguments.packs or [embedded_pack("int8")]
    elif not (arguments.packs or arguments.draw):
        parser.error("give packs, or --quick, or --draw")
    return arguments


if __name__ == "__main__":
    main()
