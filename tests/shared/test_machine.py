"""What is kept of measurements: measured when unknown, when the key differs, and when asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.machine import cached


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "headrace"


def test_a_value_is_measured_when_unknown_when_the_key_differs_and_when_asked() -> None:
    measured = iter(range(10))

    def value(key: str, again: bool = False) -> int:
        return int(cached("test", {"key": key}, lambda: next(measured), again=again))

    assert [value("a"), value("a"), value("b"), value("a", again=True), value("a"), value("b")] == [0, 0, 1, 2, 2, 1]


def test_a_damaged_cache_is_measured_anew(cache: Path) -> None:
    assert cached("test", {}, lambda: 1) == 1
    (file,) = cache.iterdir()
    file.write_text('{"half')
    assert cached("test", {}, lambda: 2) == 2
    assert cached("test", {}, lambda: 3) == 2


def test_a_cache_that_cannot_be_written_costs_only_time(cache: Path) -> None:
    cache.parent.write_text("a file where the folder should be")
    assert [cached("test", {}, lambda number=number: number) for number in (1, 2)] == [1, 2]
