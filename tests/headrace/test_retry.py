"""Backoff and deadlines, on a clock that the test turns."""

from __future__ import annotations

import pytest

from headrace.errors import DeadlineExceeded, InvalidRequest, Unavailable
from headrace.retry import Attempts, RetryPolicy

POLICY = RetryPolicy(attempts=4, first_delay_s=1.0, longest_delay_s=3.0)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_pauses_double_up_to_the_longest_and_are_shortened_by_at_most_half() -> None:
    for failures, longest_s in ((1, 1.0), (2, 2.0), (3, 3.0), (9, 3.0)):
        pauses_s = {POLICY.delay_s(failures) for _ in range(50)}
        assert len(pauses_s) > 1
        assert all(longest_s / 2 <= pause_s <= longest_s for pause_s in pauses_s)


def test_the_last_attempt_raises_its_error() -> None:
    attempts, error = Attempts(POLICY, None), Unavailable("down")
    for _ in range(3):
        attempts.pause_after(error)
    with pytest.raises(Unavailable):
        attempts.pause_after(error)


def test_other_errors_are_raised_at_once() -> None:
    with pytest.raises(InvalidRequest):
        Attempts(POLICY, None).pause_after(InvalidRequest("no"))


def test_a_pause_that_would_outlast_the_deadline_raises_the_error_instead() -> None:
    clock = Clock()
    attempts = Attempts(POLICY, 2.0, clock)
    attempts.pause_after(Unavailable("down"))
    clock.now_s = 1.5
    assert attempts.remaining_s() == 0.5
    with pytest.raises(Unavailable):
        attempts.pause_after(Unavailable("down"))


def test_no_attempt_starts_after_the_deadline() -> None:
    clock = Clock()
    attempts = Attempts(POLICY, 2.0, clock)
    clock.now_s = 2.0
    with pytest.raises(DeadlineExceeded, match="timeout_s=2"):
        attempts.remaining_s()
