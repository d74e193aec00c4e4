"""The search for the best number of requests under way, against services that are formulas."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.pace import Pace


class Service:
    """Generates `tokens_per_s(requests under way)`, on a clock of its own; refuses beyond `queue`."""

    def __init__(self, tokens_per_s: Callable[[int], float], queue: int = 10**6) -> None:
        self.now_s = 0.0
        self.tokens_per_s = tokens_per_s
        self.queue = queue

    def clock(self) -> float:
        return self.now_s

    def serve(self, pace: Pace, requests: int) -> list[int]:
        """Finishes so many requests of 100 tokens; the limit after each."""
        limits = []
        for _ in range(requests):
            for _ in range(max(0, pace.limit - self.queue)):
                pace.refused()
            self.now_s += 100 / self.tokens_per_s(pace.limit)
            pace.generated(100)
            pace.finished()
            limits.append(pace.limit)
        return limits


@pytest.mark.parametrize("best", [4, 16, 100])
def test_it_grows_while_more_requests_bring_more_tokens_and_stays_where_they_do_not(best: int) -> None:
    service = Service(lambda under_way: 10.0 * min(under_way, best))
    pace = Pace(4, clock=service.clock)
    limits = service.serve(pace, 10_000)[5_000:]
    assert best <= min(limits) < 2 * best
    assert sum(limits) / len(limits) < 2.5 * best


def test_a_service_that_suffers_from_too_many_is_spared_them() -> None:
    service = Service(lambda under_way: 10.0 * under_way if under_way <= 16 else 160 - under_way)
    pace = Pace(4, clock=service.clock)
    limits = service.serve(pace, 5_000)[1_000:]
    assert limits.count(16) > 0.7 * len(limits)


def test_a_full_queue_lowers_the_limit_until_requests_fit() -> None:
    service = Service(lambda under_way: 100.0, queue=10)
    pace = Pace(64, clock=service.clock)
    assert service.serve(pace, 20)[-1] <= 10


def test_many_refusals_at_once_count_as_one_until_a_request_ends() -> None:
    pace = Pace(64)
    for _ in range(50):
        pace.refused()
    assert pace.limit == 48
    pace.finished()
    pace.refused()
    assert pace.limit == 36


def test_the_limit_stays_between_one_and_the_most() -> None:
    service = Service(lambda under_way: 10.0 * under_way)
    pace = Pace(4, most=20, clock=service.clock)
    assert service.serve(pace, 2_000)[-1] == 20
    for _ in range(40):
        pace.refused()
        pace.finished()
    assert pace.limit == 1


def test_a_fixed_limit_is_kept() -> None:
    service = Service(lambda under_way: 10.0 * under_way, queue=1)
    pace = Pace(5, fixed=True, clock=service.clock)
    assert set(service.serve(pace, 100)) == {5}
