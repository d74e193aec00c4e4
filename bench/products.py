"""Matrix products by scheme and number of rows: stored and packed weights, against bf16.

    python -m bench.products [--shape 4096 4096] [--rows 1 8 64 256] [--json FILE] [--plot FILE]

Weights rotate over more than the caches hold. All paths of a number of rows are measured in turns, and the median is
shown. The limit is reading the stored weight from memory once, or the arithmetic, whichever takes longer, at speeds
measured in the same run. `nf4, dequantized first` is a product that writes the bfloat16 weight and multiplies
by it; no service does that where the CPU has the NF4 kernel.
"""

from __future__ import annotations

from shared.threads import wait_passively

wait_passively()

import argparse  # noqa: E402  torch is loaded below, after the line above
import statistics  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Mapping, Sequence  # noqa: E402
from dataclasses import asdict, dataclass  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from bench.machine import matrix_operations_per_s, memory_bytes_per_s, this_machine  # noqa: E402
from bench.report import plot, read_json, show_table, write_json  # noqa: E402
from shared.quant.packed import PACKERS  # noqa: E402
from shared.quant.products import linear, nf4_dequantize  # noqa: E402
from shared.quant.schemes import SCHEMES, Scheme  # noqa: E402

ROTATED_BYTES = 160 << 20
"""Of the stored weights of each path."""
MEASURED = ("bf16", "int8", "nf4")


@dataclass(frozen=True)
class Result:
    """One path at one number of rows."""

    path: str
    rows: int
    ms: float
    limit_ms: float


@dataclass(frozen=True)
class _Path:
    name: str
    scheme: Scheme
    product: Callable[[Tensor, Mapping[str, Tensor]], Tensor]
    weights: Sequence[Mapping[str, Tensor]]
    stored_bytes: int


def main() -> None:
    """Measures what the command line asks for, and reports it."""
    arguments = _arguments()
    if arguments.draw is None:
        torch.set_num_threads(arguments.threads)
        with torch.inference_mode():
            _measure(arguments)
    if arguments.plot:
        draw(arguments.draw or arguments.json, arguments.plot)


def _measure(arguments: argparse.Namespace) -> None:
    machine, (outputs, inputs) = this_machine(), arguments.shape
    memory, operations = memory_bytes_per_s(), matrix_operations_per_s(torch.bfloat16)
    paths = list(_paths(outputs, inputs))
    results = []
    for rows in arguments.rows:
        x = torch.randn(rows, inputs).to(torch.bfloat16)
        samples = [[_once_ms(path, x, turn) for path in paths] for turn in range(arguments.rounds + 2)][2:]
        for path, column in zip(paths, zip(*samples, strict=True), strict=True):
            limit_s = max(path.stored_bytes / memory, 2 * rows * outputs * inputs / operations)
            results.append(Result(path.name, rows, statistics.median(column), limit_s * 1e3))
    title = f"rows × {inputs} times {outputs} × {inputs}, ms (share of the limit)"
    show_table(title, ("path", *map(str, arguments.rows)), table_rows(results), machine)
    if arguments.json:
        write_json(arguments.json, machine, shape=[outputs, inputs], results=[asdict(result) for result in results])


def _paths(outputs: int, inputs: int) -> list[_Path]:
    paths = []
    for name in MEASURED:
        scheme = SCHEMES[name]
        stored = scheme.fuse([scheme.encode(torch.randn(outputs, inputs))])
        size = sum(tensor.nbytes for tensor in stored.values())
        weights = [{key: tensor.clone() for key, tensor in stored.items()} for _ in range(-(-ROTATED_BYTES // size))]
        paths.append(_Path(name, scheme, scheme.product, weights, size))
        if name in PACKERS:
            packed = [PACKERS[name](weight) for weight in weights]
            paths.append(_Path(f"{name}, packed", scheme, scheme.product, packed, size))
        if name == "nf4":
            paths.append(_Path("nf4, dequantized first", scheme, _dequantize_first, weights, size))
    return paths


def _dequantize_first(x: Tensor, weight: Mapping[str, Tensor]) -> Tensor:
    return linear(x, nf4_dequantize(weight, x.dtype))


def _once_ms(path: _Path, x: Tensor, turn: int) -> float:
    weight = path.weights[turn % len(path.weights)]
    started_s = time.perf_counter()
    path.product(x, weight)
    return (time.perf_counter() - started_s) * 1e3


def table_rows(results: Sequence[Result]) -> list[list[str]]:
    """One line for each path, one column for each number of rows."""
    lines: dict[str, list[str]] = {}
    for result in results:
        lines.setdefault(result.path, []).append(f"{result.ms:.2f} ({result.limit_ms / result.ms:.0%})")
    return [[path, *cells] for path, cells in lines.items()]


def draw(source: Path, picture: Path) -> None:
    """Draws what a run wrote: the time of every path over that of stored bf16, by rows."""
    content = read_json(source)
    results = [Result(**result) for result in content["results"]]
    plain = {result.rows: result.ms for result in results if result.path == "bf16"}
    with plot(picture, 1, f"[rows, {content['shape'][1]}] × {content['shape']}") as (axes,):
        for path in dict.fromkeys(result.path for result in results):
            chosen = [result for result in results if result.path == path]
            axes.plot([r.rows for r in chosen], [r.ms / plain[r.rows] for r in chosen], "o-", label=path)
        axes.set(xlabel="rows", ylabel="time ÷ stored bf16", title="matrix products", ylim=(0, 3))
        axes.set_xscale("log", base=2)
        axes.legend(fontsize=7)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", type=int, nargs=2, default=[4096, 4096], metavar=("OUT", "IN"))
    add("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    add("--rounds", type=int, default=12)
    add("--threads", type=int, default=torch.get_num_threads())
    add("--json", type=Path, metavar="FILE")
    add("--plot", type=Path, metavar="FILE", help="needs --json or --draw")
    add("--draw", type=Path, metavar="FILE", help="JSON of an earlier run, to be plotted")
    arguments = parser.parse_args()
    if arguments.plot and not (arguments.json or arguments.draw):
        parser.error("a plot is drawn from JSON: give --json or --draw")
    return arguments


if __name__ == "__main__":
    main()
