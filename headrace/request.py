"""One request as users state it, checked before it travels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from headrace.chat import (
    MOST_DOCUMENTS,
    MOST_TOOLS,
    MOST_VARIABLES,
    Document,
    Message,
    Tool,
    Variables,
    is_documents,
    is_message,
    is_text,
    is_tools,
    is_variables,
)
from headrace.errors import InvalidRequest

_UINT32_END = 2**32
_UINT64_END = 2**64
_MOST_SHAPED = 1024
"""Most token ids that a request may bias, or rule out."""


class RequestOptions(TypedDict, total=False):
    """What `generate` and `complete` take besides the prompt's text."""

    messages: Sequence[Message] | None
    """A conversation, rendered with the model's own chat template; instead of a prompt."""
    tools: Sequence[Tool]
    """With messages: what the model may call, {"name": …, "description": …, "parameters": JSON schema} each; at most
    128. The answer is the model's own text, in whatever form it was trained to write calls."""
    documents: Sequence[Document]
    """With messages: what to answer from, {"title": …, "text": …} each, as the template wants it; at most 1024."""
    template_variables: Variables
    """With messages: variables of the model's template, such as {"enable_thinking": False}; at most 32."""
    token_ids: Sequence[int] | None
    """A prompt that is tokenized already; instead of a prompt."""
    max_tokens: int | None
    """Most tokens to generate, 1 or more; None leaves it to the service."""
    temperature: float
    """0 (default) is greedy; at most 100."""
    top_k: int
    """Keep only the k likeliest tokens; 0 (default) keeps all."""
    top_p: float | None
    """Keep the likeliest tokens whose probability reaches top_p; above 0, at most 1."""
    min_p: float
    """Keep only tokens at least min_p times as likely as the likeliest one; 0 (default, keeps all) to 1."""
    repetition_penalty: float | None
    """Above 1 discourages tokens that prompt or answer already have; 0.1 to 10, 1 (default) does nothing."""
    presence_penalty: float
    """Taken from the logits of tokens that the answer already has; -2 to 2."""
    frequency_penalty: float
    """Taken once for each time that the answer already has the token; -2 to 2."""
    logit_bias: Mapping[int, float]
    """Token id -> -100 to 100, added to its logit; at most 1024."""
    bad_token_ids: Sequence[int]
    """Tokens that are never chosen; at most 1024."""
    seed: int | None
    """Fixes the noise: same seed, same output. None lets the service draw one; the header reports it."""
    stop: str | Sequence[str]
    """Stop before any of these strings; at most 16."""
    stop_token_ids: Sequence[int]
    """Stop after any of these tokens."""
    ignore_eos: bool
    """Go on after the model's own end-of-sequence tokens."""
    min_tokens: int
    """Before the answer has so many tokens, those that would end it are not chosen; stop strings still end it."""
    logprobs: bool
    """Report the log-probability of each generated token."""
    top_logprobs: int
    """Report so many of the likeliest tokens at each place besides; 0 (default) to 20; needs `logprobs`."""
    request_id: str
    """Identifies the request in the services' logs; at most 128 characters."""
    priority: int
    """Requests of a higher priority are taken first; of one priority, the oldest. -100 to 100; 0 (default)."""
    cache_salt: str
    """Keys and values are reused only between prompts of the same salt, as of one tenant; at most 128 characters."""


@dataclass(frozen=True)
class Request:
    """A prompt in exactly one form, and how to continue it.

    Raises:
        InvalidRequest: a field has a wrong type or value; the message names it and what was found.
    """

    prompt: str | None = None
    messages: Sequence[Message] | None = None
    tools: Sequence[Tool] = ()
    documents: Sequence[Document] = ()
    template_variables: Variables = field(default_factory=dict)
    token_ids: Sequence[int] | None = None
    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float | None = None
    min_p: float = 0.0
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_token_ids: Sequence[int] = ()
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: bool = False
    top_logprobs: int = 0
    request_id: str = ""
    priority: int = 0
    cache_salt: str = ""

    def __post_init__(self) -> None:
        forms = [name for name in ("prompt", "messages", "token_ids") if getattr(self, name) is not None]
        if len(forms) != 1:
            found = " and ".join(forms) or "none of them"
            raise InvalidRequest(f"give exactly one of prompt, messages and token_ids; found {found}")
        for name, (holds, rule) in _RULES.items():
            value = getattr(self, name)
            if not holds(value):
                raise InvalidRequest(f"{name} must be {rule}; found {_excerpt(value)}")
        for name in ("tools", "documents", "template_variables"):
            if getattr(self, name) and self.messages is None:
                raise InvalidRequest(f"{name} go with messages, into the model's chat template; send messages too")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest(f"top_logprobs is {self.top_logprobs}, but logprobs is not set; set it too")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, also where only one was given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def _is_integer(value: Any, low: int, end: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < end


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_between(value: Any, low: float, high: float) -> bool:
    return _is_number(value) and low <= value <= high


def _is_list(value: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes) and all(map(holds, value))


def _is_token_ids(value: Any) -> bool:
    return _is_list(value, lambda token_id: _is_integer(token_id, 0, _UINT32_END))


def _is_logit_bias(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and len(value) <= _MOST_SHAPED
        and _is_token_ids(list(value))
        and all(_is_between(bias, -100, 100) for bias in value.values())
    )


def _is_stop(value: Any) -> bool:
    if isinstance(value, str):
        return is_text(value) and value != ""
    return _is_list(value, lambda text: is_text(text) and text != "") and len(value) <= 16


_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "prompt": (
        lambda value: value is None or (is_text(value) and value != ""),
        "text that is not empty, in valid Unicode",
    ),
    "messages": (
        lambda value: value is None or (_is_list(value, is_message) and len(value) > 0),
        'a list of {"role": text, "content": text}, not empty; tool_calls belong to the assistant, tool_call_id and '
        "name to the role tool",
    ),
    "tools": (is_tools, f'a list of at most {MOST_TOOLS} {{"name": text, "description": text, "parameters": object}}'),
    "documents": (is_documents, f'a list of at most {MOST_DOCUMENTS} objects of texts, as {{"title": …, "text": …}}'),
    "template_variables": (
        is_variables,
        f"a map of at most {MOST_VARIABLES} names (letters, digits, _) to true or false, numbers or text",
    ),
    "token_ids": (
        lambda value: value is None or (_is_token_ids(value) and len(value) > 0),
        "a list of token ids (integers, 0 or more), not empty",
    ),
    "max_tokens": (lambda value: value is None or _is_integer(value, 1, _UINT32_END), "an integer, 1 or more"),
    "temperature": (lambda value: _is_between(value, 0, 100), "a number from 0 to 100"),
    "top_k": (lambda value: _is_integer(value, 0, _UINT32_END), "an integer, 0 or more"),
    "top_p": (lambda value: value is None or (_is_number(value) and 0 < value <= 1), "above 0 and at most 1"),
    "min_p": (lambda value: _is_between(value, 0, 1), "a number from 0 to 1"),
    "repetition_penalty": (
        lambda value: value is None or _is_between(value, 0.1, 10),
        "a number from 0.1 to 10, 1 for none",
    ),
    "presence_penalty": (lambda value: _is_between(value, -2, 2), "a number from -2 to 2"),
    "frequency_penalty": (lambda value: _is_between(value, -2, 2), "a number from -2 to 2"),
    "logit_bias": (_is_logit_bias, f"a map of at most {_MOST_SHAPED} token ids to numbers from -100 to 100"),
    "bad_token_ids": (
        lambda value: _is_token_ids(value) and len(value) <= _MOST_SHAPED,
        f"a list of at most {_MOST_SHAPED} token ids (integers, 0 or more)",
    ),
    "seed": (lambda value: value is None or _is_integer(value, 0, _UINT64_END), "an integer from 0 to 2**64 - 1"),
    "stop": (_is_stop, "one string or a list of at most 16, none of them empty"),
    "stop_token_ids": (_is_token_ids, "a list of token ids (integers, 0 or more)"),
    "ignore_eos": (lambda value: isinstance(value, bool), "true or false"),
    "min_tokens": (lambda value: _is_integer(value, 0, _UINT32_END), "an integer, 0 or more"),
    "logprobs": (lambda value: isinstance(value, bool), "true or false"),
    "top_logprobs": (lambda value: _is_integer(value, 0, 21), "an integer from 0 to 20"),
    "request_id": (lambda value: is_text(value) and len(value) <= 128, "text of at most 128 characters"),
    "priority": (lambda value: _is_integer(value, -100, 101), "an integer from -100 to 100"),
    "cache_salt": (lambda value: is_text(value) and len(value) <= 128, "text of at most 128 characters"),
}


def _excerpt(value: Any) -> str:
    """What was found, without repeating anybody's prompt."""
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, str):
        return f"text of {len(value)} characters"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, Sequence) else type(value).__name__
