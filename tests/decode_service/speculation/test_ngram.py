"""Prompt lookup proposes what a brute-force search over the whole sequence would."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_service.speculation.ngram import LONGEST_MATCH, NgramIndex


def brute_force(tokens: Sequence[int], count: int, max_ngram: int, min_ngram: int) -> list[int]:
    """Longest suffix first, latest earlier occurrence, continued into its own proposal."""
    for length in range(max_ngram, min_ngram - 1, -1):
        suffix = list(tokens[-length:])
        for start in range(len(tokens) - length - 1, -1, -1):
            if len(suffix) == length and list(tokens[start : start + length]) == suffix:
                extended = list(tokens)
                for step in range(count):
                    extended.append(extended[start + length + step])
                return extended[len(tokens) :]
    return []


@given(
    tokens=st.lists(st.integers(0, 2), max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=4),
    count=st.integers(0, 10),
    lengths=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
)
def test_proposals_are_those_of_brute_force_however_the_tokens_came(
    tokens: list[int], cuts: list[int], count: int, lengths: list[int]
) -> None:
    min_ngram, max_ngram = lengths
    index = NgramIndex(max_ngram, min_ngram)
    edges = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    for start, end in itertools.pairwise(edges):
        index.extend(tokens[start:end])
        assert len(index) == end
        assert index.propose(count) == brute_force(tokens[:end], count, max_ngram, min_ngram)


@given(tokens=st.lists(st.integers(0, 2), max_size=40))
def test_a_match_is_as_long_as_the_tokens_before_the_proposal_are_those_before_the_end(tokens: list[int]) -> None:
    index = NgramIndex()
    index.extend(tokens)
    start = next(
        (
            at
            for length in (4, 3, 2)
            for at in range(len(tokens) - 1, length - 1, -1)
            if len(tokens) > length and tokens[at - length : at] == tokens[-length:]
        ),
        None,
    )
    same = 0
    while start is not None and same < min(start, LONGEST_MATCH) and tokens[start - 1 - same] == tokens[-1 - same]:
        same += 1
    assert index.matched() == same
    assert bool(same) == bool(index.propose(1))


def test_the_longest_match_wins_over_a_later_shorter_one() -> None:
    index = NgramIndex()
    index.extend([1, 2, 3, 4, 50, 3, 4, 60, 1, 2, 3, 4])
    assert index.propose(2) == [50, 3]


def test_of_equal_matches_the_latest_wins() -> None:
    index = NgramIndex()
    index.extend([1, 2, 50, 1, 2, 60, 1, 2])
    assert index.propose(1) == [60]


def test_a_repeating_text_is_continued_periodically() -> None:
    index = NgramIndex()
    index.extend([7, 8, 9, 7, 8, 9, 7, 8])
    assert index.propose(7) == [9, 7, 8, 9, 7, 8, 9]


def test_nothing_is_proposed_for_a_text_without_repetition() -> None:
    index = NgramIndex()
    assert index.propose(4) == []
    index.extend(range(100))
    assert index.propose(4) == []


@pytest.mark.parametrize(("max_ngram", "min_ngram"), [(1, 2), (3, 0)])
def test_impossible_lengths_are_refused(max_ngram: int, min_ngram: int) -> None:
    with pytest.raises(ValueError, match="not possible"):
        NgramIndex(max_ngram, min_ngram)
