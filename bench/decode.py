"""How fast decode generates, by draft and batch: tokens/s, tokens a pass, acceptance, share of the limit.

    python -m bench.decode --pack PACK --memory 2GiB --drafts none,ngram,self --self-pack PACK --batches 1,4

Every case is a colocated decode service of its own, asked through gRPC: prompts are computed in the same passes. All
cases answer the same prompts greedily; texts are compared with those of the first case. The limit beside each result
is what the disk allows: tokens of a walk over the layers ÷ the time to read the streamed layers once, at the bandwidth
measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.prompts import BenchPrompt, bench_prompts
from headrace import Client
from headrace.types import Completion, ServerStatus


@dataclass(frozen=True)
class Case:
    """One configuration of the service and the load on it."""

    draft: str
    batch: int


@dataclass(frozen=True)
class Result:
    """What one case measured."""

    case: Case
    requests: int
    tokens: int
    wall_s: float
    """First request sent to last answer received: prompts included."""
    tokens_per_s: float
    decode_tokens_per_s: float
    """Without prompts: tokens after each request's first ÷ the time from the first to the last of them."""
    tokens_per_pass: float
    """Of one sequence."""
    acceptance: float
    passes: int
    streamed_bytes_per_pass: float
    limit_tokens_per_s: float | None
    """None when nothing is streamed."""
    peak_rss_bytes: int
    resident_layers: int
    equal_texts: int
    """Answers equal to those of the first case."""
    acceptance_by_category: dict[str, float] = field(default_factory=dict)


def main() -> None:
    """Runs all cases and reports."""
    arguments = _arguments()
    prompts = bench_prompts()
    disk_bytes_per_s = read_bandwidth(Path(arguments.pack))
    results: list[Result] = []
    texts: dict[int, str] = {}
    for batch in map(int, arguments.batches.split(",")):
        for draft in arguments.drafts.split(","):
            result = run_case(Case(draft, batch), arguments, prompts, texts, disk_bytes_per_s)
            results.append(result)
            print_table(results, disk_bytes_per_s)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        report = {"pack": Path(arguments.pack).name, "memory": arguments.memory, "disk_bytes_per_s": disk_bytes_per_s}
        report["results"] = [asdict(result) for result in results]
        arguments.json.write_text(json.dumps(report, indent=1))


def run_case(
    case: Case,
    arguments: argparse.Namespace,
    prompts: list[BenchPrompt],
    texts: dict[int, str],
    disk_bytes_per_s: float,
) -> Result:
    """Starts a service, warms it up, answers the prompts, and sums up."""
    count = max(arguments.requests, case.batch)
    chosen = prompts[:count]
    with decode_service(case, arguments) as address, Client(address, timeout_s=3600) as client:
        client.complete("Hello", max_tokens=2)
        before = client.status()[0]
        started_s = time.monotonic()
        with ThreadPoolExecutor(case.batch) as pool:
            answers = list(
                pool.map(
                    lambda prompt: client.complete(messages=list(prompt.messages), max_tokens=arguments.max_tokens),
                    chosen,
                )
            )
        wall_s = time.monotonic() - started_s
        after = client.status()[0]
    for index, answer in enumerate(answers):
        texts.setdefault(index, answer.text)
    return _result(case, chosen, answers, wall_s, before, after, texts, disk_bytes_per_s)


@contextmanager
def decode_service(case: Case, arguments: argparse.Namespace) -> Iterator[str]:
    """A colocated decode service; its address."""
    command = [sys.executable, "-m", "decode_service", arguments.pack, "--memory", arguments.memory]
    command += ["--batch", str(case.batch), "--draft", case.draft, "--context-length", str(arguments.context_length)]
    command += ["--log-level", "warning"]
    if case.draft == "self":
        command += ["--draft-pack", arguments.self_pack]
    if arguments.draft_length:
        command += ["--draft-length", str(arguments.draft_length)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            if not ready:
                sys.exit(f"the service did not start: {' '.join(command)}")
            yield json.loads(ready)["address"]
        finally:
            process.terminate()


def read_bandwidth(pack: Path, seconds: float = 3.0) -> float:
    """Bytes/s of reading the pack's layers past the page cache with the service's own readers and request size."""
    from shared.pack.reader import Pack
    from shared.streaming.plan import Residency
    from shared.streaming.stream import LayerStream

    stream = LayerStream(Pack.open(pack), Residency(frozenset(), slots=4))
    for _ in stream.walk():  # verifies the digests
        pass
    before, started_s = stream.streamed_bytes, time.monotonic()
    while time.monotonic() - started_s < seconds:
        for _ in stream.walk():
            pass
    bandwidth = (stream.streamed_bytes - before) / (time.monotonic() - started_s)
    stream.close()
    return bandwidth


def print_table(results: list[Result], disk_bytes_per_s: float) -> None:
    """All results so far; the speed-up is over no draft at the same batch."""
    table = Table(title=f"decode, colocated; disk {disk_bytes_per_s / 1e9:.2f} GB/s")
    for column in ("batch", "draft", "tokens/s", "decode only", "× none", "tokens/pass", "accepted", "s/pass"):
        table.add_column(column, justify="right")
    for column in ("limit", "of limit", "peak MiB", "equal texts"):
        table.add_column(column, justify="right")
    plain = {result.case.batch: result.tokens_per_s for result in results if result.case.draft == "none"}
    for result in results:
        base, limit = plain.get(result.case.batch), result.limit_tokens_per_s
        table.add_row(
            str(result.case.batch),
            result.case.draft,
            f"{result.tokens_per_s:.2f}",
            f"{result.decode_tokens_per_s:.2f}",
            f"{result.tokens_per_s / base:.2f}" if base else "",
            f"{result.tokens_per_pass:.2f}",
            f"{result.acceptance:.0%}",
            f"{result.wall_s / max(result.passes, 1):.3f}",
            f"{limit:.2f}" if limit else "",
            f"{result.tokens_per_s / limit:.0%}" if limit else "",
            f"{result.peak_rss_bytes >> 20}",
            f"{result.equal_texts} of {result.requests}",
        )
    Console(width=140).print(table)


def _result(
    case: Case,
    prompts: list[BenchPrompt],
    answers: list[Completion],
    wall_s: float,
    before: ServerStatus,
    after: ServerStatus,
    texts: dict[int, str],
    disk_bytes_per_s: float,
) -> Result:
    tokens = sum(answer.usage.completion_tokens for answer in answers)
    passes = after.passes - before.passes
    streamed_per_pass = (after.streamed_bytes - before.streamed_bytes) / max(passes, 1)
    drafted: dict[str, int] = defaultdict(int)
    accepted: dict[str, int] = defaultdict(int)
    for prompt, answer in zip(prompts, answers, strict=True):
        drafted[prompt.category] += answer.usage.draft_tokens
        accepted[prompt.category] += answer.usage.accepted_tokens
    decode_s = sum(answer.timings.decode_ms for answer in answers) / 1e3 / min(case.batch, len(answers))
    limit = tokens / passes / (streamed_per_pass / disk_bytes_per_s) if streamed_per_pass else None
    return Result(
        case=case,
        requests=len(answers),
        tokens=tokens,
        wall_s=wall_s,
        tokens_per_s=tokens / wall_s,
        decode_tokens_per_s=(tokens - len(answers)) / max(decode_s, 1e-9),
        tokens_per_pass=(tokens - len(answers)) / max(1, sum(answer.usage.passes for answer in answers) - len(answers)),
        acceptance=sum(accepted.values()) / max(1, sum(drafted.values())),
        passes=passes,
        streamed_bytes_per_pass=streamed_per_pass,
        limit_tokens_per_s=limit,
        peak_rss_bytes=after.peak_rss_bytes,
        resident_layers=after.resident_layers,
        equal_texts=sum(answer.text == texts[index] for index, answer in enumerate(answers)),
        acceptance_by_category={name: accepted[name] / max(1, drafted[name]) for name in sorted(drafted)},
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--pack", required=True)
    add("--self-pack", help="a low-bit pack of the same model, for the draft `self`")
    add("--memory", default="2GiB")
    add("--drafts", default="none,ngram")
    add("--draft-length", type=int, help="fixed; otherwise what pays")
    add("--batches", default="1,4,8")
    add("--requests", type=int, default=1, help="at least this many, and at least one for each place in the batch")
    add("--max-tokens", type=int, default=64)
    add("--context-length", type=int, default=1024)
    add("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
