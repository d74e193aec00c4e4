"""Penalties, biases and tokens ruled out: each by its definition, all in the documented order."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from decode_service.choice import choose_next
from decode_service.sampling import SamplingParams
from decode_service.shaping import Shaping, shaped_logits
from shared.errors import InvalidRequestError

VOCABULARY = 6
LOGITS = np.array([3.0, -2.0, 2.5, 0.0, 1.0, -1.0], dtype=np.float32)

tokens_given = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12)
shapings = st.builds(
    Shaping,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.25, 10.0]),
    presence_penalty=st.sampled_from([0.0, -2.0, 0.75]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 2.0]),
    logit_bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.sampled_from([-100.0, 1.5, 100.0])).map(
        lambda biases: tuple(biases.items())
    ),
    bad_token_ids=st.frozensets(st.integers(0, VOCABULARY - 1), max_size=3),
    min_tokens=st.integers(0, 4),
    end_token_ids=st.frozensets(st.integers(0, 1)),
)


def by_definition(
    logits: NDArray[np.float32], shaping: Shaping, tokens: list[int], prompt_tokens: int
) -> dict[int, float]:
    """Every token's logit, one at a time."""
    answer = tokens[prompt_tokens:]
    result = {}
    for token in range(len(logits)):
        logit = float(logits[token])
        if token in tokens:
            logit = logit / shaping.repetition_penalty if logit > 0 else logit * shaping.repetition_penalty
        if token in answer:
            logit -= shaping.presence_penalty
        logit -= shaping.frequency_penalty * answer.count(token)
        logit += dict(shaping.logit_bias).get(token, 0.0)
        ends_too_early = token in shaping.end_token_ids and len(answer) < shaping.min_tokens
        result[token] = -math.inf if token in shaping.bad_token_ids or ends_too_early else logit
    return result


@given(shaping=shapings, tokens=tokens_given, data=st.data())
def test_shaped_logits_are_those_of_the_definitions_and_the_given_ones_stay(
    shaping: Shaping, tokens: list[int], data: st.DataObject
) -> None:
    prompt_tokens = data.draw(st.integers(1, len(tokens)))
    before = LOGITS.copy()
    shaped = shaped_logits(LOGITS, shaping, tokens, prompt_tokens)
    expected = by_definition(LOGITS, shaping, tokens, prompt_tokens)
    assert shaped.dtype == np.float32
    assert dict(enumerate(shaped.tolist())) == pytest.approx(expected, abs=1e-5)
    assert np.array_equal(LOGITS, before)
    if not shaping.applies(len(tokens) - prompt_tokens):
        assert np.array_equal(shaped, LOGITS)


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    processor: Any = RepetitionPenaltyLogitsProcessor(penalty=penalty)
    expected = processor(torch.tensor([[0, 1, 4, 0]]), torch.from_numpy(LOGITS)[None])[0]
    shaped = shaped_logits(LOGITS, Shaping(repetition_penalty=penalty), [0, 1, 4, 0], 2)
    assert shaped.tolist() == pytest.approx(expected.tolist())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_end_is_chosen_after_min_tokens_and_not_before(temperature: float) -> None:
    shaping = Shaping(min_tokens=2, end_token_ids=frozenset({0, 2}), logit_bias=((0, 100.0),))
    params = SamplingParams(temperature=temperature, seed=5, shaping=shaping)
    chosen = [choose_next(LOGITS, params, [4] * (3 + generated), 3) in {0, 2} for generated in range(4)]
    assert chosen == [False, False, True, True]


def test_a_proposed_token_counts_like_a_generated_one() -> None:
    params = SamplingParams(shaping=Shaping(frequency_penalty=1.0))
    for proposed in ([], [0], [0, 0], [0, 2, 0]):
        assert choose_next(LOGITS, params, [1], 1, proposed) == choose_next(LOGITS, params, [1, *proposed], 1)
    assert [choose_next(LOGITS, params, [1], 1, [0] * count) for count in range(3)] == [0, 2, 2]


@given(tokens=tokens_given, bad=st.frozensets(st.integers(0, VOCABULARY - 1), max_size=VOCABULARY - 1))
def test_a_bad_token_is_never_chosen_whatever_else_is_asked_for(tokens: list[int], bad: frozenset[int]) -> None:
    shaping = Shaping(bad_token_ids=bad, logit_bias=tuple((token, 100.0) for token in sorted(bad)))
    for options in ({}, {"temperature": 100.0}, {"temperature": 1.0, "top_k": 2, "top_p": 0.5, "min_p": 0.5}):
        assert choose_next(LOGITS, SamplingParams(shaping=shaping, **options), tokens, 1) not in bad


def test_without_features_no_step_of_shaping_applies() -> None:
    assert not Shaping().applies(0)
    assert not Shaping(min_tokens=3, end_token_ids=frozenset({1})).applies(3)
    assert Shaping(min_tokens=3, end_token_ids=frozenset({1})).applies(2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be from 0.1 to 10"),
        ({"repetition_penalty": 10.5}, "repetition_penalty is 10.5"),
        ({"repetition_penalty": math.nan}, "repetition_penalty is nan"),
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1; it must be from -2 to 2"),
        ({"frequency_penalty": -2.1}, "frequency_penalty is -2.1; it must be from -2 to 2"),
        ({"frequency_penalty": math.nan}, "frequency_penalty is nan"),
        ({"logit_bias": ((7, 100.5),)}, "logit_bias of token 7 is 100.5; it must be from -100 to 100"),
        ({"logit_bias": ((7, math.nan),)}, "logit_bias of token 7 is nan"),
        ({"logit_bias": tuple((n, 1.0) for n in range(1025))}, "logit_bias has 1025 entries; at most 1024"),
        ({"bad_token_ids": frozenset(range(1025))}, "bad_token_ids has 1025 entries; at most 1024"),
        ({"min_tokens": -1}, "min_tokens is -1; it must be 0 or more"),
    ],
)
def test_values_out_of_range_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        Shaping(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": ((6, 1.0),)}, r"logit_bias has \[6\]; ids must be from 0 to 5"),
        ({"bad_token_ids": frozenset({2, 9})}, r"bad_token_ids has \[9\]; ids must be from 0 to 5"),
        ({"bad_token_ids": frozenset(range(6))}, "rule out all 6 tokens"),
        ({"bad_token_ids": frozenset({0, 1, 2}), "min_tokens": 1, "end_token_ids": frozenset({3, 4, 5})}, "rule out"),
    ],
)
def test_ids_beyond_the_vocabulary_and_an_empty_choice_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        Shaping(**fields).require_vocabulary(VOCABULARY)


def test_the_ends_of_every_range_are_accepted() -> None:
    Shaping(repetition_penalty=0.1, presence_penalty=-2, frequency_penalty=2, logit_bias=((0, -100.0), (1, 100.0)))
    Shaping(bad_token_ids=frozenset(range(5))).require_vocabulary(VOCABULARY)
