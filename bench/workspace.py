"""What a prefill pass takes besides weights, beside what the memory plan sets aside for it.

    python -m bench.workspace PACK … [--tokens 2048,8192] [--layers 3] [--json FILE]

Each case is a process of its own: once with the services' allocator settings, once with those of the C library.
Peaks are resident sets above the one before the pass, its weights already there. Linux only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from shared.allocator import share_one_heap
from shared.threads import wait_passively

MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Case:
    """One pass of one prompt."""

    scheme: str
    tokens: int
    one_heap: bool
    planned_bytes: int
    peak_bytes: int
    kept_bytes: int
    """Still there after the pass."""
    processor_s: float
    """Of the last pass."""


def main() -> None:
    """Runs all cases and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packs", nargs="+", type=Path)
    parser.add_argument("--tokens", default="2048,8192", metavar="N,…")
    parser.add_argument("--layers", type=int, default=3, help="layers of each pass; peaks come in the first")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", choices=("one", "many"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        measure_and_print(arguments)
        return
    cases = [
        run_case(pack, int(tokens), heaps, arguments.layers)
        for pack in arguments.packs
        for tokens in arguments.tokens.split(",")
        for heaps in ("many", "one")
    ]
    show(cases)
    if arguments.json:
        from bench.machine import this_machine

        report = {"machine": asdict(this_machine()), "cases": [asdict(case) for case in cases]}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


def run_case(pack: Path, tokens: int, heaps: str, layers: int) -> Case:
    """Measures in a fresh process."""
    command = [sys.executable, "-m", "bench.workspace", str(pack), "--tokens", str(tokens)]
    command += ["--layers", str(layers), "--case", heaps]
    return Case(**json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def show(cases: list[Case]) -> None:
    """Prints the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table("scheme", "tokens", "heaps", "planned MiB", "peak", "kept", "processor s")
    for case in cases:
        sizes = (f"{size / MEBIBYTE:,.0f}" for size in (case.planned_bytes, case.peak_bytes, case.kept_bytes))
        heaps = "one" if case.one_heap else "many"
        table.add_row(case.scheme, f"{case.tokens:,}", heaps, *sizes, f"{case.processor_s:.1f}")
    Console().print(table)


def measure_and_print(arguments: argparse.Namespace) -> None:
    """One case, in this process, on a thread as engines have it."""
    if arguments.case == "one":
        share_one_heap()
    wait_passively()
    found: list[Case] = []
    (pack,) = arguments.packs
    work = threading.Thread(target=lambda: found.append(measure(pack, int(arguments.tokens), arguments)))
    work.start()
    work.join()
    print(json.dumps(asdict(found[0])))


def measure(path: Path, tokens: int, arguments: argparse.Namespace) -> Case:
    """Three passes over the first layers; the highest peak counts."""
    import resource

    import torch

    from shared.budget import measured_runtime_bytes
    from shared.kv.prompt import PromptKeyValues
    from shared.limits import PREFILL_PASS_TOKENS
    from shared.model.batch import TokenBatch
    from shared.model.model import Model
    from shared.model.workspace import prompt_workspace_bytes
    from shared.pack.reader import Pack
    from shared.streaming.plan import FEWEST_SLOTS, Residency

    pack = Pack.open(path)
    measured_runtime_bytes([pack.scheme])
    model = Model(pack, Residency(frozenset(), FEWEST_SLOTS))
    with torch.inference_mode():
        for number, _ in enumerate(model.walk()):
            if number > FEWEST_SLOTS:
                break
        before_bytes = status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the highest resident set starts again from here
        for _ in range(3):
            used = resource.getrusage(resource.RUSAGE_SELF)
            current = model.begin(TokenBatch.of([([7 + number % 1000 for number in range(tokens)], 0)]))
            kv = PromptKeyValues(current.batch.segments)
            for number, (layer, weights) in enumerate(model.walk()):
                if number >= arguments.layers:
                    break
                current.compute(layer, weights, kv)
                kv.clear()
            del current, kv
            spent = resource.getrusage(resource.RUSAGE_SELF)
    case = Case(
        scheme=pack.scheme.name,
        tokens=tokens,
        one_heap=arguments.case == "one",
        planned_bytes=prompt_workspace_bytes(pack.spec, pack.scheme, tokens, tokens, PREFILL_PASS_TOKENS),
        peak_bytes=status_bytes("VmHWM") - before_bytes,
        kept_bytes=status_bytes("VmRSS") - before_bytes,
        processor_s=spent.ru_utime + spent.ru_stime - used.ru_utime - used.ru_stime,
    )
    model.close()
    return case


def status_bytes(name: str) -> int:
    """A size of this process, from the kernel."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


if __name__ == "__main__":
    main()
