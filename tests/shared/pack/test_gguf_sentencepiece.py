"""Sentencepiece vocabularies against the rule itself, written out: join the neighbours with the best score."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from shared.errors import UnsupportedModelError
from shared.pack.sources.gguf_tokenizer import tokenizer_json

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
WORDS = "er in on re the_ er_ ab abc bc cab abcab _a _re _the ere there ing ring _in the th he".replace(
    "_", SPACE
).split()
LETTERS = [*"abcdeghinort", SPACE]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TOKENS = ["<unk>", "<s>", "</s>", *BYTES, "  ", "   ", "<b>", *WORDS, *LETTERS]
SCORES = dict(zip([*WORDS, *LETTERS], range(0, -1000, -1), strict=False))
TEXT = st.text(alphabet="abceghinort é日\n", max_size=40)


def metadata(**changes: Any) -> dict[str, Any]:
    kinds = [2, 3, 3, *[6] * 256, 4, 4, 4, *[1] * (len(WORDS) + len(LETTERS))]
    fields = {
        "model": "llama",
        "tokens": TOKENS,
        "scores": [float(SCORES.get(token, 0)) for token in TOKENS],
        "token_type": kinds,
        "bos_token_id": 1,
        "add_bos_token": False,
    } | changes
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def rebuilt(**changes: Any) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_json(metadata(**changes), "m.gguf"))


TOKENIZER, WITHOUT_PREFIX = rebuilt(), rebuilt(add_space_prefix=False)


def joined(text: str) -> list[str]:
    """Tokens of a text without runs of spaces, by the rule; what is no token becomes its bytes."""
    parts = list(text.replace(" ", SPACE))
    while True:
        unions = [(-SCORES[a + b], place) for place, (a, b) in enumerate(pairwise(parts)) if a + b in SCORES]
        if not unions:
            return [t for part in parts for t in ([part] if part in SCORES else [BYTES[b] for b in part.encode()])]
        place = min(unions)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


@given(TEXT.filter(lambda text: "  " not in text and text))
def test_tokens_are_those_of_the_rule(text: str) -> None:
    assert WITHOUT_PREFIX.encode(text).tokens == joined(text)
    assert TOKENIZER.encode(text).tokens == joined(f" {text}") or text.startswith(" ")


@given(TEXT)
def test_text_comes_back_whole(text: str) -> None:
    for tokenizer in (TOKENIZER, WITHOUT_PREFIX):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_tokens_that_users_define_come_before_all_others() -> None:
    assert WITHOUT_PREFIX.encode("a   the<b>re").tokens == ["a", 3 * SPACE, "the", "<b>", "re"]


def test_a_beginning_token_is_added_unless_the_file_says_otherwise() -> None:
    fields = metadata()
    del fields["tokenizer.ggml.add_bos_token"]
    ids = Tokenizer.from_str(tokenizer_json(fields, "m.gguf")).encode("the").ids
    assert ids == [1, *TOKENIZER.encode("the").ids]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"scores": [0.0]}, r"tokenizer\.ggml\.scores"),
        ({"token_type": [1] * len(TOKENS)}, "0 byte tokens"),
        ({"token_type": [1]}, "three numbers"),
        ({"add_eos_token": True}, "add_eos_token"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        rebuilt(**changes)
