"""A layer's time is shown in parts, for each number of sequences."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench.layer_parts import PARTS
from tests.conftest import TinyPack


def test_every_part_has_its_time(tiny_pack: TinyPack, tmp_path: Path) -> None:
    report = tmp_path / "parts.json"
    options = ["--sequences", "1", "3", "--context", "20", "--rounds", "1", "--json", str(report)]
    command = [sys.executable, "-m", "bench", "layer_parts", str(tiny_pack("bf16")), *options]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = json.loads(report.read_text())["microseconds"]
    assert list(found) == ["1", "3"]
    for microseconds in found.values():
        assert list(microseconds) == list(PARTS)
        assert all(taken > 0 for taken in microseconds.values())
    assert all(part in shown for part in PARTS)
