"""How fast decode generates, by draft and batch: tokens/s, tokens a pass, acceptance, share of the limit.

    python -m bench.decode PACK --memory 2GiB --drafts none,ngram,self --self-pack PACK --batches 1,4 [--json FILE]
    python -m bench.decode --draw FILE --plot FILE      only draws what was measured before

Every case is a colocated decode service of its own, asked through gRPC: prompts are computed in the same passes. All
cases answer the same prompts greedily, one from each category in turn; texts are compared with those of the first case.
The cases of a batch size come in rounds, so that a machine whose speed changes changes all of them; what is shown is
the median over the rounds, and the ratio to no draft that of the rounds' own ratios.

The limit beside each result is what disk and memory allow: tokens of a pass ÷ the longer of the times to read the
streamed layers from disk and all layers from memory, once, at the bandwidths measured just before and just after.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.machine import memory_bytes_per_s, this_machine
from bench.prompts import BenchPrompt, bench_prompts
from bench.report import plot, read_json, show_table, write_json
from bench.services import service
from headrace import Client
from headrace.types import Completion, ServerStatus
from shared.pack.reader import Pack
from shared.streaming.plan import Residency
from shared.streaming.stream import LayerStream

DISK_S = 1.0
"""How long the disk is measured before and after each case."""


@dataclass(frozen=True)
class Case:
    """One configuration of the service and the load on it."""

    memory: str
    batch: int
    draft: str


@dataclass(frozen=True)
class Bandwidths:
    """Of the machine, bytes/s."""

    disk: float
    """Of the pack's own layers, past the page cache, with the service's readers."""
    memory: float


@dataclass(frozen=True)
class Result:
    """What one case measured in one round."""

    memory: str
    batch: int
    draft: str
    requests: int
    tokens: int
    wall_s: float
    """First request sent to last answer received: prompts included."""
    decode_tokens_per_s: float
    """Without prompts: tokens after each request's first ÷ the time from the first to the last of them."""
    tokens_per_pass: float
    """Of one sequence."""
    passes: int
    streamed_bytes_per_pass: float
    disk_bytes_per_s: float
    limit_tokens_per_s: float
    peak_rss_bytes: int
    resident_layers: int
    equal_texts: int
    """Answers equal to those of the first case."""
    draft_tokens: dict[str, int]
    """By category of prompt."""
    accepted_tokens: dict[str, int]

    @property
    def case(self) -> Case:
        return Case(self.memory, self.batch, self.draft)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s

    @property
    def acceptance(self) -> float:
        return sum(self.accepted_tokens.values()) / max(1, sum(self.draft_tokens.values()))


def main() -> None:
    """Runs all cases and reports."""
    arguments = _arguments()
    if arguments.draw is None:
        _measure(arguments)
    if arguments.plot:
        draw(arguments.draw or arguments.json, arguments.plot)


def _measure(arguments: argparse.Namespace) -> None:
    machine, pack = this_machine(), Pack.open(Path(arguments.pack))
    texts: dict[int, str] = {}
    results: list[Result] = []
    for memory in arguments.memory.split(","):
        for batch in map(int, arguments.batches.split(",")):
            for _ in range(arguments.rounds):
                for draft in arguments.drafts.split(","):
                    result = run_case(pack, Case(memory, batch, draft), arguments, texts)
                    results.append(result)
                    print(f"{memory}, batch {batch}, {draft}: {result.tokens_per_s:.2f} tokens/s", flush=True)
    name = Path(arguments.pack).name
    show_table(f"decode of {name}, colocated", COLUMNS, rows(results), machine)
    show_table("acceptance by category", ("category", *arguments.drafts.split(",")), category_rows(results), machine)
    if arguments.json:
        write_json(arguments.json, machine, pack=name, results=[asdict(result) for result in results])


def run_case(pack: Pack, case: Case, arguments: argparse.Namespace, texts: dict[int, str]) -> Result:
    """Starts a service, warms it up, answers the prompts, and sums up.

    Args:
        texts: the first case's answers by prompt; filled by whoever comes first.
    """
    prompts = bench_prompts()[: max(arguments.requests, case.batch)]
    bandwidths = measure_bandwidths(pack)
    with (
        service("decode_service", arguments.pack, case.memory, _service_arguments(case, arguments)) as started,
        Client(started.address, timeout_s=3600) as client,
    ):
        client.complete("Hello", max_tokens=2)
        before = client.status()[0]
        started_s = time.monotonic()
        with ThreadPoolExecutor(case.batch) as pool:
            answers = list(
                pool.map(
                    lambda prompt: client.complete(messages=list(prompt.messages), max_tokens=arguments.max_tokens),
                    prompts,
                )
            )
        wall_s = time.monotonic() - started_s
        after = client.status()[0]
    later = measure_bandwidths(pack)
    bandwidths = Bandwidths((bandwidths.disk + later.disk) / 2, (bandwidths.memory + later.memory) / 2)
    for index, answer in enumerate(answers):
        texts.setdefault(index, answer.text)
    return _result(pack, case, prompts, answers, wall_s, (before, after), texts, bandwidths)


def _service_arguments(case: Case, arguments: argparse.Namespace) -> list[str]:
    options = ["--batch", str(case.batch), "--draft", case.draft, "--context-length", str(arguments.context_length)]
    if case.draft == "self" or (case.draft == "auto" and arguments.self_pack):
        options += ["--draft-pack", arguments.self_pack]
    if arguments.draft_length:
        options += ["--draft-length", str(arguments.draft_length)]
    return options


def measure_bandwidths(pack: Pack) -> Bandwidths:
    """Disk and memory, now."""
    with closing(LayerStream(pack, Residency(frozenset(), slots=min(4, pack.spec.layers)))) as stream:
        started_s, walks = time.monotonic(), 0
        while time.monotonic() - started_s < DISK_S or walks < 2:
            if walks == 1:  # the first one verifies the digests
                before, started_s = stream.streamed_bytes, time.monotonic()
            for _ in stream.walk():
                pass
            walks += 1
        disk = (stream.streamed_bytes - before) / (time.monotonic() - started_s)
    return Bandwidths(disk, memory_bytes_per_s())


def _result(
    pack: Pack,
    case: Case,
    prompts: Sequence[BenchPrompt],
    answers: Sequence[Completion],
    wall_s: float,
    statuses: tuple[ServerStatus, ServerStatus],
    texts: dict[int, str],
    bandwidths: Bandwidths,
) -> Result:
    before, after = statuses
    tokens, passes = sum(answer.usage.completion_tokens for answer in answers), after.passes - before.passes
    streamed_bytes = (after.streamed_bytes - before.streamed_bytes) / max(passes, 1)
    layers_bytes = pack.spec.layers * pack.layer_layout.data_bytes
    pass_s = max(streamed_bytes / bandwidths.disk, layers_bytes / bandwidths.memory)
    drafted: dict[str, int] = defaultdict(int)
    accepted: dict[str, int] = defaultdict(int)
    for prompt, answer in zip(prompts, answers, strict=True):
        drafted[prompt.category] += answer.usage.draft_tokens
        accepted[prompt.category] += answer.usage.accepted_tokens
    decode_s = sum(answer.timings.decode_ms for answer in answers) / 1e3 / min(case.batch, len(answers))
    turns = sum(answer.usage.passes for answer in answers) - len(answers)
    return Result(
        memory=case.memory,
        batch=case.batch,
        draft=case.draft,
        requests=len(answers),
        tokens=tokens,
        wall_s=wall_s,
        decode_tokens_per_s=(tokens - len(answers)) / max(decode_s, 1e-9),
        tokens_per_pass=(tokens - len(answers)) / max(1, turns),
        passes=passes,
        streamed_bytes_per_pass=streamed_bytes,
        disk_bytes_per_s=bandwidths.disk,
        limit_tokens_per_s=tokens / max(passes, 1) / pass_s,
        peak_rss_bytes=after.peak_rss_bytes,
        resident_layers=after.resident_layers,
        equal_texts=sum(answer.text == texts[index] for index, answer in enumerate(answers)),
        draft_tokens=dict(drafted),
        accepted_tokens=dict(accepted),
    )


COLUMNS = (
    *("budget, resident", "batch", "draft", "tokens/s", "decode", "× none", "a pass", "accepted"),
    *("disk GB/s", "limit", "of limit", "peak MiB", "equal"),
)


def rows(results: Sequence[Result]) -> list[list[str]]:
    """One line of the table for each case, over its rounds."""
    cases: dict[Case, list[Result]] = defaultdict(list)
    for result in results:
        cases[result.case].append(result)
    return [_cells(case, rounds, cases.get(Case(case.memory, case.batch, "none"))) for case, rounds in cases.items()]


def _cells(case: Case, rounds: Sequence[Result], plain: Sequence[Result] | None) -> list[str]:
    def median(values: list[float]) -> float:
        return statistics.median(values)

    speedups = [ours.tokens_per_s / base.tokens_per_s for ours, base in zip(rounds, plain or (), strict=False)]
    return [
        f"{case.memory}, {rounds[0].resident_layers}",
        str(case.batch),
        case.draft,
        f"{median([r.tokens_per_s for r in rounds]):.2f}",
        f"{median([r.decode_tokens_per_s for r in rounds]):.2f}",
        f"{median(speedups):.2f}" if speedups else "",
        f"{median([r.tokens_per_pass for r in rounds]):.2f}",
        f"{median([r.acceptance for r in rounds]):.0%}",
        f"{median([r.disk_bytes_per_s for r in rounds]) / 1e9:.2f}",
        f"{median([r.limit_tokens_per_s for r in rounds]):.2f}",
        f"{median([r.tokens_per_s / r.limit_tokens_per_s for r in rounds]):.0%}",
        f"{max(r.peak_rss_bytes for r in rounds) >> 20}",
        f"{min(r.equal_texts for r in rounds)} of {rounds[0].requests}",
    ]


def category_rows(results: Sequence[Result]) -> list[list[str]]:
    """Acceptance by kind of prompt: one column for each draft."""
    drafts = list(dict.fromkeys(result.draft for result in results))
    categories = sorted({category for result in results for category in result.draft_tokens})
    shares = {category: [acceptance(results, draft, category) for draft in drafts] for category in categories}
    return [[category, *("" if share is None else f"{share:.0%}" for share in row)] for category, row in shares.items()]


def acceptance(results: Sequence[Result], draft: str, category: str) -> float | None:
    """Share of a draft's tokens that were accepted in answers to prompts of one kind; None where it proposed none."""
    drafted = sum(result.draft_tokens.get(category, 0) for result in results if result.draft == draft)
    accepted = sum(result.accepted_tokens.get(category, 0) for result in results if result.draft == draft)
    return accepted / drafted if drafted else None


def draw(source: Path, picture: Path) -> None:
    """Draws what a run wrote: tokens/s by batch, and acceptance by category."""
    content = read_json(source)
    results = [Result(**result) for result in content["results"]]
    with plot(picture, 2, f"{content['pack']}; medians of the rounds") as (left, right):
        for memory, draft in dict.fromkeys((result.memory, result.draft) for result in results):
            chosen = [result for result in results if (result.memory, result.draft) == (memory, draft)]
            batches = sorted({result.batch for result in chosen})
            speeds = [statistics.median(r.tokens_per_s for r in chosen if r.batch == batch) for batch in batches]
            left.plot(batches, speeds, "o-", label=f"{draft}, {memory}")
        left.set(xlabel="requests at once", ylabel="tokens/s in all", title="decode", ylim=(0, None))
        left.set_xscale("log", base=2)
        left.legend(fontsize=7)
        categories = sorted({name for result in results for name, count in result.draft_tokens.items() if count})
        drafts = list(dict.fromkeys(result.draft for result in results if sum(result.draft_tokens.values())))
        for number, draft in enumerate(drafts):
            places = [place + number / (len(drafts) + 1) for place in range(len(categories))]
            shares = [acceptance(results, draft, category) or 0.0 for category in categories]
            right.barh(places, shares, height=1 / (len(drafts) + 1.5), label=draft)
        right.set_yticks(range(len(categories)), categories, fontsize=6)
        right.set(xlabel="share of draft tokens accepted", title="by category", xlim=(0, 1))
        right.invert_yaxis()
        right.legend(fontsize=7)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("pack", nargs="?")
    add("--self-pack", help="a low-bit pack of the same model, for the drafts `self` and `auto`")
    add("--memory", default="2GiB", help="one budget or more, as in 2GiB,8GiB")
    add("--drafts", default="none,ngram")
    add("--draft-length", type=int, help="fixed; otherwise what pays")
    add("--batches", default="1,4,8")
    add("--rounds", type=int, default=3)
    add("--requests", type=int, default=1, help="at least this many, and at least one for each place in the batch")
    add("--max-tokens", type=int, default=64)
    add("--context-length", type=int, default=1024)
    add("--json", type=Path, metavar="FILE")
    add("--plot", type=Path, metavar="FILE", help="needs --json or --draw")
    add("--draw", type=Path, metavar="FILE", help="JSON of an earlier run, to be plotted")
    arguments = parser.parse_args()
    if arguments.plot and not (arguments.json or arguments.draw):
        parser.error("a plot is drawn from JSON: give --json or --draw")
    if not (arguments.pack or arguments.draw):
        parser.error("give a pack, or --draw")
    return arguments


if __name__ == "__main__":
    main()
