"""Prompts are short as long as a pass delays everybody less than a handoff would delay the one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray

from decode_service.short_prompts import FIRST_SHORT_TOKENS, STALE_S, SURPRISE, HandoffTimes, ShortPrompts

LONGEST = 512


@dataclass
class World:
    """Costs of passes and handoffs, both straight lines, and a clock that is set by hand."""

    pass_s: float = 0.02
    row_s: float = 0.001
    trip_s: float = 0.1
    token_s: float = 0.002
    running: int = 0
    now_s: float = 1000.0

    def pass_of(self, rows: ArrayLike) -> NDArray[np.float64]:
        return self.pass_s + self.row_s * np.asarray(rows, np.float64)

    def handoff_s(self, tokens: int) -> float:
        return self.trip_s + self.token_s * tokens

    def prompts(self, fixed: int | None = None) -> ShortPrompts:
        # The request that asks is running by then: it has blocks.
        return ShortPrompts(self.pass_of, lambda: self.running + 1, LONGEST, fixed, lambda: self.now_s)

    def measured(self) -> ShortPrompts:
        prompts = self.prompts()
        for tokens in (40, 300, 90):
            prompts.handed_off(tokens, self.handoff_s(tokens))
        return prompts


seconds = st.floats(1e-4, 3.0)


@given(trip_s=seconds, token_s=st.floats(0, 0.1), lengths=st.lists(st.integers(1, 4000), min_size=2, max_size=40))
def test_handoffs_are_taken_to_lie_on_a_line(trip_s: float, token_s: float, lengths: list[int]) -> None:
    times = HandoffTimes()
    for length in lengths:
        times.add(length, trip_s + token_s * length)
    found = times.of([1, 10, 100, 1000])
    assert (np.diff(found) >= 0).all()
    assert found[0] >= 0
    assert times.of(max(lengths)) <= SURPRISE * (trip_s + token_s * max(lengths)) + 1e-9


@given(trip_s=seconds, token_s=st.floats(1e-5, 0.1), count=st.integers(2, 30))
def test_both_parts_of_a_handoff_are_found(trip_s: float, token_s: float, count: int) -> None:
    times = HandoffTimes()
    for number in range(count):
        length = 400 - 300 * (number % 2)
        times.add(length, trip_s + token_s * length)
    assert times.of([0, 1000]) == pytest.approx([trip_s, trip_s + 1000 * token_s], rel=1e-3, abs=1e-6)


@given(
    world=st.builds(
        World,
        pass_s=seconds,
        row_s=st.floats(0, 0.05),
        trip_s=seconds,
        token_s=st.floats(0, 0.05),
        running=st.integers(0, 16),
    ),
    missing=st.integers(1, 600),
)
def test_a_prompt_is_short_where_all_together_wait_no_longer(world: World, missing: int) -> None:
    alone = world.pass_of(world.running) if world.running else 0.0
    together = world.pass_of(world.running + missing)
    delay_s = float(together + world.running * (together - alone))
    prompts, handoff_s = world.measured(), world.handoff_s(missing)
    if missing > LONGEST:
        assert not prompts.is_short(missing)
    elif abs(delay_s - handoff_s) > 1e-3 * handoff_s:
        assert prompts.is_short(missing) == (delay_s < handoff_s)
    assert 0 <= prompts.limit <= LONGEST
    assert prompts.limit == 0 or prompts.is_short(prompts.limit)
    assert not prompts.is_short(prompts.limit + 1)


def test_the_more_a_pass_would_delay_the_shorter_is_a_short_prompt() -> None:
    world = World()
    alone = world.measured().limit
    world.running = 8
    assert 0 < world.measured().limit < alone == LONGEST


def test_a_replica_that_is_busy_makes_longer_prompts_short() -> None:
    world = World(running=8)
    prompts = world.measured()
    before = prompts.limit
    world.trip_s *= 3
    for tokens in (40, 300) * 5:
        prompts.handed_off(tokens, world.handoff_s(tokens))
    assert prompts.limit > before


def test_one_handoff_that_met_a_failure_changes_little() -> None:
    world = World(running=8)
    prompts = world.measured()
    before = prompts.limit
    prompts.handed_off(40, 1000 * world.handoff_s(40))
    assert prompts.limit < 4 * before


def test_until_both_costs_are_known_and_once_handoffs_are_long_ago_a_constant_holds() -> None:
    world = World(running=8)
    assert world.prompts().limit == FIRST_SHORT_TOKENS
    unknown = ShortPrompts(np.zeros_like, lambda: 1, LONGEST)
    unknown.handed_off(40, 1.0)
    assert unknown.limit == FIRST_SHORT_TOKENS
    prompts = world.measured()
    assert prompts.limit != FIRST_SHORT_TOKENS
    world.now_s += STALE_S + 1
    assert prompts.limit == FIRST_SHORT_TOKENS
    assert prompts.is_short(FIRST_SHORT_TOKENS)
    assert not prompts.is_short(FIRST_SHORT_TOKENS + 1)


def test_a_given_limit_holds_whatever_is_measured() -> None:
    prompts = World().prompts(fixed=700)
    prompts.handed_off(40, 1e-6)
    assert prompts.limit == 700
    assert prompts.is_short(700)
