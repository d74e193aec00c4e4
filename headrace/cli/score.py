"""`headrace score`: how likely texts are, as perplexity or token by token."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.cli import _options as options
from headrace.cli._connection import Connection
from headrace.errors import InputError
from headrace.score import Score, ScoreOptions, perplexity

_FORMS = ("text", "messages", "token_ids")


def score(
    target: options.DecodeTarget,
    texts: Annotated[
        list[str] | None, typer.Argument(help="Texts to score; none or - reads one from standard input.")
    ] = None,
    *,
    text: Annotated[
        list[Path] | None, typer.Option("--text", metavar="FILE", help="Score a file's text; repeatable.")
    ] = None,
    jsonl: Annotated[
        Path | None,
        typer.Option(
            "--jsonl",
            metavar="FILE",
            help='Score each line\'s {"text": …}, {"messages": […]} or {"token_ids": […]}; - is standard input.',
        ),
    ] = None,
    top_logprobs: Annotated[int, typer.Option(min=0, max=20, help="And so many of the likeliest at each place.")] = 0,
    priority: Annotated[int, typer.Option(min=-100, max=100, help="Higher is taken first.")] = 0,
    connection: Connection,
    timeout: Annotated[str, typer.Option(help="Deadline of each text, as in 90s, 30m or 2h.")] = "10m",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a text, with all tokens, as it is scored.")
    ] = False,
) -> None:
    """Print how well the model predicts texts: lower perplexity is likelier.

    The decode service needs prefill replicas, which compute scores. Exit code 0: scored. 1: a call failed. 2: a text
    cannot be scored as it is. 130: interrupted.
    """
    with options.told_errors(), connection.client(target, timeout) as client:
        scores, names = [], []
        for name, asked in _asked(texts or [], text or [], jsonl):
            found = client.score(**asked, top_logprobs=top_logprobs, priority=priority)
            if as_json:
                described = {"name": name, "perplexity": found.perplexity, **dataclasses.asdict(found)}
                print(json.dumps(described), flush=True)
            scores.append(found)
            names.append(name)
        if not as_json:
            Console(highlight=False).print(_table(names, scores))


def _asked(texts: list[str], files: list[Path], jsonl: Path | None) -> Iterator[tuple[str, ScoreOptions | Any]]:
    """What to call each text, and what to ask for it."""
    for number, given in enumerate(texts, 1):
        yield (f"text {number}", {"text": sys.stdin.read() if given == "-" else given})
    for path in files:
        yield str(path), {"text": _read(path)}
    if jsonl is not None:
        lines = _read(jsonl).splitlines()
        yield from ((f"line {number}", _line(line, number)) for number, line in enumerate(lines, 1) if line.strip())
    elif not texts and not files:
        yield "standard input", {"text": sys.stdin.read()}


def _read(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InputError(f"{path} cannot be read: {reason}") from None


def _line(line: str, number: int) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise InputError(f"line {number} is not JSON: {error}") from None
    if not isinstance(found, dict) or sum(form in found for form in _FORMS) != 1 or len(found) != 1:
        raise InputError(f'line {number} must be one of {{"text": …}}, {{"messages": […]}} and {{"token_ids": […]}}')
    return found


def _table(names: list[str], scores: list[Score]) -> Table:
    table = Table("text", "tokens", "log-probability", "perplexity")
    for name, found in zip(names, scores, strict=True):
        table.add_row(Text(name), str(len(found.token_ids)), f"{found.total_logprob:.3f}", _shown(found.perplexity))
    if len(scores) > 1:
        tokens, total = sum(len(found.token_ids) for found in scores), sum(found.total_logprob for found in scores)
        table.add_row("all", str(tokens), f"{total:.3f}", _shown(perplexity(scores)))
    return table


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
