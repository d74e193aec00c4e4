"""`headrace doctor`, as people and programs call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.doctor import storage
from tests.conftest import TinyPack


@pytest.fixture(autouse=True)
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PROBE_BYTES", 16 << 20)
    monkeypatch.setattr(storage, "PROBE_S", 0.02)


def test_as_json_it_has_every_check_of_a_pack_and_of_the_machine(tiny_pack: TinyPack) -> None:
    result = CliRunner().invoke(app, ["doctor", str(tiny_pack("bf16")), "--json"])
    found = json.loads(result.stdout)
    checks = [finding["check"] for finding in found["findings"]]
    expected = ["processor", "threads", "memory", "versions", "ports", "filesystem", "pack", "scheme", "fit", "disk"]
    assert checks == expected
    problems = [finding for finding in found["findings"] if finding["level"] == "problem"]
    assert (found["problems"], result.exit_code) == (len(problems), 1 if problems else 0)
    assert all(finding["advice"] for finding in found["findings"] if finding["level"] in ("warning", "problem"))


def test_a_broken_pack_ends_with_1_and_says_what_to_do(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert result.exit_code == 1
    text = " ".join(result.stdout.split())
    assert "is no pack" in text
    assert "headrace pack SOURCE OUT" in text


def test_a_folder_that_is_not_there_ends_with_2(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--folder", str(tmp_path / "absent")])
    assert result.exit_code == 2
    assert "is no folder" in result.stderr
