"""A model's own chat template: from messages to the text that the model was trained to continue."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import InvalidRequestError, UnsupportedModelError


@dataclass(frozen=True)
class Message:
    """One turn of a conversation; `role` in the template's own words."""

    role: str
    content: str


class ChatTemplate:
    """A Jinja template as checkpoints carry it, run in a sandbox: it comes with the model and is not trusted.

    Gives it what `transformers` gives it (the convention that templates are written against): `messages`,
    `add_generation_prompt`, `tools` and `documents` (none), the special tokens by name, `raise_exception`,
    `strftime_now`, `tojson` without HTML escapes, `break` and `continue` in loops, `generation` blocks. Thread safe.

    Args:
        source: the template.
        special_tokens: token text by name, for example `{"bos_token": "<s>"}`.

    Raises:
        UnsupportedModelError: the template is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise UnsupportedModelError(
                f"the model's chat template is not valid: {error}; pack it with another"
            ) from None
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt that makes the model answer as the assistant.

        Raises:
            InvalidRequestError: there are no messages, or the template refuses them (an unknown role, a wrong order).
        """
        if not messages:
            raise InvalidRequestError("prompt.chat.messages is empty; send at least one message")
        try:
            return self._template.render(
                {
                    **self._special_tokens,
                    "messages": [asdict(message) for message in messages],
                    "add_generation_prompt": True,
                    "tools": None,
                    "documents": None,
                }
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            roles = [message.role[:32] for message in messages[:16]]
            raise InvalidRequestError(
                f"the model's chat template refuses these {len(messages)} messages: {error}; their roles are {roles}"
            ) from None


class _GenerationBlock(Extension):
    """`{% generation %}` marks what a model is trained on; for a prompt it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The block's body, as if the tags were not there."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
