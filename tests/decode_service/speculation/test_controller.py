"""The draft controller finds the length that pays, from what it measures."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from decode_service.sampling import SamplingParams
from decode_service.sequence import Sequence
from decode_service.speculation.controller import Acceptance, Costs, DraftController, expected_tokens
from shared.outlet import Outlet

LONGEST = 12


def sequence() -> Sequence:
    async def make() -> Sequence:
        return Sequence(
            request_id="r",
            tokens=[1],
            prompt_tokens=1,
            max_tokens=10**6,
            sampling=SamplingParams(),
            output=None,  # type: ignore[arg-type]  # nothing is written here
            outlet=Outlet(),
            on_admitted=lambda: None,
        )

    return asyncio.run(make())


class Machine:
    """A machine with known costs and sequences with a known acceptance, on which a controller works."""

    def __init__(self, *, count: int, acceptance: float, step_s: float, pass_s: Any) -> None:
        self.acceptance, self.step_s, self.pass_s = acceptance, step_s, pass_s
        self.sequences = [sequence() for _ in range(count)]
        self.random = random.Random(3)

    def run(self, controller: DraftController, passes: int) -> float:
        """Tokens a second over so many passes."""
        tokens, elapsed_s, count = 0, 0.0, len(self.sequences)
        for _ in range(passes):
            length = controller.length(self.sequences)
            draft_s, pass_s = length * self.step_s, self.pass_s(count * (length + 1))
            controller.drafted(count, length, draft_s)
            controller.passed(count * (length + 1), pass_s)
            elapsed_s += draft_s + pass_s
            for each in self.sequences:
                accepted = self.accepted(length)
                controller.verified(each, length, accepted)
                tokens += accepted + 1
        return tokens / elapsed_s

    def accepted(self, length: int) -> int:
        return next((i for i in range(length) if self.random.random() > self.acceptance), length)

    def best_rate(self) -> float:
        """The expected rate of the best fixed length."""
        count = len(self.sequences)
        return max(
            count
            * expected_tokens(self.acceptance, length)
            / (length * self.step_s + self.pass_s(count * (length + 1)))
            for length in range(LONGEST + 1)
        )


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("acceptance", [0.05, 0.5, 0.88, 0.97])
@pytest.mark.parametrize(
    ("step_s", "pass_s"),
    [
        (0.05, lambda rows: 1.2),  # streamed: a pass costs the same whatever it verifies
        (0.0, lambda rows: 0.01 + 0.0002 * rows),  # n-grams on resident weights
        (0.01, lambda rows: 0.02 + 0.001 * rows),  # a draft model beside resident weights
        (0.03, lambda rows: 0.005 * rows),  # arithmetic-bound: every row costs
    ],
    ids=["streamed", "free draft", "resident", "arithmetic-bound"],
)
def test_it_comes_close_to_the_best_fixed_length(count: int, acceptance: float, step_s: float, pass_s: Any) -> None:
    machine = Machine(count=count, acceptance=acceptance, step_s=step_s, pass_s=pass_s)
    controller = DraftController(0, LONGEST, rows_limit=1024)
    machine.run(controller, 60)
    assert machine.run(controller, 1500) > 0.9 * machine.best_rate()


def test_where_a_draft_does_not_pay_it_stops_but_for_a_rare_probe() -> None:
    machine = Machine(count=4, acceptance=0.02, step_s=0.03, pass_s=lambda rows: 0.005 * rows)
    controller = DraftController(0, LONGEST, rows_limit=1024)
    machine.run(controller, 100)
    lengths = [controller.length(machine.sequences) for _ in range(300)]
    assert lengths.count(0) > 0.95 * len(lengths)
    assert 0 < sum(lengths) < 10


def test_a_fixed_length_is_kept_within_the_limit_of_rows() -> None:
    controller = DraftController(5, 5, rows_limit=24)
    assert controller.length([sequence()]) == 5
    assert controller.length([sequence() for _ in range(8)]) == 2, "8 x (2 + 1) = 24 rows"
    assert controller.length([sequence() for _ in range(30)]) == 0
    assert controller.length([]) == 0


def test_estimates_follow_what_is_measured() -> None:
    acceptance = Acceptance()
    for _ in range(200):
        acceptance.add(4, 4)
    assert acceptance.rate > 0.97
    for _ in range(200):
        acceptance.add(4, 0)
    assert acceptance.rate < 0.05
    costs = Costs()
    assert costs.of(7) == 0.0, "nothing is known"
    costs.add(4, 1.0)
    assert (costs.of(1), costs.of(100)) == (0.25, 1.0), "hopeful in both directions"
    costs.add(64, 4.0)
    assert (costs.of(24), costs.of(124)) == (2.0, 7.0)
    assert expected_tokens(0.5, 2) == 1 + 0.5 + 0.25
