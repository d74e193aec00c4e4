"""A model's own chat template: from messages to the text that the model was trained to continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from jinja2 import TemplateError

from shared.errors import InvalidRequestError, UnsupportedModelError
from shared.sandbox import template_environment


@dataclass(frozen=True)
class Message:
    """One turn of a conversation; `role` in the template's own words."""

    role: str
    content: str


class ChatTemplate:
    """A Jinja template as checkpoints carry it, run in a sandbox (`shared.sandbox`). Thread safe.

    Gives it what `transformers` gives it (the convention that templates are written against): `messages`,
    `add_generation_prompt`, `tools` and `documents` (none), the special tokens by name.

    Args:
        source: the template.
        special_tokens: token text by name, for example `{"bos_token": "<s>"}`.

    Raises:
        UnsupportedModelError: the template is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = template_environment().from_string(source)
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
