"""What `bench.levers` decides before it measures: budgets, the scheme and batch that pay, and what a scheme costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.prompts import REPORTS_FILE
from headrace.cli._planning import Planning
from headrace.cli._shift import shift_of
from shared.config import parse_bytes
from shared.demand import DecodeSettings, decode_demand
from shared.errors import BudgetError
from shared.limits import LOCAL_PASS_TOKENS
from shared.pack.reader import Pack
from shared.perplexity import predictions, streamed_model, text_windows
from shared.shift import Job
from shared.streaming.plan import plan_memory

QUARTER_STEP_BYTES = 8 << 20
BATCHES = (4, 8, 16, 32, 64)
"""Sequences in a pass, among which the forecast chooses; at most half of the reports, so that some follow others."""


@dataclass(frozen=True)
class Choice:
    """How the levers quantization and batching are pulled."""

    packs: Mapping[str, str]
    """Scheme -> pack."""
    scheme: str
    batch: int
    forecasts: Mapping[str, float]
    """Scheme -> seconds a report, as `headrace plan` foretells them for its best batch."""


def chosen(
    packs: Mapping[str, str], job: Job, budget: str, context_length: int, scheme: str | None, batch: int | None
) -> Choice:
    """What `headrace plan` finds cheapest for a colocated process with n-gram drafts, unless it is given.

    Args:
        packs: scheme -> pack; those that are compared.
        scheme, batch: given by the user.
    """
    torch.set_num_threads(os.cpu_count() or 1)
    wanted, reports = [scheme] if scheme else list(packs), job.reports or 2 * BATCHES[-1]
    batches = [batch] if batch else [size for size in BATCHES if size == BATCHES[0] or size <= reports / 2]
    found: dict[tuple[str, int], float] = {}
    for name in wanted:
        for size in batches:
            planning = Planning(
                pack=Pack.open(Path(packs[name])),
                draft="ngram",
                draft_path=None,
                draft_length=None,
                given_acceptance=None,
                batch=size,
                context_length=context_length,
                prefix_cache=None,
                again=False,
            )
            try:
                found[name, size] = shift_of(job, parse_bytes(budget), planning, (0, 1)).recommended.report_s
            except BudgetError:  # a pass of so many does not fit
                continue
    if not found:
        raise BudgetError(f"nothing fits into {budget}; give more with --fits or --quarter")
    best = min(found, key=lambda key: found[key])
    forecasts = {name: min(s for (of, _), s in found.items() if of == name) for name, _ in found}
    return Choice(packs=packs, scheme=best[0], batch=best[1], forecasts=forecasts)


def quarter_budget(pack: Pack, context_length: int) -> str:
    """The smallest budget in which the naive service keeps a quarter of the layers in memory."""
    command = [sys.executable, "-m", "decode_service", str(pack.path), "--show-runtime", "--log-level", "error"]
    runtime_bytes = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    settings = DecodeSettings(
        context_length=min(context_length, pack.spec.context_length),
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


def perplexity_ratio(pack: str, unquantized: str, tokens: int) -> float:
    """A pack's perplexity on so many tokens of the example reports ÷ that of the unquantized one."""
    if pack == unquantized:
        return 1.0
    return _perplexity(pack, tokens) / _perplexity(unquantized, tokens)


def _perplexity(pack: str, tokens: int) -> float:
    opened = Pack.open(Path(pack))
    with closing(streamed_model(opened)) as model:
        return predictions(model, _within(text_windows(opened, _text()), tokens)).perplexity


def _text() -> str:
    lines = map(json.loads, REPORTS_FILE.read_text(encoding="utf-8").splitlines())
    return "\n\n".join(line["messages"][-1]["content"] for line in lines)


def _within(windows: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """The first windows, a part of the last one perhaps, with so many tokens together."""
    taken: list[list[int]] = []
    for window in windows:
        if tokens > 1:
            taken.append(window[:tokens])
            tokens -= len(window)
    return taken
