"""`headrace bench`: every benchmark is listed with what it shows, and gets everything that stands behind its name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.cli.bench import FOLDER
from shared.errors import ConfigurationError
from tests.conftest import TinyPack

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, "-c", "from headrace.cli import main; main()", "bench"]


def test_every_benchmark_is_listed_with_its_first_line() -> None:
    shown = CliRunner().invoke(app, ["bench"], env={"COLUMNS": "200"}).output
    names = ("levers", "decode", "prefill", "streaming", "ring", "products", "quality", "budget", "experts", "forecast")
    assert [name for name in names if f"{name} " not in shown] == []
    assert "Whether `headrace plan` foretells what a job of reports takes" in shown
    assert "levers_plot" not in shown


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    refused = CliRunner().invoke(app, ["bench", "lever"])
    assert isinstance(refused.exception, ConfigurationError)
    assert "levers" in str(refused.exception)


def test_help_before_a_name_is_about_the_command_and_behind_it_about_the_benchmark(tmp_path: Path) -> None:
    assert "Run a benchmark" in CliRunner().invoke(app, ["bench", "--help"]).output
    # In another folder, so that the benchmarks are found without being in the current one.
    run = subprocess.run([*PROGRAM, "job_input", "3"], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert run.stdout.startswith("3 lines, ")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["forecast", "no-such-pack", "--pilot", "1"], "the pilot needs two reports"),
        (["ring", "no-such-pack"], "error: no-such-pack"),
        (["transformers_peer", "nothing", "1"], "error: bench.transformers_peer needs the package transformers"),
    ],
)
def test_errors_are_one_line(arguments: list[str], told: str, tmp_path: Path) -> None:
    # A package that cannot be imported, as where the extra was not installed.
    (tmp_path / "transformers.py").write_text("raise ModuleNotFoundError('none here', name='transformers')\n")
    environment = {"PYTHONPATH": str(tmp_path), "PATH": ""}
    run = subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 2
    assert told in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_a_forecast_is_made_and_the_job_is_done(tiny_pack: TinyPack, tmp_path: Path) -> None:
    found, picture = tmp_path / "forecast.json", tmp_path / "forecast.svg"
    pack = str(tiny_pack("int8", context=4096))
    job = ["--memory", "1GiB", "--reports", "4", "--pilot", "2", "--output-tokens", "8"]
    job += ["--context-length", "4096", "--repetitions", "1"]
    run = subprocess.run(
        [*PROGRAM, "forecast", pack, *job, "--json", str(found), "--plot", str(picture)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stderr
    results = json.loads(found.read_text())["results"]
    cases = [(result["arrangement"], result["draft"]) for result in results]
    assert cases == [(first, second) for first in ("colocated", "together") for second in ("none", "ngram")]
    for result in results:
        assert result["reports"] >= 4
        assert result["ratio"] == pytest.approx(result["measured_s"] / result["forecast_s"])
    assert picture.exists()


@pytest.mark.slow
def test_levers_are_measured_and_their_rows_are_kept_beside_the_scheme_that_was_chosen(
    tiny_pack: TinyPack, tmp_path: Path
) -> None:
    found, picture = tmp_path / "levers.json", tmp_path / "levers.svg"
    job = ["--settings", "fits", "--fits", "1GiB", "--shape", "300:8", "--other-shapes", "100:4"]
    job += ["--context-length", "4096", "--reports", "4", "--alone", "1", "--batch", "4"]
    job += ["--cases", "naive", "+ KV management: all", "naive, again"]
    packs = [part for scheme in ("bf16", "int8") for part in (f"--{scheme}", str(tiny_pack(scheme, context=4096)))]
    run = subprocess.run(
        [*PROGRAM, "levers", *packs, *job, "--json", str(found), "--plot", str(picture)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stderr
    results = json.loads(found.read_text())["results"]
    rows = [(result["shape"], result["case"], result["reports"]) for result in results]
    assert rows == [
        ("300:8", "naive", 1),
        ("300:8", "+ KV management: all", 4),
        ("300:8", "naive, again", 1),
        ("100:4", "naive", 1),
        ("100:4", "+ KV management: all", 4),
    ]
    assert {result["scheme"] for result in results if "naive" in result["case"]} == {"bf16"}
    assert run.stdout.count("Quantization: ") == 2
    assert picture.exists()


@pytest.mark.slow
def test_a_wheel_has_the_benchmarks_and_what_they_ask(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for package in ("bench", "headrace", "shared", "prefill_service", "decode_service"):
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for file in ("pyproject.toml", "README.md", "LICENSE", "examples/reports.jsonl"):
        (source / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, source / file)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    subprocess.run([*build, str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"bench/{path.name}" for path in FOLDER.glob("*.py")} <= set(names)
    assert [name for name in names if name.endswith("share/headrace/reports.jsonl")]
