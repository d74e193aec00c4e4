"""`headrace generate`: one answer, streamed to the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from headrace.cli import _options as options
from headrace.client import Client
from headrace.types import Result
from shared.config import parse_duration


def generate(
    prompt: Annotated[str, typer.Argument(help="What to continue; - reads it from standard input.")],
    target: Annotated[str, typer.Option(help="Decode services: host:port[,host:port] or a gRPC name.")],
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user's message, in the chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="A system message before it; with --chat.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    temperature: Annotated[float, typer.Option(min=0.0, max=100.0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 keeps all tokens.")] = 0,
    top_p: Annotated[float | None, typer.Option(help="Above 0, at most 1.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Same seed, same output.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be given several times.")] = None,
    timeout: Annotated[str, typer.Option(help="Deadline, as in 90s, 30m or 2h.")] = "10m",
) -> None:
    """Stream one answer. Text goes to standard output, what it took to standard error."""
    if system is not None and not chat:
        raise typer.BadParameter("--system needs --chat: a plain prompt has no messages")
    text = sys.stdin.read() if prompt == "-" else prompt
    turns = [{"role": "system", "content": system}] if system is not None else []
    with options.told_errors(), Client(target, timeout_s=parse_duration(timeout)) as client:
        with client.generate(
            None if chat else text,
            messages=[*turns, {"role": "user", "content": text}] if chat else None,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=stop or (),
        ) as generation:
            for chunk in generation:
                print(chunk.text, end="", flush=True)
        print()
        if generation.result is not None:
            options.messages.print(_summary(generation.result), style="dim")


def _summary(result: Result) -> str:
    usage, timings = result.usage, result.timings
    rate = usage.completion_tokens / (timings.decode_ms / 1000) if timings.decode_ms else 0.0
    return (
        f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} generated ({result.finish_reason}), "
        f"first after {timings.first_token_ms / 1000:.2f} s, {rate:.1f} tokens/s, {usage.accepted_tokens} of "
        f"{usage.draft_tokens} draft tokens accepted in {usage.passes} passes"
    )
