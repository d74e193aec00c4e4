"""The tables and the picture of `bench.decode`."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from bench.decode_result import PEER, Case, Result
from bench.report import plot, read_json

COLUMNS = (
    *("budget, resident", "batch", "draft", "tokens/s", "decode", "× none", f"× {PEER}", "a pass", "accepted"),
    *("disk GB/s", "limit", "bound by", "of limit", "peak MiB", "equal"),
)


def rows(results: Sequence[Result]) -> list[list[str]]:
    """One line of the table for each case, over its rounds."""
    cases: dict[Case, list[Result]] = defaultdict(list)
    for result in results:
        cases[result.case].append(result)
    return [
        _cells(case, rounds, *(cases.get(Case(case.memory, case.batch, base), ()) for base in ("none", PEER)))
        for case, rounds in cases.items()
    ]


def _cells(case: Case, rounds: Sequence[Result], plain: Sequence[Result], peer: Sequence[Result]) -> list[str]:
    def median(values: list[float]) -> float:
        return statistics.median(values)

    def over(bases: Sequence[Result]) -> str:
        """The ratio within each round; the last one may have been interrupted."""
        speedups = [ours.tokens_per_s / base.tokens_per_s for ours, base in zip(rounds, bases, strict=False)]
        return f"{median(speedups):.2f}" if speedups else ""

    if case.draft == PEER:
        speed = f"{median([r.tokens_per_s for r in rounds]):.2f}"
        peak = f"{max(r.peak_rss_bytes for r in rounds) >> 20}"
        equal = f"{min(r.equal_texts for r in rounds)} of {rounds[0].requests}"
        return ["", str(case.batch), case.draft, speed, "", over(plain), *[""] * 7, peak, equal]
    return [
        f"{case.memory}, {rounds[0].resident_layers}",
        str(case.batch),
        case.draft,
        f"{median([r.tokens_per_s for r in rounds]):.2f}",
        f"{median([r.decode_tokens_per_s for r in rounds]):.2f}",
        over(plain),
        over(peer),
        f"{median([r.tokens_per_pass for r in rounds]):.2f}",
        f"{median([r.acceptance for r in rounds]):.0%}",
        f"{median([r.disk_bytes_per_s for r in rounds]) / 1e9:.2f}",
        f"{median([r.limit_tokens_per_s for r in rounds]):.2f}",
        statistics.mode(r.bound_by for r in rounds),
        f"{median([r.tokens_per_s / r.limit_tokens_per_s for r in rounds]):.0%}",
        f"{max(r.peak_rss_bytes for r in rounds) >> 20}",
        f"{min(r.equal_texts for r in rounds)} of {rounds[0].requests}",
    ]


def category_rows(results: Sequence[Result]) -> list[list[str]]:
    """Acceptance by kind of prompt: one column for each draft."""
    drafts = list(dict.fromkeys(result.draft for result in results if result.draft != PEER))
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
