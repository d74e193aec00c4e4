"""Text released piece by piece is the text of all tokens, and never has half a character."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_service.text.detokenizer import IncrementalDetokenizer
from decode_service.text.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
TRICKY = "añb €uro e\u0301 👩🏽‍🚀 日本語 नमस्ते \u200d ﬁ  two  spaces\n\n \t ✨"

unicode_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.text(TRICKY, max_size=40)


@pytest.fixture(params=["byte_level_tokenizer", "sentencepiece_tokenizer", "smollm2_tokenizer"], scope="session")
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Tokenizer)
    return found


def pieces_of(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    return [*pieces, detokenizer.finish()]


@given(text=unicode_text)
def test_the_pieces_of_any_text_are_its_decoded_text(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text)
    assert "".join(pieces_of(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@given(text=unicode_text)
def test_any_text_comes_back_unchanged_where_the_vocabulary_has_every_byte(
    byte_level_tokenizer: Tokenizer, text: str
) -> None:
    assert "".join(pieces_of(byte_level_tokenizer, byte_level_tokenizer.encode(text))) == text


@given(data=st.data())
def test_any_token_ids_give_what_decoding_them_at_once_gives(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = st.integers(0, tokenizer.vocab_size + 2) | st.integers(0, min(290, tokenizer.vocab_size))
    token_ids = data.draw(st.lists(ids, max_size=30))
    assert "".join(pieces_of(tokenizer, token_ids)) == tokenizer.decode(token_ids)


def test_a_character_split_over_tokens_comes_in_one_piece(byte_level_tokenizer: Tokenizer) -> None:
    token_ids = byte_level_tokenizer.encode("🚀!")
    assert len(token_ids) == 5
    assert pieces_of(byte_level_tokenizer, token_ids) == ["", "", "", "🚀", "!", ""]


def test_a_run_of_byte_tokens_comes_when_another_token_ends_it(sentencepiece_tokenizer: Tokenizer) -> None:
    token_ids = sentencepiece_tokenizer.encode("a🚀b")
    pieces = pieces_of(sentencepiece_tokenizer, token_ids)
    assert [piece for piece in pieces if piece] == ["a", "🚀b"]


def test_an_unfinished_character_is_flushed_as_decoding_writes_it(byte_level_tokenizer: Tokenizer) -> None:
    token_ids = byte_level_tokenizer.encode("a🚀")[:-1]
    assert pieces_of(byte_level_tokenizer, token_ids) == ["a", "", "", "", REPLACEMENT]


def test_only_the_first_word_loses_its_space_even_after_a_special_token(sentencepiece_tokenizer: Tokenizer) -> None:
    first = sentencepiece_tokenizer.encode("a")
    end_of_sequence = 2
    token_ids = [*first, end_of_sequence, *first, end_of_sequence, *first]
    assert pieces_of(sentencepiece_tokenizer, token_ids) == ["a", "", " a", "", " a", ""]


def test_special_and_unknown_tokens_have_no_text(byte_level_tokenizer: Tokenizer) -> None:
    assert pieces_of(byte_level_tokenizer, [0, 1, 5_000]) == ["", "", "", ""]
