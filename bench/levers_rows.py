"""One row of `bench.levers`: a service with some of the levers pulled does the job, or transformers does it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from bench.levers_choice import Choice
from bench.prompts import BenchPrompt
from bench.services import service
from headrace import Client
from headrace.types import Completion

IN_ADVANCE = 2
"""Reports under way ÷ those that fit into a pass, where passes are shared: nobody waits for the next one to arrive."""


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
    "naive, again": NAIVE,
}
"""All but KV management is the line before the last addition. Naive comes first and last: the machine may change."""


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
    scheme: str
    batch: int
    """Reports that share a pass, at most."""
    reports: int
    prompt_tokens: int
    output_tokens: int
    draft_tokens: int
    accepted_tokens: int
    wall_s: float
    processor_s: float
    """Of the service."""
    peak_rss_bytes: int | None
    resident_layers: int | None
    equal_tokens: float
    """Mean share of an answer's tokens before the first that differs from the naive answer."""
    equal_texts: int
    perplexity_ratio: float
    """Of the scheme: to that of the unquantized model."""

    @property
    def report_s(self) -> float:
        """Time on the machine for one report."""
        return self.wall_s / self.reports


@dataclass(frozen=True)
class Table:
    """What all rows of a table have in common."""

    setting: str
    budget: str
    shape: Shape
    context_length: int
    """Of the services."""
    prompts: Sequence[BenchPrompt]
    alone: int
    """Prompts that rows without batching answer, one after another."""
    choice: Choice
    copy: str | None
    """The pack from which drafts come, besides the text."""


def service_row(
    table: Table, case: str, naive: Sequence[Sequence[int]], perplexity_ratio: float
) -> tuple[Result, list[list[int]]]:
    """Starts a service, warms it up, answers the prompts; returns the answers' tokens, too."""
    levers, shape = CASES[case], table.shape
    scheme = table.choice.scheme if levers.quantization else "bf16"
    batch = table.choice.batch if levers.batching else 1
    prompts = table.prompts if levers.batching else table.prompts[: table.alone]
    with (
        service(
            "decode_service", table.choice.packs[scheme], table.budget, service_options(table, levers, batch)
        ) as started,
        Client(started.address, timeout_s=24 * 3600) as client,
    ):

        def ask(prompt: BenchPrompt) -> Completion:
            return client.complete(
                messages=list(prompt.messages), max_tokens=shape.output_tokens, min_tokens=shape.output_tokens
            )

        client.complete("Hello", max_tokens=2)
        processor_s, started_s = started.processor_s, time.monotonic()
        with ThreadPoolExecutor(IN_ADVANCE * batch if levers.batching else 1) as pool:
            answers = list(pool.map(ask, prompts))
        wall_s, processor_s = time.monotonic() - started_s, started.processor_s - processor_s
        status = client.status()[0]
    tokens, usages = [list(answer.token_ids) for answer in answers], [answer.usage for answer in answers]
    result = Result(
        setting=table.setting,
        budget=table.budget,
        shape=str(shape),
        case=case,
        scheme=scheme,
        batch=batch,
        reports=len(answers),
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        output_tokens=sum(map(len, tokens)),
        draft_tokens=sum(usage.draft_tokens for usage in usages),
        accepted_tokens=sum(usage.accepted_tokens for usage in usages),
        wall_s=wall_s,
        processor_s=processor_s,
        peak_rss_bytes=status.peak_rss_bytes,
        resident_layers=status.resident_layers,
        equal_tokens=mean_equal(tokens, naive or tokens),
        equal_texts=equal_texts(tokens, naive or tokens),
        perplexity_ratio=perplexity_ratio if levers.quantization else 1.0,
    )
    return result, tokens


def service_options(table: Table, levers: Levers, batch: int) -> list[str]:
    """The command line of a row's service."""
    options = ["--batch", str(batch), "--context-length", str(table.context_length)]
    options += ["--share-prefixes", "on"] if levers.kv else ["--share-prefixes", "off", "--overcommit", "1.0"]
    if not levers.speculation:
        return [*options, "--draft", "none"]
    return [*options, "--draft", "auto", *(["--draft-pack", table.copy] if table.copy else [])]


def transformers_row(table: Table, checkpoint: str, naive: Sequence[Sequence[int]]) -> Result:
    """The naive job by transformers, in a process of its own."""
    prompts = table.prompts[: table.alone]
    command = [sys.executable, "-m", "bench.transformers_peer", checkpoint, str(table.shape.output_tokens)]
    asked = json.dumps([list(prompt.messages) for prompt in prompts])
    run = subprocess.run(command, input=asked, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"transformers failed: {run.stderr[-2000:]}")
    found = json.loads(run.stdout.splitlines()[-1])
    return Result(
        setting=table.setting,
        budget=table.budget,
        shape=str(table.shape),
        case="transformers, naive",
        scheme="bf16",
        batch=1,
        reports=len(prompts),
        prompt_tokens=found["prompt_tokens"],
        output_tokens=sum(map(len, found["answers"])),
        draft_tokens=0,
        accepted_tokens=0,
        wall_s=found["wall_s"],
        processor_s=found["processor_s"],
        peak_rss_bytes=found["peak_rss_bytes"],
        resident_layers=None,
        equal_tokens=mean_equal(found["answers"], naive),
        equal_texts=equal_texts(found["answers"], naive),
        perplexity_ratio=1.0,
    )


def mean_equal(answers: Sequence[Sequence[int]], references: Sequence[Sequence[int]]) -> float:
    """Mean share of an answer before its first token that differs; over those for which there is a reference."""
    shares = []
    for ours, reference in zip(answers, references, strict=False):
        same = next((i for i, (a, b) in enumerate(zip(ours, reference, strict=False)) if a != b), len(reference))
        shares.append(same / len(reference))
    return sum(shares) / len(shares)


def equal_texts(answers: Sequence[Sequence[int]], references: Sequence[Sequence[int]]) -> int:
    """Answers that are the same to the last token."""
    return sum(ours == reference for ours, reference in zip(answers, references, strict=False))
