"""The acceptance rule is lossless: for every seed, with any draft, the text is the one without a draft.

Proved on a model small enough to enumerate: every sequence's probability is known exactly.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from decode_service.choice import choose_next
from decode_service.sampling import SamplingParams
from decode_service.sequence import Sequence as Running
from decode_service.shaping import Shaping, shaped_logits
from decode_service.speculation.acceptance import accept
from decode_service.speculation.controller import DraftController
from decode_service.speculation.draft import DraftKind, Drafts
from decode_service.speculation.ngram_draft import NgramDraft
from decode_service.speculation.proposer import Proposer
from tests.decode_service.chi_square import require_fit

VOCABULARY = 3
STEPS = 3
PROMPT: tuple[int, ...] = (1, 0)
SEEDS = 1000
SHAPING = Shaping(
    repetition_penalty=1.4,
    presence_penalty=0.5,
    frequency_penalty=-0.75,
    logit_bias=((2, 0.5),),
    min_tokens=2,
    end_token_ids=frozenset({0}),
)
"""Everything at once: the choice at a place depends on all tokens before it."""
Draft = Callable[[tuple[int, ...], SamplingParams, int], list[int]]


class TinyModel:
    """A random autoregressive model: its logits depend on everything before, as a table."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self._logits = {
            continuation: (random.normal(size=VOCABULARY) * 1.5).astype(np.float32)
            for steps in range(STEPS + 4)
            for continuation in itertools.product(range(VOCABULARY), repeat=steps)
        }
        self._chosen: dict[tuple[tuple[int, ...], SamplingParams], int] = {}

    def choose(self, tokens: tuple[int, ...], params: SamplingParams) -> int:
        """The token after a whole sequence, prompt included."""
        if (tokens, params) not in self._chosen:
            logits = self._logits[tokens[len(PROMPT) :]]
            self._chosen[tokens, params] = choose_next(logits, params, tokens, len(PROMPT))
        return self._chosen[tokens, params]

    def probabilities(self, temperature: float, shaping: Shaping) -> dict[tuple[int, ...], float]:
        """Of every sequence of `STEPS` tokens, exactly."""
        result = {}
        for sequence in itertools.product(range(VOCABULARY), repeat=STEPS):
            probability = 1.0
            for step, token in enumerate(sequence):
                before = sequence[:step]
                logits = shaped_logits(self._logits[before], shaping, PROMPT + before, len(PROMPT))
                weights = np.exp(logits.astype(np.float64) / temperature)
                probability *= weights[token] / weights.sum()
            result[sequence] = probability
        return result


TARGET, OTHER = TinyModel(1), TinyModel(2)


def chain(model: TinyModel, tokens: tuple[int, ...], params: SamplingParams, length: int) -> list[int]:
    """A draft of `length` tokens that a model chooses with the target's noise."""
    for _ in range(length):
        tokens = (*tokens, model.choose(tokens, params))
    return list(tokens[len(tokens) - length :])


def adversarial(tokens: tuple[int, ...], params: SamplingParams, length: int) -> list[int]:
    return [(token + 1) % VOCABULARY for token in chain(TARGET, tokens, params, length)]


def random_draft(tokens: tuple[int, ...], params: SamplingParams, length: int) -> list[int]:
    random = np.random.default_rng([params.seed, len(tokens)])
    return [int(token) for token in random.integers(VOCABULARY, size=length)]


def perfect(tokens: tuple[int, ...], params: SamplingParams, length: int) -> list[int]:
    return chain(TARGET, tokens, params, length)


def other_model(tokens: tuple[int, ...], params: SamplingParams, length: int) -> list[int]:
    return chain(OTHER, tokens, params, length)


def constant(tokens: tuple[int, ...], params: SamplingParams, length: int) -> list[int]:
    return [0] * length


def late_difference(tokens: tuple[int, ...], params: SamplingParams, length: int) -> list[int]:
    draft = perfect(tokens, params, length)
    return [*draft[:-1], (draft[-1] + 1) % VOCABULARY] if draft else []


class OtherModel:
    """`other_model` as a draft that takes passes."""

    kind: DraftKind = "model"

    def missing(self, sequence: Running) -> int:
        return 1

    def warm(self, rows: int) -> None:
        """Nothing is done once only."""

    def take_passes(self) -> list[tuple[int, float]]:
        return []

    def propose(self, sequences: list[Running], counts: list[int]) -> list[list[int]]:
        return [
            other_model(tuple(sequence.tokens), sequence.sampling, count)
            for sequence, count in zip(sequences, counts, strict=True)
        ]


class Auto:
    """Lookups and another model, chosen between by the real controller, to which costs of any size are reported."""

    __name__ = "auto"

    def __init__(self) -> None:
        self._random = random.Random(5)
        self._controller = DraftController(0, 3, rows_limit=100)
        self._proposer = Proposer(Drafts(NgramDraft(), OtherModel()), self._controller)
        self._sequence = self._begin(SamplingParams())

    def __call__(self, tokens: tuple[int, ...], params: SamplingParams, length: int) -> list[int]:
        if tokens == PROMPT:
            self._sequence = self._begin(params)
        else:
            before = len(self._sequence.tokens)
            self._sequence.tokens += tokens[before:]
            self._proposer.verified(self._sequence, tokens[before:])
        self._controller.draft_passed(1, self._random.random())
        self._proposer.passed(self._random.randint(1, 4), self._random.random())
        return self._proposer.propose([self._sequence], [length])[0]

    def _begin(self, params: SamplingParams) -> Running:
        return Running(
            request_id="",
            tokens=list(PROMPT),
            prompt_tokens=len(PROMPT),
            max_tokens=STEPS,
            sampling=params,
            output=None,  # type: ignore[arg-type]  # nothing is written here
            outlet=None,  # type: ignore[arg-type]
            on_admitted=lambda: None,
        )


DRAFTS = [adversarial, random_draft, perfect, other_model, constant, late_difference, Auto()]


def without_draft(params: SamplingParams) -> tuple[int, ...]:
    tokens = PROMPT
    for _ in range(STEPS):
        tokens = (*tokens, TARGET.choose(tokens, params))
    return tokens[len(PROMPT) :]


def with_draft(draft: Draft, length: int, params: SamplingParams) -> tuple[tuple[int, ...], int]:
    """The first `STEPS` tokens, and the passes that they took."""
    tokens, passes = PROMPT, 0
    while len(tokens) < len(PROMPT) + STEPS:
        proposal = draft(tokens, params, length)
        tokens += tuple(accept(proposal, target_rows(tokens, proposal, params)))
        passes += 1
    return tokens[len(PROMPT) : len(PROMPT) + STEPS], passes


def target_rows(tokens: tuple[int, ...], proposal: Sequence[int], params: SamplingParams) -> Callable[[int], int]:
    """The target's choices as a verify pass computes them: every row sees the proposal before it."""
    return lambda row: TARGET.choose(tokens + tuple(proposal[:row]), params)


@pytest.mark.parametrize("length", range(4))
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shaping", [Shaping(), SHAPING], ids=["plain", "shaped"])
def test_for_every_seed_any_draft_gives_the_text_without_a_draft(
    draft: Draft, length: int, temperature: float, shaping: Shaping
) -> None:
    for seed in range(SEEDS if temperature else 3):
        params = SamplingParams(temperature=temperature, seed=seed, shaping=shaping)
        assert with_draft(draft, length, params)[0] == without_draft(params)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("shaping", [Shaping(), SHAPING], ids=["plain", "shaped"])
def test_sequences_drawn_with_any_draft_have_the_models_exact_probabilities(draft: Draft, shaping: Shaping) -> None:
    drawn = [SamplingParams(temperature=0.8, seed=seed, shaping=shaping) for seed in range(4000)]
    require_fit([with_draft(draft, 2, params)[0] for params in drawn], TARGET.probabilities(0.8, shaping))


def test_every_possible_proposal_yields_the_common_beginning_and_one_token_of_the_target() -> None:
    target = [2, 0, 1, 1]
    for length in range(4):
        for proposal in itertools.product(range(VOCABULARY), repeat=length):
            agreed = len([1 for row in range(length) if list(proposal[: row + 1]) == target[: row + 1]])
            assert accept(proposal, target.__getitem__) == target[: agreed + 1]


def test_rows_after_the_first_difference_are_not_asked_for() -> None:
    asked: list[int] = []

    def choose(row: int) -> int:
        asked.append(row)
        return 7

    assert accept([7, 3, 7], choose) == [7, 7]
    assert asked == [0, 1]


def test_a_perfect_draft_needs_one_pass_and_an_adversarial_one_costs_nothing_but_its_drafting() -> None:
    params = SamplingParams(temperature=1.0, seed=4)
    assert with_draft(perfect, STEPS - 1, params)[1] == 1
    assert with_draft(adversarial, STEPS - 1, params)[1] == STEPS


def test_noise_shared_with_the_target_makes_a_similar_draft_agree_more_often() -> None:
    coupled = independent = 0
    for seed in range(SEEDS):
        params, elsewhere = (SamplingParams(temperature=1.0, seed=number) for number in (seed, seed + SEEDS))
        choice = TARGET.choose(PROMPT, params)
        coupled += OTHER.choose(PROMPT, params) == choice
        independent += OTHER.choose(PROMPT, elsewhere) == choice
    assert coupled > 1.2 * independent
