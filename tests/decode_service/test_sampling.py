"""Sampling: exact distributions, exact supports, and noise that depends on seed and position alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from decode_service.sampling import (
    SamplingParams,
    choose_token,
    gumbel_noise,
    processed_logits,
)
from shared.errors import DataLossError, InvalidRequestError
from shared.limits import NOISE_VECTORS
from tests.decode_service.chi_square import require_fit

LOGITS = np.array([1.5, -0.5, 2.0, 2.0, 0.0], dtype=np.float32)

settings_given = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    top_k=st.integers(0, 12),
    # Odd numbers, which no sum of probabilities hits exactly: there rounding would decide.
    top_p=st.sampled_from([1e-6, 0.1234567, 0.3456789, 0.6123457, 0.9012345, 0.9991234, 1.0]),
    # And these are met by no ratio of two weights.
    min_p=st.sampled_from([0.0, 1e-9, 0.0123457, 0.1234567, 0.7654321]),
    seed=st.integers(0, 2**64 - 1),
)
few_levels = st.lists(st.integers(-8, 8), min_size=1, max_size=10).map(
    lambda levels: np.array(levels, dtype=np.float32) / 2
)


def brute_force(logits: NDArray[np.float32], params: SamplingParams) -> dict[int, float]:
    """Probabilities by definition: rank by likelihood, then id; keep k; keep until top_p is reached; apply min_p."""
    weights = {
        token: math.exp(float(logits[token] - logits.max()) / params.temperature) for token in range(len(logits))
    }
    ranked = sorted(weights, key=lambda token: (-logits[token], token))
    ranked = ranked[: params.top_k or None]
    total = math.fsum(weights[token] for token in ranked)
    kept: list[int] = []
    for token in ranked:
        if params.top_p < 1 and math.fsum(weights[other] for other in kept) >= params.top_p * total:
            break
        kept.append(token)
    kept = [token for token in kept if weights[token] >= params.min_p * weights[ranked[0]]]
    total = math.fsum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.5},
        {"temperature": 1.0, "top_k": 2},
        {"temperature": 1.0, "top_k": 4},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.5, "top_p": 0.95},
        {"temperature": 1.5, "top_k": 4, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 0.3},
        {"temperature": 1.5, "top_k": 4, "top_p": 0.9, "min_p": 0.35},
    ],
)
@pytest.mark.parametrize("over", ["seeds", "positions"])
def test_frequencies_fit_the_exact_distribution_over_seeds_and_over_positions(
    options: dict[str, Any], over: str
) -> None:
    draws = []
    for number in range(4000):
        seed, position = (number, 17) if over == "seeds" else (17, number)
        draws.append(choose_token(LOGITS, SamplingParams(seed=seed, **options), position))
    require_fit(draws, brute_force(LOGITS, SamplingParams(**options)))


@given(logits=few_levels, params=settings_given)
def test_the_support_is_exactly_that_of_brute_force_ties_included(
    logits: NDArray[np.float32], params: SamplingParams
) -> None:
    processed = processed_logits(logits, params)
    probabilities = brute_force(logits, params)
    assert set(np.flatnonzero(processed > -np.inf).tolist()) == set(probabilities)
    weights = np.exp(processed) / np.exp(processed).sum()
    assert weights.tolist() == pytest.approx([probabilities.get(token, 0.0) for token in range(len(logits))])


@given(logits=few_levels, params=settings_given, position=st.integers(0, 10_000))
def test_the_choice_is_the_maximum_of_processed_logits_plus_noise(
    logits: NDArray[np.float32], params: SamplingParams, position: int
) -> None:
    noisy = processed_logits(logits, params) + gumbel_noise(params.seed, position, logits.size)
    assert choose_token(logits, params, position) == int(np.argmax(noisy))


@pytest.mark.parametrize(
    "options", [{"top_p": 0.9}, {"top_p": 0.02}, {"top_k": 40}, {"top_k": 40, "top_p": 0.5}, {"min_p": 0.1}]
)
@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
def test_the_same_holds_for_a_whole_vocabulary(options: dict[str, Any], spread: float) -> None:
    logits = (np.random.default_rng(3).normal(size=49_152) * spread).astype(np.float32)
    for position in range(10):
        params = SamplingParams(temperature=1.0, seed=8, **options)
        noisy = processed_logits(logits, params) + gumbel_noise(8, position, logits.size)
        assert choose_token(logits, params, position) == int(np.argmax(noisy))


def test_temperature_zero_takes_the_best_token_and_of_equals_the_lowest_id() -> None:
    for seed in range(5):
        assert choose_token(LOGITS, SamplingParams(seed=seed, top_k=3, top_p=0.5), seed) == 2
    assert np.flatnonzero(processed_logits(LOGITS, SamplingParams()) > -np.inf).tolist() == [2]


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1e-3])
def test_the_smallest_temperatures_are_greedy_but_for_ties(temperature: float) -> None:
    chosen = {choose_token(LOGITS, SamplingParams(temperature=temperature, seed=seed), 0) for seed in range(40)}
    assert chosen == {2, 3}


def test_masked_tokens_are_never_chosen() -> None:
    logits = np.array([-np.inf, 0.0, -np.inf, 0.5], dtype=np.float32)
    for options in ({}, {"top_k": 3}, {"top_p": 0.99}):
        params = SamplingParams(temperature=100.0, **options)
        assert {choose_token(logits, params, position) for position in range(60)} == {1, 3}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [[0.0, math.nan, 9.0], [math.inf, 0.0, 1.0], [-math.inf] * 3])
def test_logits_that_are_not_numbers_are_an_error_never_output(temperature: float, bad: list[float]) -> None:
    with pytest.raises(DataLossError, match="weights are damaged or overflow"):
        choose_token(np.array(bad, dtype=np.float32), SamplingParams(temperature=temperature), 0)


@pytest.mark.parametrize("shape", [(0,), (2, 3)])
def test_anything_but_one_row_of_logits_is_a_programming_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="not one row"):
        choose_token(np.zeros(shape, dtype=np.float32), SamplingParams(), 0)


def test_same_seed_and_position_give_the_same_noise_cached_or_not() -> None:
    first = gumbel_noise(5, 6, 1000)
    assert gumbel_noise(5, 6, 1000) is first
    for position in range(NOISE_VECTORS):
        gumbel_noise(5, 1000 + position, 10)
    again = gumbel_noise(5, 6, 1000)
    assert again is not first
    assert np.array_equal(again, first)


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (42, 7), (2**64 - 1, 2**32)])
def test_the_noise_is_that_of_philox_as_published(seed: int, position: int) -> None:
    words = [word for block in range(1, 5) for word in philox4x64((block, position, 0, 0), (seed, 0))]
    expected = [-math.log(-math.log(((word >> 12) + 0.5) / 2**52)) for word in words]
    assert gumbel_noise(seed, position, 16).tolist() == pytest.approx(expected, rel=1e-6)


def philox4x64(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """One block of Philox4x64-10, written from the paper (Salmon et al. 2011, sections 3.3 and 4.3)."""
    mask = 2**64 - 1
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * counter[0], 0xCA5A826395121157 * counter[2]
        counter = (
            (right >> 64) ^ counter[1] ^ key[0],
            right & mask,
            (left >> 64) ^ counter[3] ^ key[1],
            left & mask,
        )
        key = ((key[0] + 0x9E3779B97F4A7C15) & mask, (key[1] + 0xBB67AE8584CAA73B) & mask)
    return counter


def test_a_longer_vocabulary_only_adds_noise_at_its_end() -> None:
    assert np.array_equal(gumbel_noise(1, 2, 100), gumbel_noise(1, 2, 1000)[:100])


def test_the_noise_is_shared_and_therefore_read_only() -> None:
    noise = gumbel_noise(1, 1, 49_152)
    with pytest.raises(ValueError, match="read-only"):
        noise[0] = 0


def test_noise_is_gumbel_and_independent_between_neighbouring_positions_and_seeds() -> None:
    size, euler = 40_000, 0.5772156649
    streams = np.stack([gumbel_noise(seed, position, size) for seed in (0, 1, 2) for position in (0, 1, 2)])
    assert np.isfinite(streams).all()
    assert streams.mean() == pytest.approx(euler, abs=0.01)
    assert streams.var() == pytest.approx(math.pi**2 / 6, abs=0.02)
    correlations = np.corrcoef(streams) - np.eye(len(streams))
    assert np.abs(correlations).max() < 5 / math.sqrt(size)
    assert len(np.unique(streams.astype(np.float64))) > 0.98 * streams.size


def test_neighbouring_positions_draw_independently() -> None:
    params = SamplingParams(temperature=1.0, seed=99)
    draws = [choose_token(LOGITS, params, position) for position in range(8001)]
    single = brute_force(LOGITS, params)
    pairs: dict[Any, float] = {(one, two): single[one] * single[two] for one in single for two in single}
    require_fit(list(zip(draws[::2], draws[1::2], strict=False)), pairs)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -0.1, "temperature is -0.1; it must be from 0 to 100"),
        ("temperature", 100.5, "temperature is 100.5; it must be from 0 to 100"),
        ("temperature", math.nan, "temperature is nan"),
        ("temperature", math.inf, "temperature is inf"),
        ("top_k", -1, "top_k is -1; it must be 0"),
        ("top_p", 0.0, "top_p is 0.0; it must be above 0 and at most 1"),
        ("top_p", 1.01, "top_p is 1.01"),
        ("top_p", math.nan, "top_p is nan"),
        ("min_p", -0.1, "min_p is -0.1; it must be from 0"),
        ("min_p", 1.1, "min_p is 1.1"),
        ("min_p", math.nan, "min_p is nan"),
        ("seed", -1, "seed is -1; it must be from 0 to 18446744073709551615"),
        ("seed", 2**64, "seed is 18446744073709551616"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(field: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**{field: value})


def test_the_ends_of_every_range_are_accepted() -> None:
    SamplingParams(temperature=0, top_k=0, top_p=1.0, min_p=0, seed=0)
    SamplingParams(temperature=100, top_k=2**32 - 1, top_p=1e-9, min_p=1, seed=2**64 - 1)
