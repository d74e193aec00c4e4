"""What `headrace plan` asks the decode service: how long a chosen token takes."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import TinyPack


def test_it_prints_the_seconds_of_a_token(tiny_pack: TinyPack) -> None:
    command = [sys.executable, "-m", "decode_service.answer_speed", str(tiny_pack("bf16"))]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 0 < float(run.stdout) < 1
