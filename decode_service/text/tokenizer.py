"""A model's tokenizer and chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer as LibraryTokenizer

from decode_service.text.chat import ChatTemplate
from decode_service.text.conversation import Extras, Message
from shared.errors import InvalidRequestError, UnsupportedModelError

__all__ = ["Extras", "Message", "Tokenizer"]

NO_EXTRAS = Extras()
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """From text and messages to token ids, and back. Thread safe.

    Args:
        tokenizer_json: contents of a `tokenizer.json`, as the `tokenizers` library reads it.
        chat_template: the model's Jinja template, None where it has none.
        special_tokens: token text by name, for the template, for example `{"bos_token": "<s>"}`.

    Raises:
        UnsupportedModelError: the library cannot read the JSON, or Jinja the template.
    """

    def __init__(self, tokenizer_json: str, chat_template: str | None, special_tokens: Mapping[str, str]) -> None:
        try:
            self._library = LibraryTokenizer.from_str(tokenizer_json)
        except Exception as error:  # the library raises nothing narrower
            raise UnsupportedModelError(f"tokenizer.json cannot be read: {error}; pack the model again") from None
        # A checkpoint may carry the settings it was trained with; a prompt is never cut or filled silently.
        self._library.no_truncation()
        self._library.no_padding()
        self._template = None if chat_template is None else ChatTemplate(chat_template, special_tokens)

        vocabulary = self._library.get_vocab(with_added_tokens=True)
        added = self._library.get_added_tokens_decoder()
        special = {token_id for token_id, token in added.items() if token.special}
        self._text_ids = frozenset(vocabulary.values()) - special
        self._byte_ids = frozenset(token_id for token, token_id in vocabulary.items() if _BYTE_TOKEN.fullmatch(token))

    @property
    def vocab_size(self) -> int:
        """Tokens that the tokenizer knows; the model's own vocabulary may be padded beyond them."""
        return self._library.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain text.

        Special tokens that are written out in the text are recognized. A beginning-of-sequence token is added only
        where the tokenizer's own post-processor adds one.
        """
        return self._encode(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Message], extras: Extras = NO_EXTRAS) -> list[int]:
        """Token ids of a rendered conversation. Nothing is added: the template writes all special tokens itself.

        Raises:
            InvalidRequestError: as `render_chat`.
        """
        return self._encode(self.render_chat(messages, extras), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Message], extras: Extras = NO_EXTRAS) -> str:
        """The prompt text of a conversation that the model continues as the assistant.

        Raises:
            InvalidRequestError: the model has no template, there are no messages, or the template refuses them or does
                not read the extras.
        """
        if self._template is None:
            raise InvalidRequestError("this model has no chat template; send prompt.text or prompt.tokens instead")
        return self._template.render(messages, extras)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens; special and unknown ids have none. Bytes that are not UTF-8 become U+FFFD."""
        return self._library.decode(token_ids, skip_special_tokens=True)

    def has_text(self, token_id: int) -> bool:
        """The id counts in `decode`: it is known and not special."""
        return token_id in self._text_ids

    def is_byte(self, token_id: int) -> bool:
        """The id is a single byte that a sentencepiece-style tokenizer falls back to, such as `<0xE2>`."""
        return token_id in self._byte_ids

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"the prompt is not valid Unicode text: {error.reason}") from None
        return self._library.encode(text, add_special_tokens=add_special_tokens).ids
