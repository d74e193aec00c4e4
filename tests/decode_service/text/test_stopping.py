"""Stop strings: found wherever they are cut, never leaked, and nothing else held back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_service.text.stopping import StopConditions, StopStringMatcher
from shared.errors import InvalidRequestError

stop_strings = st.lists(st.text("ab", min_size=1, max_size=5) | st.text("abé🚀", min_size=1, max_size=3), max_size=4)


def expected_text(text: str, strings: list[str]) -> tuple[str, bool]:
    """By definition: the match that ends first, of those the longest, found on the whole text."""
    found = [(text.find(string) + len(string), -len(string)) for string in strings if string in text]
    if not found:
        return text, False
    end, negative_length = min(found)
    return text[: end + negative_length], True


@given(chunks=st.lists(st.text("abé🚀", max_size=6), max_size=12), strings=stop_strings)
def test_text_and_hit_do_not_depend_on_how_the_text_is_cut(chunks: list[str], strings: list[str]) -> None:
    matcher = StopStringMatcher(strings)
    released, hit = "", False
    for chunk in chunks:
        piece, hit = matcher.push(chunk)
        released += piece
        if hit:
            break
    released += matcher.finish()
    assert (released, hit) == expected_text("".join(chunks), strings)


@given(text=st.text("ab", max_size=30), strings=stop_strings)
def test_only_the_longest_suffix_that_could_become_a_stop_string_is_held_back(text: str, strings: list[str]) -> None:
    matcher = StopStringMatcher(strings)
    released = ""
    for end, character in enumerate(text, start=1):
        piece, hit = matcher.push(character)
        if hit:
            return
        released += piece
        seen = text[:end]
        held = max(
            (n for string in strings for n in range(1, len(string)) if seen.endswith(string[:n])),
            default=0,
        )
        assert released == seen[: end - held]


def test_a_stop_string_split_over_pieces_is_cut_off_with_what_follows() -> None:
    matcher = StopStringMatcher(["\n\nUser:"])
    assert matcher.push("Pump 7 leaks.\n") == ("Pump 7 leaks.", False)
    assert matcher.push("\nUse") == ("", False)
    assert matcher.push("r: and more") == ("", True)
    assert matcher.finish() == ""


def test_a_false_alarm_is_released() -> None:
    matcher = StopStringMatcher(["END"])
    assert matcher.push("the EN") == ("the ", False)
    assert matcher.push("TRY E") == ("ENTRY ", False)
    assert matcher.finish() == "E"


def test_of_stop_strings_completed_together_the_longest_counts() -> None:
    assert StopStringMatcher(["c", "abc", "bc"]).push("xabc") == ("x", True)


def test_the_stop_string_completed_first_counts_though_a_longer_one_began_before() -> None:
    assert StopStringMatcher(["abcd", "bc"]).push("abcd") == ("a", True)


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert StopStringMatcher([]).push("anything") == ("anything", False)


def test_a_very_long_stop_string_costs_no_more_than_the_text_that_resembles_it() -> None:
    matcher = StopStringMatcher(["a" * 1_000_000 + "b"])
    assert matcher.push("a" * 1000) == ("", False)
    assert matcher.push("c") == ("a" * 1000 + "c", False)


def test_conditions_within_range_are_accepted() -> None:
    conditions = StopConditions(1, tuple("abcdefghijklmnop"), frozenset({0, 9}))
    conditions.require_vocabulary(10)


@pytest.mark.parametrize(
    ("max_tokens", "strings", "message"),
    [
        (0, (), r"stopping\.max_tokens is 0; it must be 1 or more"),
        (-5, (), r"stopping\.max_tokens is -5"),
        (1, ("x",) * 17, r"stopping\.strings has 17 entries; at most 16"),
        (1, ("x", ""), r"stopping\.strings\[1\] is empty"),
    ],
)
def test_conditions_out_of_range_are_refused_by_name(max_tokens: int, strings: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        StopConditions(max_tokens, strings)


def test_stop_tokens_outside_the_vocabulary_are_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidRequestError, match=r"stopping\.token_ids has \[10, 99\]; ids must be from 0 to 9"):
        StopConditions(1, (), frozenset({3, 99, 10})).require_vocabulary(10)
