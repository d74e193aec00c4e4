"""The draft controller finds the source and the length that pay, from what it measures."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Callable
from functools import partial
from statistics import fmean
from typing import Any

import pytest

from decode_service.sampling import SamplingParams
from decode_service.sequence import Sequence
from decode_service.speculation.candidate import Candidate, Choice, Source
from decode_service.speculation.controller import PROBE_PASSES, DraftController
from decode_service.speculation.estimates import SINGLE_TRUST, Acceptance, Costs, Load, expected_tokens
from decode_service.speculation.plans import FIRST_LENGTH
from decode_service.warm_up import warm_up
from shared.outlet import Outlet

LONGEST = 12
FOREVER = 10**6


def sequence(max_tokens: int = FOREVER) -> Sequence:
    async def make() -> Sequence:
        return Sequence(
            request_id="r",
            tokens=[1],
            prompt_tokens=1,
            max_tokens=max_tokens,
            sampling=SamplingParams(),
            output=None,  # type: ignore[arg-type]  # nothing is written here
            outlet=Outlet(),
            on_admitted=lambda: None,
        )

    return asyncio.run(make())


class Machine:
    """A machine with known costs, and sequences whose sources have a known acceptance."""

    def __init__(
        self,
        *,
        count: int,
        step_s: float,
        pass_s: Callable[[float], float],
        acceptance: float | None = None,
        lookup: float | None = None,
        matches: float = 1.0,
    ) -> None:
        """
        Args:
            acceptance: of the draft's model; None: there is none.
            lookup: of what is looked up; None: nothing is.
            matches: share of passes in which a sequence finds something.
        """
        self.rates = {Source.MODEL: acceptance, Source.LOOKUP: lookup}
        self.step_s, self.pass_s, self.matches = step_s, pass_s, matches
        self.sequences = [sequence() for _ in range(count)]
        self.random = random.Random(3)
        self.sources: list[Source] = []

    def warm_up(self, controller: DraftController) -> None:
        """What a service does before its first request."""
        self._learn(controller.passed, 128, self.pass_s)
        if self.rates[Source.MODEL] is not None:
            self._learn(controller.draft_passed, max(16, len(self.sequences)), lambda rows: self.step_s)

    @staticmethod
    def _learn(learn: Callable[[int, float], None], most_rows: int, cost_s: Callable[[float], float]) -> None:
        now_s = 0.0

        def run(rows: int) -> None:
            nonlocal now_s
            now_s += cost_s(rows)

        warm_up(run, most_rows, learn, lambda: now_s)

    def run(self, controller: DraftController, passes: int) -> float:
        """Tokens a second over so many passes."""
        self.sources = []
        tokens, elapsed_s = 0, 0.0
        for _ in range(passes):
            candidates = [self.candidate(each) for each in self.sequences]
            choices = controller.choose(candidates)
            asked = [choice.length for choice in choices if choice.source is Source.MODEL]
            steps = max(asked, default=0)
            rows = len(candidates) + sum(choice.length for choice in choices)
            for _ in range(steps):
                controller.draft_passed(len(asked), self.step_s)
            controller.passed(rows, self.pass_s(rows))
            elapsed_s += steps * self.step_s + self.pass_s(rows)
            for candidate, choice in zip(candidates, choices, strict=True):
                tokens += 1 + self.judged(controller, candidate, choice)
                self.sources.append(choice.source)
        return tokens / elapsed_s

    def candidate(self, each: Sequence) -> Candidate:
        found = self.rates[Source.LOOKUP] is not None and self.random.random() < self.matches
        missing = 0 if self.rates[Source.MODEL] is None else 1
        return Candidate(sequence=each, room=LONGEST, looked_up=LONGEST if found else 0, missing=missing)

    def judged(self, controller: DraftController, candidate: Candidate, choice: Choice) -> int:
        """Draft tokens accepted; a lookup that was not used is judged as far as the text went."""
        accepted = self.accepted(choice.source, choice.length)
        controller.verified(candidate.sequence, choice.source, choice.length, accepted)
        if candidate.looked_up and choice.source is not Source.LOOKUP:
            seen = accepted + 1
            controller.verified(candidate.sequence, Source.LOOKUP, seen, self.accepted(Source.LOOKUP, seen))
        return accepted

    def accepted(self, source: Source, length: int) -> int:
        rate = self.rates.get(source) or 0.0
        return next((place for place in range(length) if self.random.random() > rate), length)

    def best_rate(self) -> float:
        """The expected rate of the best fixed lengths, with the model asked where nothing is found, or always."""
        model, lookup = self.rates[Source.MODEL], self.rates[Source.LOOKUP]
        found = self.matches if lookup is not None else 0.0
        return max(
            self.rate(found * looks, 0 if lookup is None else looked_up, 0 if model is None else steps)
            for looked_up, steps, looks in itertools.product(range(LONGEST + 1), range(LONGEST + 1), (True, False))
        )

    def rate(self, found: float, looked_up: int, steps: int) -> float:
        count = len(self.sequences)
        tokens = found * expected_tokens(self.rates[Source.LOOKUP] or 0.0, looked_up)
        tokens = tokens + (1 - found) * expected_tokens(self.rates[Source.MODEL] or 0.0, steps)
        rows = count * (1 + found * looked_up + (1 - found) * steps)
        asked = 1 - found**count
        return float(count * tokens) / (asked * steps * self.step_s + self.pass_s(rows))


class Noisy(DraftController):
    """A controller whose measurements are multiplied by a noise."""

    def __init__(self, shortest: int, longest: int, rows_limit: int, noise: Callable[[], float]) -> None:
        super().__init__(shortest, longest, rows_limit)
        self.noise = noise

    def draft_passed(self, rows: int, elapsed_s: float) -> None:
        super().draft_passed(rows, elapsed_s * self.noise())

    def passed(self, rows: int, elapsed_s: float) -> None:
        super().passed(rows, elapsed_s * self.noise())


COSTS = pytest.mark.parametrize(
    ("step_s", "pass_s"),
    [
        (0.05, lambda rows: 1.2),  # streamed: a pass costs the same whatever it verifies
        (0.0, lambda rows: 0.01 + 0.0002 * rows),  # a free draft on resident weights
        (0.01, lambda rows: 0.02 + 0.001 * rows),  # a draft model beside resident weights
        (0.03, lambda rows: 0.005 * rows),  # arithmetic-bound: every row costs
    ],
    ids=["streamed", "free draft", "resident", "arithmetic-bound"],
)


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("acceptance", [0.05, 0.5, 0.88, 0.97])
@COSTS
def test_it_comes_close_to_the_best_fixed_length(count: int, acceptance: float, step_s: float, pass_s: Any) -> None:
    machine = Machine(count=count, acceptance=acceptance, step_s=step_s, pass_s=pass_s)
    controller = DraftController(0, LONGEST, rows_limit=1024)
    machine.run(controller, 60)
    assert machine.run(controller, 1500) > 0.9 * machine.best_rate()


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize(
    ("acceptance", "lookup", "matches"), [(0.88, 0.1, 0.9), (0.3, 0.1, 0.9), (0.88, 0.6, 0.5), (0.3, 0.95, 0.5)]
)
@COSTS
def test_with_lookups_and_a_model_it_comes_close_to_the_best_fixed_plan(
    count: int, acceptance: float, lookup: float, matches: float, step_s: float, pass_s: Any
) -> None:
    machine = Machine(count=count, acceptance=acceptance, lookup=lookup, matches=matches, step_s=step_s, pass_s=pass_s)
    controller = DraftController(0, LONGEST, rows_limit=1024)
    machine.warm_up(controller)
    machine.run(controller, 400)  # every cost has been confirmed by now
    found = machine.run(controller, 500)
    assert found > 0.9 * machine.best_rate()
    assert found > 0.97 * machine.rate(0.0, 0, 0), "no speculation at all"


@pytest.mark.parametrize("count", [1, 4, 8, 16, 32])
@pytest.mark.parametrize(("acceptance", "lookup"), [(None, 0.4), (0.05, None), (0.3, 0.3), (0.85, 0.5)])
@COSTS
def test_from_the_first_pass_on_it_does_not_lose_to_no_draft(
    count: int, acceptance: float | None, lookup: float | None, step_s: float, pass_s: Any
) -> None:
    """The first passes of a service that has just been started; the mean of some services, since luck differs."""
    ratios = []
    for seed in range(3):
        machine = Machine(count=count, acceptance=acceptance, lookup=lookup, matches=0.3, step_s=step_s, pass_s=pass_s)
        machine.random = random.Random(seed)
        noise = random.Random(seed)
        controller = Noisy(0, LONGEST, rows_limit=max(128, count), noise=partial(noise.lognormvariate, 0, 0.15))
        machine.warm_up(controller)
        ratios.append(machine.run(controller, 64) / machine.rate(0.0, 0, 0))
    assert fmean(ratios) > 0.97


def test_the_better_source_is_used_for_each_sequence() -> None:
    machine = Machine(count=1, acceptance=0.9, lookup=0.2, step_s=0.05, pass_s=lambda rows: 1.2)
    machine.run(controller := DraftController(0, LONGEST, rows_limit=1024), 50)
    machine.run(controller, 100)
    assert machine.sources.count(Source.MODEL) > 90
    machine.rates[Source.LOOKUP] = 0.97
    machine.run(controller, 100)
    machine.run(controller, 100)
    assert machine.sources.count(Source.LOOKUP) > 90, "what is looked up is judged even while it is not used"


@pytest.mark.parametrize("lookup", [None, 0.0])
def test_a_model_that_does_not_pay_is_not_asked_but_for_a_rare_probe(lookup: float | None) -> None:
    machine = Machine(count=4, acceptance=0.02, lookup=lookup, step_s=0.03, pass_s=lambda rows: 0.005 * rows)
    controller = DraftController(0, LONGEST, rows_limit=1024)
    machine.run(controller, 100)
    machine.run(controller, passes := 300)
    assert 0 < machine.sources.count(Source.MODEL) <= 4 * (passes // PROBE_PASSES + 1)
    assert machine.sources.count(Source.NOTHING) > 0.95 * 4 * passes


def test_a_copy_of_a_resident_target_that_costs_what_the_target_does_is_left_alone() -> None:
    machine = Machine(count=1, acceptance=0.8, lookup=0.9, matches=0.3, step_s=0.009, pass_s=lambda rows: 0.01)
    controller = DraftController(0, LONGEST, rows_limit=1024)
    machine.run(controller, 100)
    rate = machine.run(controller, 500)
    assert machine.sources.count(Source.MODEL) < 0.03 * 500
    assert machine.sources.count(Source.LOOKUP) > 100
    assert rate > 1.5 * machine.rate(0.0, 0, 0)


def test_a_fixed_length_is_kept_within_the_limit_of_rows() -> None:
    controller = DraftController(5, 5, rows_limit=24)

    def lengths(count: int, beside: tuple[int, ...] = ()) -> list[int]:
        candidates = [Candidate(sequence=sequence(), room=9, looked_up=9) for _ in range(count)]
        return [choice.length for choice in controller.choose(candidates, beside)]

    assert lengths(1) == [5]
    assert lengths(8) == [2] * 8, "8 x (2 + 1) = 24 rows"
    assert lengths(8, beside=(40,)) == [1] * 8, "one more row is needed by somebody else"
    assert lengths(30) == [0] * 30
    assert lengths(0) == []


def test_no_more_is_asked_for_than_there_is_room_and_nothing_of_nobody() -> None:
    controller = DraftController(6, 6, rows_limit=1024)
    candidates = [
        Candidate(sequence=sequence(), room=9, looked_up=2),
        Candidate(sequence=sequence(), room=3, missing=1),
        Candidate(sequence=sequence(), room=0, missing=1),
        Candidate(sequence=sequence(), room=9),
    ]
    assert [(choice.source, choice.length) for choice in controller.choose(candidates)] == [
        (Source.LOOKUP, 2),
        (Source.MODEL, 3),
        (Source.NOTHING, 0),
        (Source.NOTHING, 0),
    ]


def test_a_model_is_first_tried_with_a_short_proposal() -> None:
    controller = DraftController(0, LONGEST, rows_limit=1024)
    candidates = [Candidate(sequence=sequence(), room=LONGEST, missing=1) for _ in range(8)]
    assert controller.choose(candidates) == [Choice(Source.MODEL, FIRST_LENGTH)] * 8
    controller.draft_passed(8, 0.001)
    controller.passed(24, 1.0)
    controller.passed(8, 1.0)
    assert controller.choose(candidates) == [Choice(Source.MODEL, FIRST_LENGTH)] * 8, "it may still be no good"
    for candidate in candidates:
        controller.verified(candidate.sequence, Source.MODEL, 2, 2)
    assert min(choice.length for choice in controller.choose(candidates)) > FIRST_LENGTH
    fixed = DraftController(5, 5, rows_limit=1024)
    assert fixed.choose(candidates) == [Choice(Source.MODEL, 5)] * 8


def test_a_long_prompt_in_the_same_pass_is_no_reason_to_draft_where_it_does_not_pay() -> None:
    controller = DraftController(0, LONGEST, rows_limit=1024)
    for rows in (1, 2, 4, 8, 16, 64, 512):
        for _ in range(2):
            controller.passed(rows, 0.02 + 0.001 * rows)
            controller.draft_passed(min(rows, 8), 0.02)
    candidates = [Candidate(sequence=sequence(), room=LONGEST, missing=1) for _ in range(2)]
    assert not any(choice.length for choice in controller.choose(candidates))
    assert not any(choice.length for choice in controller.choose(candidates, beside=(400, 100)))


@pytest.mark.parametrize(("max_tokens", "asks"), [(20, False), (2000, True)])
def test_a_model_takes_in_a_long_prompt_only_where_enough_tokens_may_follow(max_tokens: int, asks: bool) -> None:
    controller = DraftController(0, LONGEST, rows_limit=1024)
    for rows, elapsed_s in ((1, 0.002), (512, 0.5)):
        for _ in range(2):
            controller.draft_passed(rows, elapsed_s)
    for rows in (1, 2, 4, 8, 16):
        for _ in range(2):
            controller.passed(rows, 0.02)
    candidate = Candidate(sequence=sequence(max_tokens), room=LONGEST, missing=2000)
    assert (controller.choose([candidate])[0].source is Source.MODEL) == asks


def test_estimates_follow_what_is_measured() -> None:
    acceptance = Acceptance()
    assert acceptance.rate(0.6) == 0.6
    for _ in range(200):
        acceptance.add(4, 4)
    assert acceptance.rate(0.6) > 0.97
    for _ in range(200):
        acceptance.add(4, 0)
    assert acceptance.rate(0.6) < 0.05
    costs = Costs()
    assert costs.of(7) == 0.0, "nothing is known"
    costs.add(4, 1.0)
    assert (costs.of(1), costs.of(100)) == (0.25, 1.0), "hopeful in both directions"
    costs.add(64, 4.0)
    assert (costs.of(24), costs.of(124)) == (2.0, 7.0)
    assert expected_tokens(0.5, 2) == 1 + 0.5 + 0.25


def test_a_size_that_was_slow_once_is_tried_again_and_one_that_is_slow_is_remembered() -> None:
    costs = Costs()
    costs.add(16, 9.0)
    costs.add(16, 9.0)
    costs.add(256, 99.0)
    for _ in range(SINGLE_TRUST):
        costs.add(1, 1.0)
    assert costs.of(16) == 9.0
    assert costs.of(256) == pytest.approx(1.0 + 8.0 / 15 * 255), "as if it had never been measured"


def test_a_load_that_comes_over_all_sizes_leaves_their_proportions_alone() -> None:
    load = Load()
    costs, others = Costs(load), Costs(load)
    for _ in range(40):
        costs.add(1, 1.0)
        costs.add(16, 2.0)
        others.add(1, 0.5)
    for _ in range(20):
        costs.add(16, 6.0)
    assert costs.of(16) == pytest.approx(6.0, rel=0.05)
    assert 2.2 < costs.of(1) <= 3.0, "though it was not measured since"
    assert 1.1 < others.of(1) <= 1.5


def test_more_rows_are_never_taken_to_cost_less() -> None:
    costs = Costs()
    for _ in range(10):
        costs.add(1, 2.0)
        costs.add(4, 1.0)
    assert costs.of(1) == costs.of(4)
    assert 1.0 < costs.of(1) < 2.0


def test_it_does_not_lose_to_no_draft_where_times_are_noisy() -> None:
    """A close call: the copy gains nothing, lookups a little."""
    machine = Machine(
        count=8, acceptance=0.7, lookup=0.3, matches=0.3, step_s=0.01, pass_s=lambda rows: 0.01 + 0.0003 * rows
    )
    noise = random.Random(11)
    controller = Noisy(0, LONGEST, rows_limit=128, noise=lambda: math.exp(noise.gauss(0, 0.5)))
    assert machine.run(controller, 1500) > 0.97 * machine.rate(0.0, 0, 0), "what it learned from included"
