"""Prompts to measure with: Spec-Bench from the folder that `HEADRACE_BENCH_DATA` names, else the example reports."""

from __future__ import annotations

import json
import os
import sysconfig
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice, zip_longest
from pathlib import Path

from decode_service.text.tokenizer import Tokenizer
from shared.pack.reader import Pack

SPEC_BENCH_FILE = "spec_bench_dev.jsonl"
_IN_CLONE = Path(__file__).parent.parent / "examples" / "reports.jsonl"
REPORTS_FILE = _IN_CLONE if _IN_CLONE.exists() else Path(sysconfig.get_path("data")) / "share/headrace/reports.jsonl"


@dataclass(frozen=True)
class BenchPrompt:
    """One conversation to answer, and the kind of text that it asks for."""

    category: str
    messages: tuple[dict[str, str], ...]
    token_ids: tuple[int, ...] = ()
    """Asked for instead of the messages where there are any."""


def bench_prompts(most_characters: int = 2000) -> list[BenchPrompt]:
    """Prompts, one category after another in turn, so that any number of them from the start is a fair mixture."""
    folder = os.environ.get("HEADRACE_BENCH_DATA")
    found = _spec_bench(Path(folder) / SPEC_BENCH_FILE) if folder else _reports()
    by_category: dict[str, list[BenchPrompt]] = {}
    for prompt in found:
        if sum(len(message["content"]) for message in prompt.messages) <= most_characters:
            by_category.setdefault(prompt.category, []).append(prompt)
    in_turn = chain.from_iterable(zip_longest(*by_category.values()))
    return [prompt for prompt in in_turn if prompt is not None]


def exact_prompts(pack: Pack, tokens: int) -> list[BenchPrompt]:
    """The same texts as prompts of exactly so many tokens: cut, or repeated."""
    tokenizer = Tokenizer(pack.tokenizer_json(), None, {})
    prompts = bench_prompts()
    # Not what several have in common before it: that would be computed once.
    encoded = [tokenizer.encode(prompt.messages[-1]["content"]) for prompt in prompts]
    return [
        replace(prompt, token_ids=tuple(islice(cycle(token_ids), tokens)))
        for prompt, token_ids in zip(prompts, encoded, strict=True)
    ]


def _spec_bench(path: Path) -> list[BenchPrompt]:
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [BenchPrompt(line["category"], ({"role": "user", "content": line["turns"][0]},)) for line in lines]


def _reports() -> list[BenchPrompt]:
    lines = map(json.loads, REPORTS_FILE.read_text(encoding="utf-8").splitlines())
    return [BenchPrompt("report", tuple(line["messages"])) for line in lines]
