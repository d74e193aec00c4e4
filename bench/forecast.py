"""Whether `headrace plan` foretells what a job of reports takes: first the forecast, then the same job, their ratio.

    python -m bench.forecast [PACK] --memory 600MiB [--draft none,ngram] [--json FILE]
    python -m bench.forecast --draw FILE --plot FILE      only draws what was measured before

PACK is the embedded model in int8 unless another one is given. Each case starts its services, asks them for a few
reports (the pilot), which shows what depends on the text alone: the length of prompts, how much of them is shared, and
how often a draft is right. With that, `headrace plan` foretells the seconds a report. Jobs are whole rounds of as many
reports as are under way at once, done by the same services. A ratio of 1.00 is a forecast that came true; below it the
job was faster.

The machine may change meanwhile, so that forecasts and jobs take turns: calibrate and foretell, do the job, calibrate
and foretell again, and so on. A job is held against the mean of the forecasts before and after it. Where these two
differ by more than 15 %, the repetition is dropped. The table has the middle one of those that are left, how much the
forecasts of the case differed, and what share of the cores other programs had during its job.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.disturbance import Watch
from bench.embedded import embedded_pack
from bench.forecast_result import Pilot, Repetition, Result
from bench.machine import this_machine
from bench.prompts import BenchPrompt
from bench.report import plot, read_json, show_table, write_json
from bench.reports import report_prompts
from bench.services import Started, service
from headrace import Client
from headrace.types import Completion
from shared.forecast import expected_tokens

BATCH = 16
"""Sequences that share a pass, as services have it by default."""
IN_ADVANCE = 2
"""Reports under way ÷ those that fit into a pass: nobody waits for the next one to arrive."""
AIM = 0.25
"""How far a forecast may be off."""


def main() -> None:
    """Measures what the command line asks for, and reports it."""
    arguments = _arguments()
    if arguments.draw is None:
        machine = this_machine()
        results = list(_results(arguments))
        show_table(f"{Path(arguments.pack).name}, forecast and job", COLUMNS, map(_row, results), machine)
        steady = [result for result in results if result.steady]
        within = sum(abs(result.middle.ratio - 1) <= AIM for result in steady)
        print(f"{within} of {len(steady)} forecasts within {AIM:.0%}")
        for result in results:
            if not result.steady:
                print(f"{result.arrangement}, {result.draft}: the machine changed in every repetition; measure again")
        if arguments.json:
            write_json(arguments.json, machine, pack=Path(arguments.pack).name, results=[*map(_json, results)])
    if arguments.plot:
        draw(arguments.draw or arguments.json, arguments.plot)


def draw(source: Path, picture: Path) -> None:
    """Draws what a run wrote: each job's forecast beside what it took."""
    content = read_json(source)
    results = content["results"]
    with plot(picture, 1, f"{content['pack']}; seconds a report") as (place,):
        names = [f"{result['arrangement']}\n{result['draft']}, {result['memory']}" for result in results]
        for shift, key in ((-0.2, "forecast_s"), (0.2, "measured_s")):
            heights = [result[key] for result in results]
            place.bar([at + shift for at in range(len(results))], heights, 0.4, label=key.removesuffix("_s"))
        place.set_xticks(range(len(results)), names, fontsize=7)
        place.set(ylabel="seconds a report")
        place.legend()


def _results(arguments: argparse.Namespace) -> Iterator[Result]:
    prompts = report_prompts(arguments.pilot + arguments.reports + BATCH, arguments.prompt_tokens)
    for arrangement in arguments.arrangements.split(","):
        for draft in arguments.draft.split(","):
            result = _result(arrangement, draft, prompts, arguments)
            shown = ", ".join(f"{repetition.ratio:.2f}" for repetition in result.repetitions)
            print(f"{arrangement}, {draft}: measured ÷ foretold {shown}", flush=True)
            yield result


def _result(arrangement: str, draft: str, prompts: Sequence[BenchPrompt], arguments: argparse.Namespace) -> Result:
    with (
        _services(arrangement, draft, arguments) as services,
        Client(services[-1].address, timeout_s=24 * 3600) as client,
    ):
        _answers(client, prompts[:1], arguments.output_tokens, 1)  # what all prompts begin with is known from here on
        pilot = _pilot(draft, _answers(client, prompts[1 : arguments.pilot], arguments.output_tokens, BATCH))
        fleet = _forecast(arrangement, draft, pilot, arguments)
        decode = fleet["stages"][-1]
        at_once = decode["at_once"]
        asked = prompts[arguments.pilot :][: -(-arguments.reports // at_once) * at_once]
        repetitions = []
        for _ in range(arguments.repetitions):
            before_s, watch = fleet["report_s"], Watch([lambda each=each: each.processor_s for each in services])
            started_s = time.monotonic()
            answers = _answers(client, asked, arguments.output_tokens, IN_ADVANCE * at_once)
            measured_s, others = (time.monotonic() - started_s) / len(answers), watch.others_share()
            fleet = _forecast(arrangement, draft, pilot, arguments)
            repetitions.append(Repetition(before_s, fleet["report_s"], measured_s, _tokens_a_pass(answers), others))
        resident_layers = client.status()[0].resident_layers
    return Result(
        arrangement=arrangement,
        draft=draft,
        memory=arguments.memory,
        reports=len(asked),
        output_tokens=arguments.output_tokens,
        pilot=pilot,
        draft_length=decode["draft_length"],
        at_once=at_once,
        resident_layers=resident_layers,
        bound_by=decode["bound_by"],
        repetitions=repetitions,
    )


def _json(result: Result) -> dict[str, Any]:
    middle = result.middle
    return asdict(result) | {
        "forecast_s": middle.forecast_s,
        "measured_s": middle.measured_s,
        "ratio": middle.ratio,
        "steady": len(result.steady),
        "changed": result.changed,
    }


@contextmanager
def _services(arrangement: str, draft: str, arguments: argparse.Namespace) -> Iterator[list[Started]]:
    """A prefill process, where there is one, and last the decode process."""
    options = ["--context-length", str(_context(arguments)), "--draft", draft]
    options += ["--draft-pack", arguments.draft_pack] if draft in ("self", "model") else []
    if arrangement == "colocated":
        with service("decode_service", arguments.pack, arguments.memory, options) as decode:
            yield [decode]
        return
    with (
        service("prefill_service", arguments.pack, arguments.memory, options[:2]) as prefill,
        service("decode_service", arguments.pack, arguments.memory, [*options, "--prefill", prefill.address]) as decode,
    ):
        yield [prefill, decode]


def _answers(client: Client, prompts: Sequence[BenchPrompt], output_tokens: int, concurrency: int) -> list[Completion]:
    def ask(prompt: BenchPrompt) -> Completion:
        return client.complete(messages=list(prompt.messages), max_tokens=output_tokens, min_tokens=output_tokens)

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(ask, prompts))


def _pilot(draft: str, answers: Sequence[Completion]) -> Pilot:
    usages = [answer.usage for answer in answers]
    drafted = sum(usage.draft_tokens for usage in usages) / sum(usage.passes for usage in usages)
    found = _tokens_a_pass(answers)
    length = 0 if draft == "none" else max(1, round(drafted))
    return Pilot(
        prompt_tokens=round(sum(usage.prompt_tokens for usage in usages) / len(usages)),
        shared_tokens=_shared_tokens(answers),
        draft_length=length,
        acceptance=_acceptance(found, length) if length else 0.0,
        tokens_a_pass=found,
    )


def _shared_tokens(answers: Sequence[Completion]) -> int:
    """What prompts usually found in a cache of either stage."""
    cached = sorted(answer.usage.cached_tokens for answer in answers)
    return cached[len(cached) // 2]


def _tokens_a_pass(answers: Sequence[Completion]) -> float:
    return sum(answer.usage.completion_tokens for answer in answers) / sum(answer.usage.passes for answer in answers)


def _acceptance(tokens_a_pass: float, length: int) -> float:
    """The chance with which chains of that length yield so many tokens; what was not proposed counts as wrong."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, length) < tokens_a_pass else (low, middle)
    return low


def _forecast(arrangement: str, draft: str, pilot: Pilot, arguments: argparse.Namespace) -> dict[str, Any]:
    """What `headrace plan` says of the arrangement."""
    command = [sys.executable, "-c", "from headrace.cli import main; main()", "plan", arguments.pack]
    command += ["--memory", arguments.memory, "--context-length", str(_context(arguments)), "--recalibrate", "--json"]
    command += ["--prompt-tokens", str(pilot.prompt_tokens), "--output-tokens", str(arguments.output_tokens)]
    command += ["--shared-tokens", str(pilot.shared_tokens), "--draft", draft]
    command += ["--draft-pack", arguments.draft_pack] if draft in ("self", "model") else []
    if pilot.draft_length:
        command += ["--draft-length", str(pilot.draft_length), "--acceptance", f"{pilot.acceptance:.4f}"]
    command += ["--prefills", "0" if arrangement == "colocated" else "1", "--decodes", "1"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(run.stderr)
    fleets: list[dict[str, Any]] = json.loads(run.stdout)["shift"]["fleets"]
    return next(fleet for fleet in fleets if fleet["arrangement"] == arrangement)


def _context(arguments: argparse.Namespace) -> int:
    return int(arguments.context_length or 2 * arguments.prompt_tokens + arguments.output_tokens)


COLUMNS = (
    *("processes", "draft", "reports", "prompt", "shared", "acceptance", "tokens a pass", "at once", "in memory"),
    *("s foretold", "s measured", "ratio", "steady", "machine changed", "others had", "bound by"),
)


def _row(result: Result) -> list[str]:
    pilot, middle = result.pilot, result.middle
    return [
        result.arrangement,
        f"{result.draft}, {result.draft_length}" if result.draft_length else result.draft,
        str(result.reports),
        str(pilot.prompt_tokens),
        str(pilot.shared_tokens),
        f"{pilot.acceptance:.2f}" if pilot.draft_length else "",
        f"{middle.tokens_a_pass:.2f}",
        str(result.at_once),
        str(result.resident_layers),
        f"{middle.forecast_s:.3f}",
        f"{middle.measured_s:.3f}",
        f"{middle.ratio:.2f}",
        f"{len(result.steady)} of {len(result.repetitions)}",
        f"{result.changed - 1:.0%}",
        f"{middle.others_share:.0%}",
        result.bound_by,
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("pack", nargs="?", metavar="PACK", help="the model (the embedded one in int8)")
    add("--memory", default="600MiB", metavar="SIZE", help="of each process (%(default)s)")
    add("--arrangements", default="colocated,together", help="(%(default)s); together: a process of each stage")
    add("--draft", default="none,ngram", metavar="KIND[,…]", help="(%(default)s)")
    add("--draft-pack", metavar="PACK", help="for the drafts self and model")
    add("--reports", type=int, default=64, help="of a job, at least (%(default)s)")
    add("--repetitions", type=int, default=3, help="of each job, between forecasts (%(default)s)")
    add("--pilot", type=int, default=BATCH + 1, help="reports before the forecast, at least 2 (%(default)s)")
    add("--prompt-tokens", type=int, default=300, metavar="N", help="about (%(default)s)")
    add("--output-tokens", type=int, default=120, metavar="N", help="exactly (%(default)s)")
    add("--context-length", type=int, metavar="N", help="of the services (twice the prompts and the answers)")
    add("--json", type=Path, metavar="FILE")
    add("--plot", type=Path, metavar="FILE", help="needs --json or --draw")
    add("--draw", type=Path, metavar="FILE", help="JSON of an earlier run, to be plotted")
    arguments = parser.parse_args()
    if arguments.plot and not (arguments.json or arguments.draw):
        parser.error("a plot is drawn from JSON: give --json or --draw")
    if arguments.pilot < 2:
        parser.error("the pilot needs two reports: the first one finds nothing in a prefix cache")
    if arguments.pack is None and arguments.draw is None:
        arguments.pack = str(embedded_pack("int8"))
    return arguments


if __name__ == "__main__":
    main()
