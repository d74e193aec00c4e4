"""What a pack's tokenizer and chat template are, for people who look into it."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer

from shared.errors import UnsupportedModelError
from shared.pack.reader import Pack
from shared.sandbox import template_variables

GIVEN_VARIABLES = frozenset({"messages", "add_generation_prompt"})
"""What every template gets; which of the others it reads differs."""


@dataclass(frozen=True)
class TokenizerFacts:
    """A tokenizer, as far as it matters to those who use the model."""

    kind: str
    """BPE, Unigram …"""
    vocab_size: int
    """Tokens it knows; the model's vocabulary may be padded beyond them."""
    special_tokens: int
    """Of these, so many are special: they have no text."""
    puts_before: tuple[str, ...]
    """Tokens that it puts before every text."""


@dataclass(frozen=True)
class TemplateFacts:
    """A chat template, as far as it matters to those who send chats."""

    characters: int
    variables: tuple[str, ...]
    """What it reads besides messages and special tokens: tools, enable_thinking …"""


def pack_tokenizer(pack: Pack) -> Tokenizer:
    """The pack's tokenizer; it cuts and fills nothing, whatever the checkpoint was trained with.

    Raises:
        DataLossError: the file is not what its digest says.
        UnsupportedModelError: the `tokenizers` library cannot read it.
    """
    try:
        tokenizer = Tokenizer.from_str(pack.tokenizer_json())
    except Exception as error:  # the library raises nothing narrower
        raise UnsupportedModelError(f"tokenizer.json cannot be read: {error}; pack the model again") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def start_ids(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer's post-processor puts before a text: often nothing, or a beginning-of-sequence token."""
    encoding = tokenizer.encode("a")
    count = next((place for place, added in enumerate(encoding.special_tokens_mask) if not added), 0)
    ids: list[int] = encoding.ids[:count]
    return ids


def tokenizer_facts(pack: Pack) -> TokenizerFacts:
    """Looks at the pack's tokenizer.

    Raises:
        DataLossError, UnsupportedModelError: as `pack_tokenizer`.
    """
    tokenizer = pack_tokenizer(pack)
    return TokenizerFacts(
        kind=type(tokenizer.model).__name__,
        vocab_size=tokenizer.get_vocab_size(with_added_tokens=True),
        special_tokens=sum(token.special for token in tokenizer.get_added_tokens_decoder().values()),
        puts_before=tuple(str(tokenizer.id_to_token(token_id)) for token_id in start_ids(tokenizer)),
    )


def template_facts(pack: Pack) -> TemplateFacts | None:
    """Looks at the pack's chat template; None where it has none.

    Raises:
        DataLossError: the file is not what its digest says.
        UnsupportedModelError: it is not valid Jinja.
    """
    template = pack.chat_template()
    if template is None:
        return None
    given = GIVEN_VARIABLES | pack.manifest.special_tokens.keys()
    return TemplateFacts(len(template), tuple(sorted(template_variables(template) - given)))
