"""Calibration: measured on the real parts of a pack, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.calibration import calibrated
from shared.pack.reader import Pack
from tests.conftest import TinyPack


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "headrace"


@pytest.mark.parametrize("scheme", ["fp32", "bf16", "int8", "nf4"])
def test_every_scheme_is_measured_once_and_then_remembered(tiny_pack: TinyPack, cache: Path, scheme: str) -> None:
    pack = Pack.open(tiny_pack(scheme))
    first = calibrated(pack, threads=1)
    products = [s for table in (first.streamed_layer_s, first.resident_layer_s, first.output_s) for s in table.values()]
    assert min(first.disk_bytes_per_s, first.memory_bytes_per_s, *products) > 0
    assert first.handed_token_s > 0
    assert (
        min(
            first.context_token_s, *first.begin_s.values(), *first.decode_rest_s.values(), *first.prompt_rest_s.values()
        )
        >= 0
    )
    assert calibrated(pack, threads=1) == first
    assert len(list(cache.glob("calibration-*"))) == 1
