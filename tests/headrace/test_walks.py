"""A reader walks through a page: every command that works on files or starts services, in the page's order.

The models are tiny and random; everything else is what the page says. Services listen on free ports.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.conftest import TinyCheckpoint, TinyPack
from tests.headrace.pages import PAGES, ROOT, WALKED, Shown, blocks

CONTEXT = 4096
"""Longer than any report on the pages."""
PACKS = {
    "int8": ("build/model", "build/smollm2-135m-int8", "PACK", "MODEL"),
    "nf4": ("build/draft", "COPY"),
    "bf16": ("build/unquantized", "OTHER"),
}
"""Scheme -> the names that the pages give to packs of it."""
SOURCES = ("SOURCE", "path/to/model")
NOTES = 100
HEADRACE = (sys.executable, "-c", "from headrace.cli import main; main()")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where measurements are kept, so that pages share them."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [page for page in PAGES if any(s.page == page for s in WALKED)], ids=lambda p: p.name)
def test_every_command_does_what_the_page_says(
    page: Path, tiny_pack: TinyPack, tiny_model: TinyCheckpoint, cache: Path, tmp_path: Path
) -> None:
    shown = [shown for shown in WALKED if shown.page == page]
    furnish(tmp_path, page, made(shown), tiny_pack, tiny_model)
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)}
    with ExitStack() as services:
        for each in shown:
            if each.program.endswith("_service"):
                services.enter_context(service(each, tmp_path, environment))
            elif each.words[:2] == ("headrace", "serve"):
                with service(each, tmp_path, environment):
                    pass
            else:
                run = subprocess.run(
                    command(each), cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
                )
                # What a machine lacks is the doctor's finding, not its fault.
                allowed = (0, 1) if "doctor" in each.words else (each.exit_code,)
                assert run.returncode in allowed, f"{each}\n{run.stderr}"
                assert run.stdout or run.returncode, each
    for answers in tmp_path.glob("answers*.jsonl"):
        assert len(answers.read_text().splitlines()) == NOTES


def made(shown: Sequence[Shown]) -> set[str]:
    """Packs that the page's own commands make."""
    return {each.words[3] for each in shown if each.words[:2] == ("headrace", "pack") and "--check" not in each.words}


def furnish(folder: Path, page: Path, made: set[str], tiny_pack: TinyPack, tiny_model: TinyCheckpoint) -> None:
    """Puts everything in its place that the page takes to be there."""
    places = {name: tiny_pack(scheme, context=CONTEXT) for scheme, names in PACKS.items() for name in names}
    places |= dict.fromkeys(SOURCES, tiny_model(context=CONTEXT)) | {"examples": ROOT / "examples"}
    for name, target in places.items():
        if name not in made:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(target)
    (folder / "out").mkdir()
    (folder / "data").mkdir()
    notes = "\n\n".join(f"Pump {number} stands still; the gauge reads {number}.5 m." for number in range(NOTES))
    for name in ("notes.txt", "report.txt"):
        (folder / name).write_text(notes)
    for program in blocks(page, "python")[:1]:
        (folder / "make_requests.py").write_text(program)
    if "tls" in page.read_text(encoding="utf-8"):
        certify(folder)


def certify(folder: Path) -> None:
    """A key, its certificate, and the same as what signs those of clients."""
    if shutil.which("openssl") is None:
        pytest.skip("making certificates needs the openssl program")
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    make += " -keyout server.key -out server.pem"
    subprocess.run(make.split(), cwd=folder, check=True, capture_output=True)
    shutil.copy(folder / "server.pem", folder / "clients.pem")


def command(shown: Shown) -> list[str]:
    """What is run in place of what is shown: this Python, and free ports."""
    words = [str(Path("data")) if word == "/data" else word for word in shown.words]
    for option in ("--listen", "--metrics"):
        if option in words:
            words[words.index(option) + 1] = "127.0.0.1:0"
    begin = {"headrace": HEADRACE, "python": (sys.executable,)}.get(words[0], (words[0],))
    return [*begin, *words[1:]]


@contextmanager
def service(shown: Shown, folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """A command that serves until it is told to stop; then it ends well."""
    with subprocess.Popen(
        command(shown), cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stderr
        ready = process.stdout.readline()
        assert re.search(r"127\.0\.0\.1:\d+", ready), process.stderr.read()
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate()
    assert process.returncode == 0, errors
