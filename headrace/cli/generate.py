"""`headrace generate`: one answer, or a conversation, streamed to the terminal."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli import _options as options
from headrace.cli._chat import converse
from headrace.cli._chat_extras import extras
from headrace.cli._connection import Connection
from headrace.client import Client
from headrace.errors import InputError
from headrace.request import RequestOptions
from headrace.types import Chunk, Result


def generate(
    target: options.DecodeTarget,
    prompt: Annotated[
        str | None, typer.Argument(help="What to continue; - reads it from standard input. None: a conversation.")
    ] = None,
    *,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user's message, in the chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="A system message before it; with --chat.")] = None,
    tools: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='What the model may call: a JSON list of {"name": …, "description": …, "parameters": …}; with --chat.',
        ),
    ] = None,
    documents: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help='What to answer from: a JSON list of {"title": …, "text": …}; with --chat.'),
    ] = None,
    template_variable: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=JSON", help="A variable of the template, as enable_thinking=false; repeatable."),
    ] = None,
    token_ids: Annotated[
        bool, typer.Option("--token-ids", help="The prompt is token ids, separated by commas or spaces.")
    ] = False,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens to generate.")] = None,
    min_tokens: Annotated[int, typer.Option(min=0, help="Do not end before so many tokens.")] = 0,
    temperature: Annotated[float, typer.Option(min=0.0, max=100.0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[
        float | None, typer.Option(help="Keep the likeliest tokens up to this probability; above 0, at most 1.")
    ] = None,
    min_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Keep tokens at least so likely, relative to the likeliest.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1 discourages tokens of prompt and answer; 0.1 to 10.")
    ] = None,
    presence_penalty: Annotated[
        float, typer.Option(min=-2.0, max=2.0, help="Discourages tokens that the answer has.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(min=-2.0, max=2.0, help="The same, for each time that it has them.")
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None, typer.Option(metavar="ID=BIAS", help="Add -100 to 100 to a token's logit; repeatable.")
    ] = None,
    bad_token_id: Annotated[list[int] | None, typer.Option(min=0, help="Never choose it; repeatable.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Same seed, same output.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; repeatable.")] = None,
    stop_token_id: Annotated[list[int] | None, typer.Option(min=0, help="Stop after it; repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's own end.")] = False,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="Report each token's log-probability (needs --json to be seen).")
    ] = False,
    top_logprobs: Annotated[int, typer.Option(min=0, max=20, help="And so many of the likeliest.")] = 0,
    priority: Annotated[int, typer.Option(min=-100, max=100, help="Higher is taken first.")] = 0,
    cache_salt: Annotated[str, typer.Option(help="Share cached prompts only with requests of the same salt.")] = "",
    request_id: Annotated[str, typer.Option(help="Names the request in the services' logs.")] = "",
    connection: Connection,
    timeout: Annotated[str, typer.Option(help="Deadline of each answer, as in 90s, 30m or 2h.")] = "10m",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole answer as one JSON object, with tokens and timings.")
    ] = False,
) -> None:
    """Stream one answer; without a prompt and with --chat, hold a conversation that keeps its history.

    Text goes to standard output, what it took to standard error. Exit code 0: answered. 1: the call failed. 2: the
    request cannot be served as it is. 130: interrupted.
    """
    with options.told_errors(), connection.client(target, timeout) as client:
        beside = extras(tools, documents, template_variable or ())
        _require_sense(prompt, chat=chat, system=system, beside=beside, token_ids=token_ids, as_json=as_json)
        settings: RequestOptions = {
            "max_tokens": max_tokens,
            "min_tokens": min_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "logit_bias": dict(map(_bias, logit_bias or ())),
            "bad_token_ids": bad_token_id or (),
            "seed": seed,
            "stop": stop or (),
            "stop_token_ids": stop_token_id or (),
            "ignore_eos": ignore_eos,
            "logprobs": logprobs,
            "top_logprobs": top_logprobs,
            "priority": priority,
            "cache_salt": cache_salt,
            "request_id": request_id,
            **beside,
        }
        turns = [{"role": "system", "content": system}] if system is not None else []
        if prompt is None:
            converse(client, settings, turns)
            return
        text = sys.stdin.read() if prompt == "-" else prompt
        if chat:
            settings["messages"] = [*turns, {"role": "user", "content": text}]
        elif token_ids:
            settings["token_ids"] = _token_ids(text)
        _answer(client, None if chat or token_ids else text, settings, as_json)


def _answer(client: Client, prompt: str | None, settings: RequestOptions, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_described(client, prompt, settings)))
        return
    with client.generate(prompt, **settings) as generation:
        for chunk in generation:
            print(chunk.text, end="", flush=True)
    print()
    if generation.result is not None:
        options.messages.print(summary(generation.result), style="dim")


def _described(client: Client, prompt: str | None, settings: RequestOptions) -> dict[str, Any]:
    with client.generate(prompt, **settings) as generation:
        chunks = list(generation)
    assert generation.header is not None  # a stream without header or result raises
    assert generation.result is not None
    return {
        **dataclasses.asdict(generation.header),
        "text": "".join(chunk.text for chunk in chunks),
        "token_ids": [token_id for chunk in chunks for token_id in chunk.token_ids],
        **dataclasses.asdict(generation.result),
        **({"logprobs": [place for chunk in chunks for place in _logprobs(chunk)]} if settings["logprobs"] else {}),
    }


def _logprobs(chunk: Chunk) -> list[dict[str, Any]]:
    return [dataclasses.asdict(place) for place in chunk.logprobs]


def summary(result: Result) -> str:
    """What an answer took, in one line."""
    usage, timings = result.usage, result.timings
    rate = usage.completion_tokens / (timings.decode_ms / 1000) if timings.decode_ms else 0.0
    return (
        f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} generated ({result.finish_reason}), "
        f"first after {timings.first_token_ms / 1000:.2f} s, {rate:.1f} tokens/s, {usage.accepted_tokens} of "
        f"{usage.draft_tokens} draft tokens accepted in {usage.passes} passes"
    )


def _require_sense(
    prompt: str | None, *, chat: bool, system: str | None, beside: RequestOptions, token_ids: bool, as_json: bool
) -> None:
    """Raises InputError where options contradict each other."""
    if prompt is None and not chat:
        raise InputError("give a prompt, or --chat for a conversation")
    if prompt is None and as_json:
        raise InputError("--json is for one answer: give a prompt")
    if system is not None and not chat:
        raise InputError("--system needs --chat: a plain prompt has no messages")
    if beside and not chat:
        raise InputError("--tools, --documents and --template-variable need --chat: they go into its template")
    if token_ids and chat:
        raise InputError("--token-ids and --chat exclude each other: a message is text")


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise InputError(f"--logit-bias {text!r} is not ID=BIAS, as in 42=-100") from None


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise InputError("with --token-ids the prompt is numbers, as in 1,2,3") from None
