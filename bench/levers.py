"""What each lever buys: the same reports, naively served, then with one lever more at a time, and all without each one.

    python -m bench.levers --bf16 PACK --int8 PACK [--copy NF4-PACK] [--json FILE] [--plot FILE]
    headrace bench levers                    the embedded model; its packs are made in build/ where they are missing

Levers: quantization (int8 for bf16), batching (many requests a pass for one), speculation (drafts, their length chosen
by the service), and KV management (prefixes shared between requests, blocks taken as sequences grow; without it nothing
is shared and a request reserves all it may need). Every row is the same engine, one colocated decode process. With
`--checkpoint` the naive job is also done by transformers, on the same weights.

Each setting has one budget for all its rows: `fits`, where all layers of the unquantized model stay, and `quarter`,
where a quarter of them do. A row without batching serves requests one after another, so fewer of them are asked
(`--alone`); its rate does not depend on their number. Cost is time on the machine × its price.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.levers_plot import draw
from bench.machine import this_machine
from bench.prompts import BenchPrompt
from bench.report import show_table, write_json
from bench.reports import report_prompts
from bench.services import service
from headrace import Client
from shared.config import parse_bytes
from shared.demand import DecodeSettings, decode_demand
from shared.limits import LOCAL_PASS_TOKENS
from shared.pack.reader import Pack
from shared.streaming.plan import plan_memory

SHIFT_S = 8 * 3600
QUARTER_STEP_BYTES = 8 << 20


@dataclass(frozen=True)
class Levers:
    """Which of them are pulled."""

    quantization: bool = False
    batching: bool = False
    speculation: bool = False
    kv: bool = False


NAIVE, ALL = Levers(), Levers(quantization=True, batching=True, speculation=True, kv=True)
CASES = {
    "naive": NAIVE,
    "+ quantization": Levers(quantization=True),
    "+ batching": Levers(quantization=True, batching=True),
    "+ speculation": replace(ALL, kv=False),
    "+ KV management: all": ALL,
    "all but quantization": replace(ALL, quantization=False),
    "all but batching": replace(ALL, batching=False),
    "all but speculation": replace(ALL, speculation=False),
}
"""All but KV management is the line before the last addition."""


@dataclass(frozen=True)
class Shape:
    """A workload: about so many prompt tokens, exactly so many generated."""

    prompt_tokens: int
    output_tokens: int

    def __str__(self) -> str:
        return f"{self.prompt_tokens}:{self.output_tokens}"


@dataclass(frozen=True)
class Result:
    """One row."""

    setting: str
    budget: str
    shape: str
    case: str
    reports: int
    prompt_tokens: int
    output_tokens: int
    wall_s: float
    processor_s: float
    peak_rss_bytes: int | None
    resident_layers: int | None
    equal_tokens: float
    """Mean share of an answer's tokens before the first that differs from the naive answer."""
    equal_texts: int

    @property
    def report_s(self) -> float:
        """Time on the machine for one report."""
        return self.wall_s / self.reports


def main() -> None:
    """Measures what the command line asks for, and reports it."""
    arguments = _arguments()
    if arguments.draw is None:
        _measure(arguments)
    if arguments.plot:
        draw(arguments.draw or arguments.json, arguments.plot)


def _measure(arguments: argparse.Namespace) -> None:
    machine, unquantized = this_machine(), Pack.open(Path(arguments.bf16))
    budgets = {"fits": arguments.fits, "quarter": arguments.quarter or quarter_budget(unquantized, arguments)}
    results: list[Result] = []
    for setting in arguments.settings.split(","):
        for shape in arguments.shapes:
            for result in setting_results(setting, budgets[setting], shape, arguments):
                results.append(result)
                print(f"{setting}, {shape}, {result.case}: {result.report_s:.2f} s a report", flush=True)
            shown = [result for result in results if (result.setting, result.shape) == (setting, str(shape))]
            title = f"{setting} ({shown[0].budget}), {shape} tokens"
            show_table(title, COLUMNS, rows(shown, arguments.price_per_hour), machine)
    if arguments.json:
        write_json(
            arguments.json,
            machine,
            pack=Path(arguments.bf16).name,
            price_per_hour=arguments.price_per_hour,
            results=[asdict(result) for result in results],
        )


def setting_results(setting: str, budget: str, shape: Shape, arguments: argparse.Namespace) -> Iterator[Result]:
    """All rows of one setting and shape; the first is the naive one."""
    prompts = report_prompts(arguments.reports, shape.prompt_tokens)
    naive: list[list[int]] = []
    for case in arguments.cases:
        levers = CASES[case]
        asked = prompts if levers.batching else prompts[: arguments.alone]
        result, answers = run_case(setting, budget, shape, case, asked, arguments, naive)
        naive = naive or answers
        yield result
    if arguments.checkpoint and setting == "fits":
        yield run_transformers(budget, shape, prompts[: arguments.alone], arguments, naive)


def run_case(
    setting: str,
    budget: str,
    shape: Shape,
    case: str,
    prompts: Sequence[BenchPrompt],
    arguments: argparse.Namespace,
    naive: Sequence[Sequence[int]],
) -> tuple[Result, list[list[int]]]:
    """Starts a service, warms it up, answers the prompts; returns the answers' tokens, too."""
    levers = CASES[case]
    pack = arguments.int8 if levers.quantization else arguments.bf16
    at_once = arguments.batch if levers.batching else 1
    with (
        service("decode_service", pack, budget, service_options(levers, arguments, shape, at_once)) as started,
        Client(started.address, timeout_s=24 * 3600) as client,
    ):
        client.complete("Hello", max_tokens=2)
        processor_s, started_s = started.processor_s, time.monotonic()
        with ThreadPoolExecutor(at_once) as pool:
            answers = list(
                pool.map(
                    lambda prompt: client.complete(
                        messages=list(prompt.messages), max_tokens=shape.output_tokens, min_tokens=shape.output_tokens
                    ),
                    prompts,
                )
            )
        wall_s, processor_s = time.monotonic() - started_s, started.processor_s - processor_s
        status = client.status()[0]
    tokens = [list(answer.token_ids) for answer in answers]
    return (
        Result(
            setting=setting,
            budget=budget,
            shape=str(shape),
            case=case,
            reports=len(answers),
            prompt_tokens=sum(answer.usage.prompt_tokens for answer in answers),
            output_tokens=sum(map(len, tokens)),
            wall_s=wall_s,
            processor_s=processor_s,
            peak_rss_bytes=status.peak_rss_bytes,
            resident_layers=status.resident_layers,
            equal_tokens=mean_equal(tokens, naive or tokens),
            equal_texts=sum(ours == reference for ours, reference in zip(tokens, naive or tokens, strict=False)),
        ),
        tokens,
    )


def service_options(levers: Levers, arguments: argparse.Namespace, shape: Shape, at_once: int) -> list[str]:
    """The command line of a row's service."""
    context = 2 * shape.prompt_tokens + shape.output_tokens
    options = ["--batch", str(at_once), "--context-length", str(context)]
    options += ["--share-prefixes", "on" if levers.kv else "off"] + ([] if levers.kv else ["--overcommit", "1.0"])
    if not levers.speculation:
        return [*options, "--draft", "none"]
    return [*options, "--draft", "self", "--draft-pack", arguments.copy] if arguments.copy else options


def run_transformers(
    budget: str,
    shape: Shape,
    prompts: Sequence[BenchPrompt],
    arguments: argparse.Namespace,
    naive: Sequence[Sequence[int]],
) -> Result:
    """The naive job by transformers, in a process of its own."""
    command = [sys.executable, "-m", "bench.transformers_peer", arguments.checkpoint, str(shape.output_tokens)]
    asked = json.dumps([list(prompt.messages) for prompt in prompts])
    run = subprocess.run(command, input=asked, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"transformers failed: {run.stderr[-2000:]}")
    found = json.loads(run.stdout.splitlines()[-1])
    return Result(
        setting="fits",
        budget=budget,
        shape=str(shape),
        case="transformers, naive",
        reports=len(prompts),
        prompt_tokens=found["prompt_tokens"],
        output_tokens=sum(map(len, found["answers"])),
        wall_s=found["wall_s"],
        processor_s=found["processor_s"],
        peak_rss_bytes=found["peak_rss_bytes"],
        resident_layers=None,
        equal_tokens=mean_equal(found["answers"], naive),
        equal_texts=sum(ours == reference for ours, reference in zip(found["answers"], naive, strict=False)),
    )


def mean_equal(answers: Sequence[Sequence[int]], references: Sequence[Sequence[int]]) -> float:
    """Mean share of an answer before its first token that differs; over those for which there is a reference."""
    shares = []
    for ours, reference in zip(answers, references, strict=False):
        same = next((i for i, (a, b) in enumerate(zip(ours, reference, strict=False)) if a != b), len(reference))
        shares.append(same / len(reference))
    return sum(shares) / len(shares)


def quarter_budget(pack: Pack, arguments: argparse.Namespace) -> str:
    """The smallest budget in which the naive service keeps a quarter of the layers in memory."""
    command = [sys.executable, "-m", "decode_service", str(pack.path), "--show-runtime", "--log-level", "error"]
    runtime_bytes = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    shape = arguments.shapes[0]
    settings = DecodeSettings(
        context_length=2 * shape.prompt_tokens + shape.output_tokens,
        batch=1,
        draft_length=0,
        receives=False,
        prompt_tokens=LOCAL_PASS_TOKENS,
    )
    demand = decode_demand(pack, None, settings, runtime_bytes)
    budget_bytes = demand.smallest_budget_bytes
    while len(plan_memory(budget_bytes, demand).residency.resident) < pack.spec.layers // 4:
        budget_bytes += QUARTER_STEP_BYTES
    return f"{budget_bytes >> 20}MiB"


COLUMNS = (
    *("levers", "tokens/s", "CPU s a 1,000", "peak MiB", "in memory", "reports a shift", "cost a 1,000"),
    *("× cheaper", "equal tokens", "equal texts"),
)


def rows(results: Sequence[Result], price_per_hour: float) -> list[list[str]]:
    """The table's lines; the first result is the naive one."""
    return [
        [
            result.case,
            f"{result.output_tokens / result.wall_s:.1f}",
            f"{result.processor_s / result.output_tokens * 1e3:.1f}",
            f"{result.peak_rss_bytes >> 20}" if result.peak_rss_bytes else "",
            str(result.resident_layers) if result.resident_layers is not None else "",
            f"{SHIFT_S / result.report_s:,.0f}",
            f"{result.report_s * 1000 / 3600 * price_per_hour:.3f}",
            f"{results[0].report_s / result.report_s:.2f}",
            f"{result.equal_tokens:.0%}",
            f"{result.equal_texts} of {min(result.reports, results[0].reports)}",
        ]
        for result in results
    ]


def _shape(text: str) -> Shape:
    prompt, _, output = text.partition(":")
    return Shape(int(prompt), int(output))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--bf16", metavar="PACK", help="the unquantized model (the embedded one)")
    add("--int8", metavar="PACK", help="the same model in int8")
    add("--copy", metavar="PACK", help="the same model in nf4: drafts then come from it, else from the text")
    add("--checkpoint", metavar="FOLDER", help="the same weights as a Hugging Face folder, for transformers")
    add("--settings", default="fits,quarter")
    add("--fits", default="4GiB", metavar="SIZE", help="budget in which all layers stay (%(default)s)")
    add("--quarter", metavar="SIZE", help="budget in which a quarter of them stay (planned)")
    add("--shapes", type=_shape, nargs="+", default=[Shape(300, 120)], metavar="PROMPT:OUTPUT")
    add("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help="the naive one has to be first")
    add("--reports", type=int, default=64)
    add("--alone", type=int, default=4, help="reports for rows without batching (%(default)s)")
    add("--batch", type=int, default=32)
    add("--price-per-hour", type=float, default=0.10, help="of the machine, in any currency (%(default)s)")
    add("--json", type=Path, metavar="FILE")
    add("--plot", type=Path, metavar="FILE", help="needs --json or --draw")
    add("--draw", type=Path, metavar="FILE", help="JSON of an earlier run, to be plotted")
    arguments = parser.parse_args()
    if arguments.plot and not (arguments.json or arguments.draw):
        parser.error("a plot is drawn from JSON: give --json or --draw")
    if bool(arguments.bf16) != bool(arguments.int8):
        parser.error("give both packs, --bf16 and --int8, or neither")
    if arguments.cases[0] != "naive":
        parser.error("the first case has to be the naive one: all others are compared with it")
    parse_bytes(arguments.fits)
    if not arguments.bf16 and arguments.draw is None:
        from bench.embedded import embedded_pack

        arguments.bf16, arguments.int8 = (str(embedded_pack(scheme)) for scheme in ("bf16", "int8"))
    return arguments


if __name__ == "__main__":
    main()
