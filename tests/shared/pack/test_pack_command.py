"""`headrace pack` as users run it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.cli import log, main
from shared.errors import ConfigurationError
from shared.pack.reader import Pack
from shared.pack.sources import embedded
from tests.models import smollm2_gguf


@pytest.fixture
def headrace(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Runs the command line and returns its exit code."""

    def run(*arguments: str | Path) -> int:
        monkeypatch.setattr(sys, "argv", ["headrace", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        return int(exit_.value.code or 0)

    level = log.level
    yield run
    log.setLevel(level)


def test_a_pack_is_made_and_its_digest_printed(
    headrace: Callable[..., int], tiny_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert headrace("pack", tiny_model(), tmp_path / "pack", "--scheme", "int8") == 0
    pack = Pack.open(tmp_path / "pack")
    assert pack.scheme.name == "int8"
    assert pack.manifest.model_digest in capsys.readouterr().out


def test_an_error_is_one_line_and_names_what_to_do(
    headrace: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert headrace("pack", tmp_path / "missing", tmp_path / "pack") == 2
    message = capsys.readouterr().err
    assert message.startswith("error: there is no ")
    assert message.count("\n") == 1
    assert "GGUF" in message


def test_where_an_error_came_from_is_shown_on_demand(
    headrace: Callable[..., int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert headrace("-v", "pack", tmp_path / "missing", tmp_path / "pack") == 2
    assert "Traceback" in caplog.text


def test_a_damaged_checkpoint_is_a_failure_not_a_misuse(headrace: Callable[..., int], tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert headrace("pack", tmp_path / "m.gguf", tmp_path / "pack") == 1


def test_help_needs_no_torch() -> None:
    code = "import sys, headrace.cli; sys.exit('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_the_embedded_model_is_found_in_its_package() -> None:
    assert embedded.embedded_model("smollm2-135m") == smollm2_gguf()


def test_a_missing_package_is_named() -> None:
    with pytest.raises(ConfigurationError, match="pip install"):
        embedded.gguf_in_package("package_that_is_not_there")
