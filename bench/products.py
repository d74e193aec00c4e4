"""Matrix products by scheme and number of rows: every candidate of this processor, and which one is used.

    python -m bench.products [--shape 2048 2048] [--rows 1 8 64 256] [--json FILE] [--plot FILE]

Weights rotate over more than most caches hold. All paths of a number of rows are measured in turns; the least time is
shown, and what a path takes relative to the bf16 that decode uses. What prefill, decode and drafts use for weights as
they are stored is marked (`shared.quant.candidates`); packed weights are those that stay in memory where packing pays.
On a machine that is busy with other work, `--clock processor` counts the processor time of all threads instead.
"""

from __future__ import annotations

from shared.threads import wait_passively

wait_passively()

import argparse  # noqa: E402  torch is loaded below, after the line above
import math  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Iterator, Mapping, Sequence  # noqa: E402
from dataclasses import asdict, dataclass  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from bench.machine import this_machine  # noqa: E402
from bench.report import plot, read_json, show_table, write_json  # noqa: E402
from shared.quant.candidates import CANDIDATES, DECODE_ROWS, DRAFT_ROWS, PROMPT_ROWS, ranked  # noqa: E402
from shared.quant.packed import PACKERS, packing_pays  # noqa: E402
from shared.quant.schemes import SCHEMES  # noqa: E402

ROTATED_BYTES = 64 << 20
"""Of the stored weights of each scheme."""
MEASURED = ("fp32", "bf16", "int8", "nf4")
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
USERS = {"prefill": PROMPT_ROWS, "decode": DECODE_ROWS, "drafts": DRAFT_ROWS}
PATH_S = 0.5
"""A path is measured this long for a number of rows, or a few times where it is slow."""
FEWEST_TURNS, MOST_TURNS = 3, 40


@dataclass(frozen=True)
class Result:
    """One path at one number of rows."""

    path: str
    rows: int
    ms: float
    used_by: list[str]
    """Of `USERS`, for weights as they are stored, or for those that stay where it is a packed one."""


@dataclass(frozen=True)
class _Path:
    name: str
    dtype: torch.dtype
    product: Callable[[Tensor, Mapping[str, Tensor]], Tensor]
    weights: Sequence[Mapping[str, Tensor]]
    used_by: list[str]


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
    paths = list(_paths(outputs, inputs))
    results = []
    for rows in arguments.rows:
        x = torch.randn(rows, inputs)
        least_ms = _least_ms(paths, x, CLOCKS[arguments.clock])
        results += [Result(path.name, rows, ms, path.used_by) for path, ms in zip(paths, least_ms, strict=True)]
    title = f"rows × {inputs} times {outputs} × {inputs}, ms by {arguments.clock} clock (÷ bf16 of decode)"
    show_table(title, ("path", *map(str, arguments.rows)), table_rows(results), machine)
    if arguments.json:
        rows = [asdict(result) for result in results]
        write_json(arguments.json, machine, shape=[outputs, inputs], clock=arguments.clock, results=rows)


def _paths(outputs: int, inputs: int) -> Iterator[_Path]:
    for name in MEASURED:
        scheme = SCHEMES[name]
        stored = scheme.fuse([scheme.encode(torch.randn(outputs, inputs))])
        size = sum(tensor.nbytes for tensor in stored.values())
        weights = [{key: tensor.clone() for key, tensor in stored.items()} for _ in range(-(-ROTATED_BYTES // size))]
        for candidate in CANDIDATES.get(name, ()):
            if candidate.runs() and candidate.takes(stored):
                used_by = [user for user, rows in USERS.items() if candidate is ranked(name, rows)[0]]
                yield _Path(f"{name}, {candidate.name}", scheme.compute_dtype, candidate.product, weights, used_by)
        if name not in CANDIDATES:
            yield _Path(name, scheme.compute_dtype, scheme.product, weights, list(USERS))
        if name in PACKERS and packing_pays(scheme, outputs, inputs):
            packed = [PACKERS[name](weight) for weight in weights]
            yield _Path(f"{name}, packed", scheme.compute_dtype, scheme.product, packed, list(USERS))


def _least_ms(paths: Sequence[_Path], x: Tensor, clock: Callable[[], float]) -> list[float]:
    """Of each path, measured in turns. The first turn warms up, and tells how many a path may have."""
    inputs = {dtype: x.to(dtype) for dtype in {path.dtype for path in paths}}
    first = [_once_ms(path, inputs[path.dtype], 0, clock) for path in paths]
    turns = [max(FEWEST_TURNS, min(MOST_TURNS, int(PATH_S * 1e3 / ms))) for ms in first]
    least = [math.inf] * len(paths)
    for turn in range(max(turns)):
        for number, path in enumerate(paths):
            if turn < turns[number]:
                least[number] = min(least[number], _once_ms(path, inputs[path.dtype], turn, clock))
    return least


def _once_ms(path: _Path, x: Tensor, turn: int, clock: Callable[[], float]) -> float:
    weight = path.weights[turn % len(path.weights)]
    started_s = clock()
    path.product(x, weight)
    return (clock() - started_s) * 1e3


def table_rows(results: Sequence[Result]) -> list[list[str]]:
    """One line for each path, one column for each number of rows."""
    plain, lines = _plain(results), dict[str, list[str]]()
    for result in results:
        users = f" ({', '.join(result.used_by)})" if result.used_by else ""
        cells = lines.setdefault(result.path + users, [])
        cells.append(f"{result.ms:.2f} ({result.ms / plain[result.rows]:.2f})")
    return [[path, *cells] for path, cells in lines.items()]


def _plain(results: Sequence[Result]) -> dict[int, float]:
    """Rows -> ms of stored bf16 as decode multiplies by it."""
    return {r.rows: r.ms for r in reversed(results) if r.path.startswith("bf16") and "decode" in r.used_by}


def draw(source: Path, picture: Path) -> None:
    """Draws what a run wrote: the time of every path over that of bf16 in decode, by rows."""
    content = read_json(source)
    results = [Result(**result) for result in content["results"]]
    plain = _plain(results)
    with plot(picture, 1, f"[rows, {content['shape'][1]}] × {content['shape']}") as (axes,):
        for path in dict.fromkeys(result.path for result in results):
            chosen = [result for result in results if result.path == path]
            axes.plot([r.rows for r in chosen], [r.ms / plain[r.rows] for r in chosen], "o-", label=path)
        axes.set(xlabel="rows", ylabel="time ÷ bf16", title="matrix products", ylim=(0, 3))
        axes.set_xscale("log", base=2)
        axes.legend(fontsize=7)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", type=int, nargs=2, default=[2048, 2048], metavar=("OUT", "IN"))
    add("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64, 128, 256])
    add("--clock", choices=CLOCKS, default="wall")
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
