"""How long a free engine waits for company: never when idle, a little under load, less where nobody comes."""

from __future__ import annotations

import pytest

from prefill_service.gathering import LEAST_PART, MOST_S, SHARE, GatheringWindow


def window_after(duration_s: float, prompts: int = 8) -> GatheringWindow:
    """The window of an engine that became free at second 100."""
    window = GatheringWindow()
    window.pass_ended(100.0, duration_s, prompts)
    return window


def test_before_any_pass_nobody_waits() -> None:
    assert GatheringWindow().left_s(5.0) == 0


def test_it_opens_when_the_engine_becomes_free_and_is_a_share_of_the_last_pass() -> None:
    window = window_after(1.0)
    assert window.left_s(100.0) == pytest.approx(SHARE)
    assert window.left_s(100.0 + SHARE / 2) == pytest.approx(SHARE / 2)


def test_a_prompt_that_finds_the_engine_idle_does_not_wait() -> None:
    assert window_after(1.0).left_s(100.0 + 2 * SHARE) == 0


def test_long_passes_do_not_make_it_long() -> None:
    assert window_after(60.0).left_s(100.0) == pytest.approx(MOST_S)


def test_it_ends_once_as_many_have_come_as_the_last_pass_served() -> None:
    window = window_after(1.0, prompts=3)
    for left in (True, True, False):
        window.arrived()
        assert (window.left_s(100.0) > 0) == left


def test_where_nobody_comes_it_shrinks_and_where_somebody_does_it_grows_again() -> None:
    window = GatheringWindow()
    seen = []
    for joined in (0, 0, 0, 0, 0, 0, 2, 1, 1, 1, 1):
        window.pass_ended(0.0, 1.0, 8)
        seen.append(window.left_s(0.0) / SHARE)
        window.used(joined)
    assert seen == pytest.approx([1, 1 / 2, 1 / 4, 1 / 8, LEAST_PART, LEAST_PART, LEAST_PART, 1 / 8, 1 / 4, 1 / 2, 1])


@pytest.mark.parametrize("served", [1, 5])
def test_callers_who_come_back_at_once_share_every_pass_from_the_second_on(served: int) -> None:
    """Eight callers with one prompt each, of which the first pass has served some: the others wait already."""
    window = GatheringWindow()
    now_s, waiting, passes = 0.0, 8 - served, [served]
    for _ in range(4):
        now_s += 1.0
        window.pass_ended(now_s, 1.0, passes[-1])
        for _ in range(passes[-1]):  # they ask again a millisecond apart
            assert window.left_s(now_s) > 0
            now_s += 0.001
            window.arrived()
            waiting += 1
        assert window.left_s(now_s) == 0
        passes.append(waiting)
        waiting = 0
    assert passes == [served, 8, 8, 8, 8]
