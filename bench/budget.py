"""Does the budget hold? Real services under a mixed load, inside a cap that counts the page cache.

    python -m bench.budget PACK [--draft self --draft-pack PACK] [--json FILE]

Starts a prefill and a decode process with the smallest budgets that they accept (or --memory), each in a control group
of its own whose limit is that budget, evicts the pack from the page cache, sends prompts of many lengths up to the
context, sampled and greedy, and compares the highest resident set and the group's highest charge with the budget.
Needs root for the groups; without them it says so and compares resident sets alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.machine import this_machine
from headrace.client import AsyncClient
from headrace.client_status import statuses
from shared.config import parse_bytes

MEBIBYTE = 1 << 20
GROUPS = {
    "v2": (Path("/sys/fs/cgroup"), "memory.max", "memory.peak"),
    "v1": (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
}
LENGTHS = (5, 40, 130, 300, 800, 1500)
ANSWER_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Which services to start, and how much to ask of them."""

    pack: Path
    memory: str | None = None
    """Budget of each process; None: the smallest that it accepts."""
    draft: str = "ngram"
    draft_pack: Path | None = None
    context_length: int = 1024
    requests: int = 24
    capped: bool = True
    """In control groups, which only root can make."""


@dataclass(frozen=True)
class Peak:
    """One process's highest use, and its budget."""

    stage: str
    scheme: str
    draft: str
    budget_bytes: int
    peak_rss_bytes: int
    peak_charged_bytes: int | None
    """Of the control group, page cache included; None without one. Cache is given up where the limit asks for it."""
    resident_layers: int
    layers: int
    requests: int

    @property
    def holds(self) -> bool:
        return self.peak_rss_bytes <= self.budget_bytes


def main() -> int:
    """Runs the load; exit code 1 when a budget did not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--memory", help="budget of each process; by default the smallest that it accepts")
    parser.add_argument("--draft", default="ngram", choices=("auto", "none", "ngram", "self", "model"))
    parser.add_argument("--draft-pack", type=Path)
    parser.add_argument("--context-length", type=int, default=1024)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    options = vars(arguments)
    report_file = options.pop("json")
    peaks = measure(Trial(**options))
    table = Table("stage", "scheme", "draft", "budget MiB", "peak RSS", "charged", "resident", "holds")
    for peak in peaks:
        charged = "-" if peak.peak_charged_bytes is None else f"{peak.peak_charged_bytes / MEBIBYTE:,.0f}"
        sizes = (f"{size / MEBIBYTE:,.0f}" for size in (peak.budget_bytes, peak.peak_rss_bytes))
        resident = f"{peak.resident_layers} of {peak.layers}"
        table.add_row(peak.stage, peak.scheme, peak.draft, *sizes, charged, resident, "yes" if peak.holds else "NO")
    Console(width=120).print(table)
    if report_file:
        report = {"machine": asdict(this_machine()), "pack": arguments.pack.name, "peaks": [asdict(p) for p in peaks]}
        report_file.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(peak.holds for peak in peaks) else 1


def measure(trial: Trial) -> list[Peak]:
    """Starts both services, loads them, and reads their peaks: of prefill, and of decode."""
    common = [str(trial.pack), "--context-length", str(trial.context_length)]
    drafting = ["--draft", trial.draft, *(["--draft-pack", str(trial.draft_pack)] if trial.draft_pack else [])]
    evict(trial.pack)
    with ExitStack() as stack:
        prefill = stack.enter_context(running("prefill_service", common, trial))
        decode_options = [*common, *drafting, "--prefill", prefill.address]
        decode = stack.enter_context(running("decode_service", decode_options, trial))
        asyncio.run(load(decode.address, trial.context_length, trial.requests))
        found = statuses([prefill.address, decode.address])
        charged = [service.group.peak_bytes if service.group else None for service in (prefill, decode)]
    return [
        Peak(
            stage=status.stage,
            scheme=status.scheme,
            draft=trial.draft if status.stage == "decode" else "",
            budget_bytes=status.budget_bytes,
            peak_rss_bytes=status.peak_rss_bytes,
            peak_charged_bytes=peak_bytes,
            resident_layers=status.resident_layers,
            layers=status.layers,
            requests=trial.requests,
        )
        for status, peak_bytes in zip(found, charged, strict=True)
    ]


async def load(address: str, context: int, count: int) -> None:
    """Prompts of mixed lengths up to the context, greedy and sampled, all at once."""
    chosen = random.Random(0)
    lengths = [*(length for length in LENGTHS if length + ANSWER_TOKENS <= context), context - ANSWER_TOKENS]
    requests: list[dict[str, Any]] = []
    for number in range(count):
        prompt = [chosen.randrange(100, 2000) for _ in range(lengths[number % len(lengths)])]
        sampled = {"temperature": 0.9, "top_p": 0.9, "top_k": 50 * (number % 2), "seed": number}
        requests.append({"token_ids": prompt, "max_tokens": ANSWER_TOKENS, **(sampled if number % 3 else {})})
    async with AsyncClient(address) as client:
        await asyncio.gather(*(client.complete(**request) for request in requests))


@dataclass(frozen=True)
class Group:
    """A control group made for one process."""

    folder: Path
    peak_file: str

    @property
    def peak_bytes(self) -> int:
        return int((self.folder / self.peak_file).read_text())


@dataclass(frozen=True)
class Running:
    """A service that can be called."""

    address: str
    group: Group | None


@contextmanager
def running(module: str, options: Sequence[str], trial: Trial) -> Iterator[Running]:
    """A service process in a group of its own, whose limit is its budget."""
    command = [sys.executable, "-m", module, *options]
    budget_bytes = parse_bytes(trial.memory) if trial.memory else smallest_budget_bytes(command)
    name = f"headrace-{module}-{os.getpid()}"
    with group(name, budget_bytes) if trial.capped else nullcontext() as own:
        enter = None if own is None else (lambda: (own.folder / "cgroup.procs").write_text(str(os.getpid())))
        with subprocess.Popen(
            [*command, "--memory", str(budget_bytes), "--log-level", "warning", "--exit-with-parent"],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=enter,
        ) as process:
            assert process.stdout is not None
            try:
                ready = process.stdout.readline()  # the only line that a service prints
                if not ready:
                    raise SystemExit(f"{module} did not start within {budget_bytes / MEBIBYTE:,.0f} MiB")
                yield Running(json.loads(ready)["address"], own)
            finally:
                process.terminate()


@contextmanager
def group(name: str, limit_bytes: int) -> Iterator[Group | None]:
    """A control group with a memory limit, removed afterwards; None, with a word why, where there can be none."""
    for root, limit_file, peak_file in GROUPS.values():
        folder = root / name
        if not (root / "cgroup.procs").exists() or not (root.name == "memory" or root.joinpath("memory.stat").exists()):
            continue
        try:
            folder.mkdir()
            (folder / limit_file).write_text(str(limit_bytes))
        except OSError as error:
            print(f"no control group, so the page cache is not counted: {error}", file=sys.stderr)
            break
        try:
            yield Group(folder, peak_file)
        finally:
            folder.rmdir()
        return
    else:
        print("no control group, so the page cache is not counted: no memory controller found", file=sys.stderr)
    yield None


def smallest_budget_bytes(command: Sequence[str]) -> int:
    """What the service itself names when it refuses."""
    refused = subprocess.run([*command, "--memory", "1MiB"], capture_output=True, text=True, check=False)
    least = re.search(r"the smallest that works is (\d+) MiB", refused.stderr)
    if least is None:
        raise SystemExit(refused.stderr)
    return int(least[1]) * MEBIBYTE


def evict(pack: Path) -> None:
    """Drops the pack's files from the page cache, so that what is cached is charged to who reads it."""
    for file in pack.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
