"""The body of an OpenAI request as a request of ours. What has no counterpart here is refused by name, never dropped.

Known are the parameters of OpenAI's chat completions and completions, and the extensions that other servers of open
models take beside them (`top_k`, `min_p`, …). What is left out has OpenAI's default, not ours: temperature 1, and 16
tokens for a completion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace.errors import InputError

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ENDPOINTS = (CHAT, COMPLETIONS)

_SAME = (
    "max_tokens",
    "temperature",
    "top_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    # extensions
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop_token_ids",
    "bad_token_ids",
    "ignore_eos",
    "min_tokens",
    "priority",
    "cache_salt",
)
"""Parameters that mean here what they mean there."""
_WITHOUT_EFFECT = ("user", "metadata")
"""Never change an answer."""
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "stream": (False,),
    "store": (False,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "modalities": (["text"],),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
"""Parameters that are taken only where they ask for what happens anyway."""


def openai_options(url: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Our options, and what the line calls the model. A parameter that is null is one that was left out.

    Raises:
        InputError: a parameter is unknown, or asks for what is not offered; the message names it.
    """
    given = {name: value for name, value in body.items() if value is not None}
    read = {**_EITHER, **(_CHAT if url == CHAT else _COMPLETIONS)}
    options: dict[str, Any] = {"temperature": 1.0} | ({"max_tokens": 16} if url == COMPLETIONS else {})
    for name, value in given.items():
        if name in _SAME:
            options[name] = value
        elif name in read:
            options |= read[name](name, value)
        elif name in _ONLY:
            _require_only(name, value)
        elif name not in _WITHOUT_EFFECT:
            known = ", ".join(sorted({*_SAME, *read, *_ONLY, *_WITHOUT_EFFECT}))
            raise InputError(f"body.{name} is unknown for {url}; known are {known}")
    if {"max_tokens", "max_completion_tokens"} <= set(given):
        raise InputError("body has max_tokens and max_completion_tokens, which are one; keep one of them")
    return options, str(given.get("model", ""))


def _require_only(name: str, value: Any) -> None:
    allowed = _ONLY[name]
    if not any(type(value) is type(one) and value == one for one in allowed):
        raise InputError(f"body.{name} is offered as {allowed[0]!r} only; leave it out")


def _model(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, str):
        raise InputError(f"body.model must be text; found {type(value).__name__}")
    return {}


def _messages(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise InputError("body.messages must be a list of objects")
    return {"messages": [_message(place, turn) for place, turn in enumerate(value)]}


def _message(place: int, turn: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in turn.items() if value is not None}
    if unknown := sorted(set(given) - {"role", "content"}):
        raise InputError(f"body.messages[{place}].{unknown[0]} is unknown; a message has role and content")
    content = given.get("content")
    if isinstance(content, list):
        given["content"] = "".join(
            _part(f"body.messages[{place}].content[{at}]", part) for at, part in enumerate(content)
        )
    return given


def _part(where: str, part: Any) -> str:
    if isinstance(part, dict) and set(part) == {"type", "text"} and part["type"] == "text":
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise InputError(f'{where} must be {{"type": "text", "text": …}}; found {kind!r}')


def _prompt(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, list) and any(isinstance(item, str | list) for item in value):
        raise InputError(f"body.prompt has {len(value)} prompts; write a line for each")
    return {"token_ids": value} if isinstance(value, list) else {"prompt": value}


def _count_of_logprobs(name: str, value: Any) -> dict[str, Any]:
    return {"logprobs": True, "top_logprobs": value}


def _as(ours: str) -> Callable[[str, Any], dict[str, Any]]:
    return lambda name, value: {ours: value}


_Reader = Callable[[str, Any], dict[str, Any]]
_EITHER: Mapping[str, _Reader] = {"model": _model}
_CHAT: Mapping[str, _Reader] = {
    "messages": _messages,
    "chat_template_kwargs": _as("template_variables"),
    "max_completion_tokens": _as("max_tokens"),
    "logprobs": _as("logprobs"),
    "top_logprobs": _as("top_logprobs"),
}
_COMPLETIONS: Mapping[str, _Reader] = {"prompt": _prompt, "logprobs": _count_of_logprobs}
