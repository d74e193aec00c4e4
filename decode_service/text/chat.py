"""A model's own chat template: from messages to the text that the model was trained to continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from decode_service.text.conversation import Extras, Message
from shared.errors import InvalidRequestError
from shared.sandbox import compile_template, render_template, template_variables

ALWAYS_GIVEN = ("messages", "add_generation_prompt")


class ChatTemplate:
    """A Jinja template as checkpoints carry it, run in a sandbox (`shared.sandbox`). Thread safe.

    Gives it what `transformers` gives it (the convention that templates are written against): `messages`,
    `add_generation_prompt`, `tools` and `documents` (none where there are none), the special tokens by name, and the
    request's variables.

    Args:
        source: the template.
        special_tokens: token text by name, for example `{"bos_token": "<s>"}`.

    Raises:
        UnsupportedModelError: the template is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        self._reads = template_variables(source) - self._special_tokens.keys() - set(ALWAYS_GIVEN)
        self._template = compile_template(source)

    def render(self, messages: Sequence[Message], extras: Extras) -> str:
        """The prompt that makes the model answer as the assistant.

        Raises:
            InvalidRequestError: there are no messages, the template refuses them (an unknown role, a wrong order), or
                it does not read something of what it would be given.
        """
        if not messages:
            raise InvalidRequestError("prompt.chat.messages is empty; send at least one message")
        given = extras.given
        for name in given:
            if name not in self._reads:
                self._refuse(name)
        try:
            return render_template(
                self._template,
                {
                    **self._special_tokens,
                    "messages": [message.for_template() for message in messages],
                    "add_generation_prompt": True,
                    "tools": None,
                    "documents": None,
                    **given,
                },
            )
        except Exception as error:  # it is somebody else's code, and may raise anything
            roles = [message.role[:32] for message in messages[:16]]
            raise InvalidRequestError(
                f"the model's chat template refuses these {len(messages)} messages: {error}; their roles are {roles}"
            ) from None

    def _refuse(self, name: str) -> None:
        """What a template does not read would be lost without a word."""
        what = f"prompt.chat.{name}" if name in ("tools", "documents") else f"prompt.chat.template_variables[{name!r}]"
        others = ", ".join(sorted(self._reads)) or "nothing else"
        raise InvalidRequestError(
            f"{what} is given, but the model's chat template does not read it; besides messages it reads {others}"
        )
