"""What the benchmark of acceptance computes is what happens."""

from __future__ import annotations

import numpy as np
import pytest

from bench.acceptance import coupled_chance, probabilities, tokens_a_pass
from decode_service.sampling import gumbel_noise


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0])
def test_the_chance_of_agreement_is_the_share_of_draws_that_agree_and_no_more_than_the_classical_one(
    spread: float,
) -> None:
    random = np.random.default_rng(4)
    logits = (random.normal(size=6) * 2).astype(np.float32)
    p, q = probabilities(logits, 1.0), probabilities(logits + (random.normal(size=6) * spread).astype(np.float32), 1.0)
    draws = 6000
    noise = np.stack([gumbel_noise(seed, 0, 6) for seed in range(draws)])
    agreed = np.mean((np.log(p) + noise).argmax(1) == (np.log(q) + noise).argmax(1))
    chance = coupled_chance(p, q)
    assert chance == pytest.approx(agreed, abs=4 * np.sqrt(0.25 / draws))
    overlap = np.minimum(p, q).sum()
    assert overlap / (2 - overlap) - 1e-9 <= chance <= overlap + 1e-9, "the bounds that are known of it"
    assert coupled_chance(p, p) == pytest.approx(1.0)


def test_a_walk_counts_a_pass_for_each_chain_and_a_leaf_takes_it_one_token_further() -> None:
    ranks = np.array([[0, 0, 1, 0, 5, 0, 0, 0]]).T
    assert tokens_a_pass(ranks, length=4, branches=1) == 8 / 3, "0 0 1, 0 5, 0 0 0"
    assert tokens_a_pass(ranks, length=1, branches=1) == 8 / 5, "0 0, 1, 0 5, 0 0, 0"
    assert tokens_a_pass(np.ones((8, 1), np.int64), length=4, branches=1) == 1
    assert tokens_a_pass(np.ones((8, 1), np.int64), length=4, branches=2) == 2
    assert tokens_a_pass(np.zeros((12, 2), np.int64), length=3, branches=1) == 4
