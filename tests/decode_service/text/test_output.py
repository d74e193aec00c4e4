"""One sequence's answer: text, tokens and the end, whatever the tokens' grouping."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_service.text.output import Emission, FinishReason, TextOutput
from decode_service.text.stopping import StopConditions
from decode_service.text.tokenizer import Tokenizer
from tests.models import EOS_ID

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def output(
    tokenizer: Tokenizer, max_tokens: int = 100, strings: Sequence[str] = (), token_ids: frozenset[int] = frozenset()
) -> TextOutput:
    return TextOutput(tokenizer, StopConditions(max_tokens, tuple(strings), token_ids), {EOS_ID})


def whole(out: TextOutput, groups: Sequence[Sequence[int]]) -> Emission:
    """All that an answer emits when its tokens come in these groups."""
    emissions = [out.push(group) for group in groups]
    return Emission(
        "".join(emission.text for emission in emissions),
        [token_id for emission in emissions for token_id in emission.token_ids],
        out.finish,
    )


def test_tokens_become_text_until_the_end_of_sequence_which_has_none(byte_level_tokenizer: Tokenizer) -> None:
    out = output(byte_level_tokenizer)
    token_ids = byte_level_tokenizer.encode("report 7")
    assert out.push(token_ids) == Emission("report 7", token_ids, None)
    assert out.push([EOS_ID, *token_ids]) == Emission("", [EOS_ID], FinishReason.STOP)


def test_a_stop_token_is_reported_but_adds_no_text(byte_level_tokenizer: Tokenizer) -> None:
    before, stop = byte_level_tokenizer.encode("ab"), byte_level_tokenizer.encode("!")
    out = output(byte_level_tokenizer, token_ids=frozenset(stop))
    assert out.push([*before, *stop, *before]) == Emission("ab", [*before, *stop], FinishReason.STOP)


def test_max_tokens_ends_the_answer_and_discards_the_rest(byte_level_tokenizer: Tokenizer) -> None:
    token_ids = byte_level_tokenizer.encode("xyz!")
    out = output(byte_level_tokenizer, max_tokens=3)
    assert out.push(token_ids[:2]) == Emission("xy", token_ids[:2], None)
    assert out.tokens_left == 1
    assert out.push(token_ids[2:]) == Emission("z", token_ids[2:3], FinishReason.LENGTH)
    assert out.push(token_ids) == Emission("", [], FinishReason.LENGTH)


def test_a_stop_with_the_last_allowed_token_is_a_stop(byte_level_tokenizer: Tokenizer) -> None:
    token_ids = byte_level_tokenizer.encode("xyz")
    assert output(byte_level_tokenizer, max_tokens=1).push([EOS_ID]).finish is FinishReason.STOP
    assert output(byte_level_tokenizer, max_tokens=3, strings=["z"]).push(token_ids).finish is FinishReason.STOP


def test_a_stop_string_over_several_tokens_is_cut_and_its_tokens_are_reported(byte_level_tokenizer: Tokenizer) -> None:
    token_ids = byte_level_tokenizer.encode("xyz!?xyz")
    out = output(byte_level_tokenizer, strings=["z!?"])
    emissions = [out.push([token_id]) for token_id in token_ids[:5]]
    assert [emission.text for emission in emissions] == ["x", "y", "", "", ""]
    assert emissions[-1] == Emission("", token_ids[4:5], FinishReason.STOP)


def test_held_back_text_is_flushed_when_the_answer_ends(byte_level_tokenizer: Tokenizer) -> None:
    token_ids = byte_level_tokenizer.encode("xyz!")
    out = output(byte_level_tokenizer, strings=["z!?"])
    assert out.push(token_ids).text == "xy"
    assert out.push([EOS_ID]) == Emission("z!", [EOS_ID], FinishReason.STOP)
    assert output(byte_level_tokenizer, 4, ["z!?"]).push(token_ids) == Emission("xyz!", token_ids, FinishReason.LENGTH)


def test_half_a_character_is_flushed_only_at_the_end(byte_level_tokenizer: Tokenizer) -> None:
    half = byte_level_tokenizer.encode("🚀")[:2]
    out = output(byte_level_tokenizer)
    assert out.push(half) == Emission("", half, None)
    assert out.push([EOS_ID]) == Emission(REPLACEMENT, [EOS_ID], FinishReason.STOP)


def test_a_stop_string_completed_by_the_flush_still_stops(byte_level_tokenizer: Tokenizer) -> None:
    half = byte_level_tokenizer.encode("x🚀")[:2]
    out = output(byte_level_tokenizer, max_tokens=2, strings=[REPLACEMENT])
    assert out.push(half) == Emission("x", half, FinishReason.STOP)


def test_no_tokens_are_no_news(byte_level_tokenizer: Tokenizer) -> None:
    assert output(byte_level_tokenizer).push([]) == Emission("", [], None)


@pytest.mark.parametrize("fixture", ["byte_level_tokenizer", "sentencepiece_tokenizer"])
@given(data=st.data())
def test_the_answer_does_not_depend_on_how_tokens_are_grouped(
    request: pytest.FixtureRequest, fixture: str, data: st.DataObject
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(fixture)
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=25))
    max_tokens = data.draw(st.integers(1, 30))
    strings = data.draw(st.lists(st.text("abr 0" + REPLACEMENT, min_size=1, max_size=3), max_size=3))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=4)))
    groups = [token_ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(token_ids)], strict=True)]

    at_once = whole(output(tokenizer, max_tokens, strings), [token_ids])
    assert whole(output(tokenizer, max_tokens, strings), groups) == at_once
    assert whole(output(tokenizer, max_tokens, strings), [[token_id] for token_id in token_ids]) == at_once
    if at_once.finish:
        text = tokenizer.decode([token_id for token_id in at_once.token_ids if token_id != EOS_ID])
        assert text.startswith(at_once.text)
        assert not any(string in at_once.text for string in strings)
