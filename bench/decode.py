"""How fast decode generates, by draft and batch: tokens/s, tokens a pass, acceptance, share of the limit.

    python -m bench.decode PACK --memory 2GiB --drafts none,ngram,self --self-pack PACK --batches 1,4 [--json FILE]
    python -m bench.decode --draw FILE --plot FILE      only draws what was measured before

Every case is a colocated decode service of its own, asked through gRPC: prompts are computed in the same passes. All
cases answer the same prompts greedily, one from each category in turn; answers are compared with those of the first.
The cases of a batch size come in rounds, so that a machine whose speed changes changes all of them; what is shown is
the median over the rounds, and the ratio to no draft that of the rounds' own ratios. `--prompt-tokens` makes all
prompts equally long. With `--checkpoint`, transformers answers the prompts of batch 1 in each round, too, one by one.

What the limit beside each result is says `bench.decode_limits`. JSON is written after every case.
"""

from __future__ import annotations

from shared.threads import wait_passively

wait_passively()

import argparse  # noqa: E402  torch is loaded below, after the line above
import json  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections import defaultdict  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from concurrent.futures import ThreadPoolExecutor  # noqa: E402
from dataclasses import asdict  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from bench.decode_limits import (  # noqa: E402
    Bandwidths,
    Done,
    Products,
    limit,
    measure_bandwidths,
    measure_products,
)
from bench.decode_report import COLUMNS, category_rows, draw, rows  # noqa: E402
from bench.decode_result import PEER, Case, Result  # noqa: E402
from bench.machine import this_machine  # noqa: E402
from bench.prompts import BenchPrompt, bench_prompts, exact_prompts  # noqa: E402
from bench.report import show_table, write_json  # noqa: E402
from bench.services import service  # noqa: E402
from headrace import Client  # noqa: E402
from headrace.types import Completion, ServerStatus  # noqa: E402
from shared.limits import LOCAL_PASS_TOKENS  # noqa: E402
from shared.pack.reader import Pack  # noqa: E402

Answers = dict[int, tuple[int, ...]]
"""The first case's tokens, by prompt."""


def main() -> None:
    """Runs all cases and reports."""
    arguments = _arguments()
    if arguments.draw is None:
        _measure(arguments)
    if arguments.plot:
        draw(arguments.draw or arguments.json, arguments.plot)


def _measure(arguments: argparse.Namespace) -> None:
    machine, pack = this_machine(), Pack.open(Path(arguments.pack))
    name, first, results = pack.path.name, Answers(), list[Result]()

    def keep(result: Result) -> None:
        results.append(result)
        print(f"{result.memory}, batch {result.batch}, {result.draft}: {result.tokens_per_s:.2f} tokens/s", flush=True)
        if arguments.json:
            write_json(arguments.json, machine, pack=name, results=[asdict(result) for result in results])

    for memory in arguments.memory.split(","):
        for batch in map(int, arguments.batches.split(",")):
            prompts = _prompts(pack, batch, arguments)
            products = measure_products(pack)
            for _ in range(arguments.rounds):
                for draft in arguments.drafts.split(","):
                    keep(run_case(pack, Case(memory, batch, draft), prompts, arguments, first, products))
                if arguments.checkpoint and batch == 1:
                    keep(run_peer(Case(memory, batch, PEER), prompts, arguments, first))
    show_table(f"decode of {name}, colocated", COLUMNS, rows(results), machine)
    show_table("acceptance by category", ("category", *arguments.drafts.split(",")), category_rows(results), machine)


def _prompts(pack: Pack, batch: int, arguments: argparse.Namespace) -> Sequence[BenchPrompt]:
    count = max(arguments.requests, batch)
    return exact_prompts(pack, arguments.prompt_tokens)[:count] if arguments.prompt_tokens else bench_prompts()[:count]


def run_case(
    pack: Pack,
    case: Case,
    prompts: Sequence[BenchPrompt],
    arguments: argparse.Namespace,
    first: Answers,
    products: Products,
) -> Result:
    """Starts a service, answers the prompts, and sums up.

    Args:
        first: filled by whoever comes first.
    """
    before_case = measure_bandwidths(pack)
    with (
        service("decode_service", arguments.pack, case.memory, _service_arguments(case, arguments)) as started,
        Client(started.address, timeout_s=3600) as client,
    ):
        client.complete("Hello", max_tokens=2)
        before = client.status()[0]
        started_s = time.monotonic()
        with ThreadPoolExecutor(case.batch) as pool:
            answers = list(pool.map(lambda prompt: _answer(client, prompt, arguments.max_tokens), prompts))
        wall_s = time.monotonic() - started_s
        after = client.status()[0]
    after_case = measure_bandwidths(pack)
    bandwidths = Bandwidths((before_case.disk + after_case.disk) / 2, (before_case.memory + after_case.memory) / 2)
    for index, answer in enumerate(answers):
        first.setdefault(index, answer.token_ids)
    return _result(pack, case, prompts, answers, wall_s, (before, after), first, bandwidths, products)


def _answer(client: Client, prompt: BenchPrompt, max_tokens: int) -> Completion:
    if prompt.token_ids:
        return client.complete(token_ids=list(prompt.token_ids), max_tokens=max_tokens)
    return client.complete(messages=list(prompt.messages), max_tokens=max_tokens)


def run_peer(case: Case, prompts: Sequence[BenchPrompt], arguments: argparse.Namespace, first: Answers) -> Result:
    """The same prompts by transformers; loading is not counted."""
    command = [sys.executable, "-m", "bench.transformers_peer", arguments.checkpoint, str(arguments.max_tokens)]
    asked = json.dumps([prompt.token_ids or prompt.messages for prompt in prompts])
    run = subprocess.run(command, input=asked, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(run.stdout)
    tokens = sum(map(len, found["answers"]))
    return Result(
        memory=case.memory,
        batch=case.batch,
        draft=case.draft,
        requests=len(prompts),
        tokens=tokens,
        wall_s=found["wall_s"],
        decode_tokens_per_s=0.0,
        tokens_per_pass=1.0,
        passes=tokens,
        streamed_bytes_per_pass=0.0,
        disk_bytes_per_s=0.0,
        limit_tokens_per_s=0.0,
        peak_rss_bytes=found["peak_rss_bytes"],
        resident_layers=0,
        equal_texts=sum(_same(tuple(answer), first[index]) for index, answer in enumerate(found["answers"])),
        draft_tokens={},
        accepted_tokens={},
        prompt_tokens=found["prompt_tokens"],
    )


def _same(peer: tuple[int, ...], ours: tuple[int, ...]) -> bool:
    """The peer has to go on where we end; so our last token, which may be an end, is left out where it is longer."""
    shared = len(ours) if len(ours) == len(peer) else len(ours) - 1
    return peer[:shared] == ours[:shared]


def _service_arguments(case: Case, arguments: argparse.Namespace) -> list[str]:
    options = ["--batch", str(case.batch), "--draft", case.draft, "--context-length", str(arguments.context_length)]
    if case.draft == "self" or (case.draft == "auto" and arguments.self_pack):
        options += ["--draft-pack", arguments.self_pack]
    if arguments.draft_length:
        options += ["--draft-length", str(arguments.draft_length)]
    return options


def _result(
    pack: Pack,
    case: Case,
    prompts: Sequence[BenchPrompt],
    answers: Sequence[Completion],
    wall_s: float,
    statuses: tuple[ServerStatus, ServerStatus],
    first: Answers,
    bandwidths: Bandwidths,
    products: Products,
) -> Result:
    before, after = statuses
    tokens, passes = sum(answer.usage.completion_tokens for answer in answers), after.passes - before.passes
    streamed_bytes = (after.streamed_bytes - before.streamed_bytes) / max(passes, 1)
    drafted: dict[str, int] = defaultdict(int)
    accepted: dict[str, int] = defaultdict(int)
    for prompt, answer in zip(prompts, answers, strict=True):
        drafted[prompt.category] += answer.usage.draft_tokens
        accepted[prompt.category] += answer.usage.accepted_tokens
    decode_s = sum(answer.timings.decode_ms for answer in answers) / 1e3 / min(case.batch, len(answers))
    done = Done(
        tokens=tokens,
        draft_tokens=sum(drafted.values()),
        prompt_tokens=sum(answer.usage.prompt_tokens - answer.usage.cached_tokens for answer in answers),
        passes=passes,
        streamed_bytes_per_pass=streamed_bytes,
        pass_prompt_tokens=LOCAL_PASS_TOKENS,
    )
    least = limit(pack, done, bandwidths, products)
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
        limit_tokens_per_s=tokens / least.least_s,
        peak_rss_bytes=after.peak_rss_bytes,
        resident_layers=after.resident_layers,
        equal_texts=sum(answer.token_ids == first[index] for index, answer in enumerate(answers)),
        draft_tokens=dict(drafted),
        accepted_tokens=dict(accepted),
        prompt_tokens=done.prompt_tokens,
        bound_by=least.bound_by,
    )


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
    add("--prompt-tokens", type=int, metavar="N", help="all prompts so long, made of the same texts")
    add("--checkpoint", metavar="FOLDER", help="of the same model, for transformers at batch 1")
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
