"""Health follows the engine: unhealthy when weights cannot be read, until every layer has come again."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace

import pytest

from shared.errors import CapacityError, DataLossError, HeadraceError, UnavailableError
from shared.health import RETRY_S, STALL_S, EngineHealth


def fail(health: EngineHealth, error: HeadraceError) -> None:
    with pytest.raises(type(error)), health.working():
        raise error


@pytest.mark.parametrize("error", [DataLossError("layer 3 is truncated"), UnavailableError("layer 3 cannot be read")])
def test_weights_that_cannot_be_read_make_the_engine_unhealthy_until_all_of_them_can(
    error: HeadraceError, caplog: pytest.LogCaptureFixture
) -> None:
    health = EngineHealth()
    assert (health.healthy, health.retry_s) == (True, None)
    with caplog.at_level(logging.INFO, "shared.health"):
        for _ in range(3):
            fail(health, error)
            assert (health.healthy, health.retry_s) == (False, RETRY_S)
        with health.working():
            pass  # a pass that everyone left before its end has shown nothing
        assert not health.healthy
        with health.working():
            health.recovered()
    assert (health.healthy, health.retry_s) == (True, None)
    assert [record.getMessage() for record in caplog.records] == [
        f"{error}; trying again every 2 s",
        "the weights can be read again",
    ]


def test_a_request_that_fails_for_its_own_reasons_says_nothing_about_the_engine() -> None:
    health = EngineHealth()
    fail(health, CapacityError("no room"))
    assert health.healthy


def test_an_engine_whose_thread_has_ended_is_unhealthy() -> None:
    health = EngineHealth()
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    health.watch(thread)
    assert not health.healthy


def test_an_engine_that_works_and_brings_no_layer_is_unhealthy_and_one_that_is_idle_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    monkeypatch.setattr("shared.health.time", SimpleNamespace(monotonic=lambda: now_s))
    health = EngineHealth()
    with health.working():
        now_s += STALL_S
        assert health.healthy
        now_s += 1
        assert not health.healthy
        health.progress()
        assert health.healthy
    now_s += 10 * STALL_S
    assert health.healthy
