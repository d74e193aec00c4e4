"""What each lever buys: the same reports, naively served, then with one lever more at a time, and all without each one.

    headrace bench levers [--json FILE] [--plot FILE]        the embedded model; its packs are made in build/
    python -m bench.levers --bf16 PACK --int8 PACK --nf4 PACK [--copy NF4-PACK] [--json FILE] [--plot FILE]

Levers: quantization (the scheme that pays most here, as `headrace plan` foretells, or `--scheme`), batching (many
requests a pass for one, as many as pay most, or `--batch`), speculation (drafts, their length chosen by the service),
and KV management (prefixes shared between requests, blocks taken as sequences grow; without it nothing is shared and a
request reserves all it may need). Every row is the same engine, one colocated decode process. Naive is bf16, one
request at a time, without any of them; it is the first and the last row, and others are compared with the mean of the
two. Where transformers is installed it does the naive job, too, on the same weights.

Each setting has one budget for all its rows: `fits`, where all layers of the unquantized model stay, and `quarter`,
where a quarter of them do. A row without batching serves requests one after another, so fewer of them are asked
(`--alone`); its rate does not depend on their number. Cost is time on the machine × its price; processor time is the
service's. Other workloads (`--other-shapes`) have only the naive row and the one with all levers. JSON is written after
every row.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from bench.levers_choice import Choice, chosen, perplexity_ratio, quarter_budget
from bench.levers_plot import draw
from bench.levers_rows import CASES, Result, Shape, Table, service_row, transformers_row
from bench.machine import Machine, this_machine
from bench.report import show_table, write_json
from bench.reports import INSTRUCTION, report_prompts
from shared.config import parse_bytes
from shared.pack.reader import Pack
from shared.pack.texts import pack_tokenizer
from shared.shift import Job

SHIFT_S = 8 * 3600
OTHER_CASES = ("naive", "+ KV management: all")
CHANGED = 1.15
"""Naive rows that differ by more show that the machine changed."""


def main() -> None:
    """Measures what the command line asks for, and reports it."""
    arguments = _arguments()
    if arguments.draw is None:
        _measure(arguments)
    if arguments.plot:
        draw(arguments.draw or arguments.json, arguments.plot)


def _measure(arguments: argparse.Namespace) -> None:
    machine, results = this_machine(), list[Result]()
    for table, cases in _tables(arguments):
        ratio = perplexity_ratio(table.choice.packs[table.choice.scheme], arguments.bf16, arguments.quality_tokens)
        rows: list[Result] = []
        for result in _rows(table, cases, ratio, arguments.checkpoint):
            rows.append(result)
            results.append(result)
            print(f"{table.setting}, {table.shape}, {result.case}: {result.report_s:.2f} s a report", flush=True)
            if arguments.json:
                _write(arguments, machine, results)
        show_table(_title(table), COLUMNS, table_rows(rows, arguments.price_per_hour), machine)
        for line in remarks(rows, table.choice):
            print(line)


def _write(arguments: argparse.Namespace, machine: Machine, results: Sequence[Result]) -> None:
    write_json(
        arguments.json,
        machine,
        pack=Path(arguments.bf16).name,
        price_per_hour=arguments.price_per_hour,
        results=[asdict(result) for result in results],
    )


def _tables(arguments: argparse.Namespace) -> Iterator[tuple[Table, Sequence[str]]]:
    """What is measured, and in which cases."""
    unquantized = Pack.open(Path(arguments.bf16))
    packs = {name: getattr(arguments, name) for name in ("bf16", "int8", "nf4") if getattr(arguments, name)}
    shapes = [(arguments.shape, arguments.cases), *((shape, OTHER_CASES) for shape in arguments.other_shapes)]
    for setting in arguments.settings.split(","):
        for shape, cases in shapes:
            context = arguments.context_length or 2 * shape.prompt_tokens + shape.output_tokens
            budget = arguments.fits if setting == "fits" else arguments.quarter or quarter_budget(unquantized, context)
            shared = min(len(pack_tokenizer(unquantized).encode(INSTRUCTION).ids), shape.prompt_tokens - 1)
            job = Job(
                prompt_tokens=shape.prompt_tokens,
                output_tokens=shape.output_tokens,
                shared_tokens=shared,
                reports=arguments.reports,
                shift_s=SHIFT_S,
            )
            choice = chosen(packs, job, budget, context, arguments.scheme, arguments.batch)
            prompts = report_prompts(arguments.reports, shape.prompt_tokens)
            yield Table(setting, budget, shape, context, prompts, arguments.alone, choice, arguments.copy), cases


def _rows(table: Table, cases: Sequence[str], ratio: float, checkpoint: str | None) -> Iterator[Result]:
    """All rows of a table; the first is the naive one."""
    naive: list[list[int]] = []
    for case in cases:
        result, answers = service_row(table, case, naive, ratio)
        naive = naive or answers
        yield result
    if checkpoint and table.setting == "fits":
        yield transformers_row(table, checkpoint, naive)


COLUMNS = (
    *("levers", "scheme", "batch", "reports", "tokens/s", "CPU s/1,000", "peak MiB", "layers", "a shift"),
    *("cost/1,000", "cheaper", "perplexity", "same tokens", "same texts", "drafts right"),
)
"""Processor seconds are for 1,000 tokens, costs for 1,000 reports; layers are those that stay in memory."""


def table_rows(results: Sequence[Result], price_per_hour: float) -> list[list[str]]:
    """The table's lines; the first result is a naive one."""
    naive_s = naive_report_s(results)
    return [
        [
            result.case,
            result.scheme,
            str(result.batch),
            str(result.reports),
            f"{result.output_tokens / result.wall_s:.1f}",
            f"{result.processor_s / result.output_tokens * 1e3:.1f}",
            f"{result.peak_rss_bytes >> 20}" if result.peak_rss_bytes else "",
            str(result.resident_layers) if result.resident_layers is not None else "",
            f"{SHIFT_S / result.report_s:,.0f}",
            f"{result.report_s * 1000 / 3600 * price_per_hour:.3f}",
            f"{naive_s / result.report_s:.2f}",
            f"{result.perplexity_ratio:.3f}",
            f"{result.equal_tokens:.0%}",
            f"{result.equal_texts} of {min(result.reports, results[0].reports)}",
            f"{result.accepted_tokens / result.draft_tokens:.0%}" if result.draft_tokens else "",
        ]
        for result in results
    ]


def naive_report_s(results: Sequence[Result]) -> float:
    """Seconds a report, naively: the mean of the rows that are."""
    found = [result.report_s for result in results if result.case.startswith("naive")]
    return sum(found) / len(found)


def remarks(results: Sequence[Result], choice: Choice) -> Iterator[str]:
    """What has to be known beside a table."""
    foretold = ", ".join(f"{scheme} {s:.3g} s" for scheme, s in choice.forecasts.items())
    yield f"Quantization: {choice.scheme}. Foretold for a report with batching and n-grams: {foretold}."
    naive = [result.report_s for result in results if result.case.startswith("naive")]
    if max(naive) > CHANGED * min(naive):
        yield (
            f"The machine changed: naive rows took {naive[0]:.3g} and {naive[-1]:.3g} s a report; "
            "measure again when nothing else runs."
        )


def _title(table: Table) -> str:
    return f"{table.setting} ({table.budget}), {table.shape} tokens"


def _shape(text: str) -> Shape:
    prompt, _, output = text.partition(":")
    return Shape(int(prompt), int(output))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--bf16", metavar="PACK", help="the unquantized model (the embedded one)")
    add("--int8", metavar="PACK", help="the same model in int8")
    add("--nf4", metavar="PACK", help="the same model in nf4")
    add("--scheme", choices=("bf16", "int8", "nf4"), help="of the lever quantization (what plan foretells to pay most)")
    add("--copy", metavar="PACK", help="the same model in nf4: drafts may come from it, too; else only from the text")
    add("--checkpoint", metavar="FOLDER", help="the same weights as a Hugging Face folder, for transformers")
    add("--settings", default="fits,quarter")
    add("--fits", default="4GiB", metavar="SIZE", help="budget in which all layers stay (%(default)s)")
    add("--quarter", metavar="SIZE", help="budget in which a quarter of them stay (planned)")
    add("--shape", type=_shape, default=Shape(300, 120), metavar="PROMPT:OUTPUT", help="of reports (%(default)s)")
    add("--other-shapes", type=_shape, nargs="*", default=[Shape(800, 40), Shape(200, 240)], metavar="PROMPT:OUTPUT")
    add("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help="the naive one has to be first")
    add("--reports", type=int, default=64, help="for rows with batching (%(default)s)")
    add("--alone", type=int, default=3, help="and without it (%(default)s)")
    add("--batch", type=int, help="reports that share a pass (4 to 64: what plan foretells to pay most)")
    add("--context-length", type=int, metavar="N", help="of the services (twice the prompts and the answers)")
    add("--quality-tokens", type=int, default=2048, help="of text, for the perplexity (%(default)s)")
    add("--price-per-hour", type=float, default=0.10, help="of the machine, in any currency (%(default)s)")
    add("--json", type=Path, metavar="FILE")
    add("--plot", type=Path, metavar="FILE", help="needs --json or --draw")
    add("--draw", type=Path, metavar="FILE", help="JSON of an earlier run, to be plotted")
    arguments = parser.parse_args()
    if arguments.plot and not (arguments.json or arguments.draw):
        parser.error("a plot is drawn from JSON: give --json or --draw")
    if arguments.cases[0] != "naive":
        parser.error("the first case has to be the naive one: all others are compared with it")
    given = [name for name in ("bf16", "int8", "nf4") if getattr(arguments, name)]
    if given and (given[0] != "bf16" or len(given) == 1):
        parser.error("give --bf16 and at least one of --int8 and --nf4, or none of them")
    parse_bytes(arguments.fits)
    if arguments.draw is None:
        if not given:
            _embedded(arguments)
        elif arguments.scheme and arguments.scheme not in given:
            parser.error(f"--scheme {arguments.scheme} needs its pack: give --{arguments.scheme}")
    return arguments


def _embedded(arguments: argparse.Namespace) -> None:
    """The embedded model in every scheme, and its checkpoint where transformers could load it."""
    from bench.embedded import embedded_checkpoint, embedded_pack

    for scheme in ("bf16", "int8", "nf4"):
        setattr(arguments, scheme, str(embedded_pack(scheme)))
    if find_spec("transformers"):
        arguments.checkpoint = arguments.checkpoint or str(embedded_checkpoint())


if __name__ == "__main__":
    main()
