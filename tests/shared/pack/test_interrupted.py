"""Packing that is killed anywhere, or that fills the disk, leaves nothing that loads wrongly, and goes on."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shared.errors import CapacityError, HeadraceError
from shared.pack.reader import Pack
from shared.pack.sources import open_source
from shared.pack.writer import PackProgress, file_sizes, write_pack
from shared.quant.schemes import scheme_named
from tests.conftest import TinyCheckpoint, TinyPack
from tests.shared.pack.checkpoints import files_of

ROOT = Path(__file__).parents[3]


def kill_packing(checkpoint: Path, folder: Path, scheme: str, packs: int, seed: int) -> list[Path]:
    arguments = map(str, (checkpoint, folder, scheme, packs, seed))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.shared.pack.killed_packing", *arguments]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return [folder / line.split()[0] for line in run.stdout.splitlines()]


@pytest.mark.parametrize(("scheme", "packs"), [("int8", 6), pytest.param("nf4", 40, marks=pytest.mark.slow)])
def test_a_packing_that_is_killed_at_random_points_ends_byte_for_byte_as_one_that_is_not(
    scheme: str, packs: int, tiny_model: TinyCheckpoint, tiny_pack: TinyPack, tmp_path: Path
) -> None:
    expected = files_of(tiny_pack(scheme))
    made = kill_packing(tiny_model(), tmp_path, scheme, packs, seed=7)
    assert len(made) == packs
    for pack in made:
        assert files_of(pack) == expected


def test_what_a_killed_packing_leaves_never_opens(tiny_model: TinyCheckpoint, tmp_path: Path) -> None:
    """The growing pack has no manifest until everything else in it is on disk."""
    source, growing = open_source(tiny_model()), tmp_path / "pack.partial/pack"
    refused = 0

    def look(_: PackProgress) -> None:
        nonlocal refused
        try:
            Pack.open(growing)
        except HeadraceError:
            refused += 1

    write_pack(source, tmp_path / "pack", scheme_named("bf16"), progress=look)
    assert refused == len(Pack.open(tmp_path / "pack").manifest.files) + 1


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """No file can grow beyond this: writing fails as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("scheme", ["fp32", "nf4"])
def test_a_disk_that_fills_up_is_told_of_and_packing_goes_on_once_there_is_room(
    scheme: str, tiny_model: TinyCheckpoint, tiny_pack: TinyPack, tmp_path: Path
) -> None:
    source, out, reports = open_source(tiny_model()), tmp_path / "pack", list[PackProgress]()
    layer_bytes = Pack.open(tiny_pack(scheme)).layer_layout.file_bytes
    outer_bytes = Pack.open(tiny_pack(scheme)).outer_layout.file_bytes
    with (
        largest_file(min(layer_bytes, outer_bytes) + 4096),
        pytest.raises(CapacityError, match=r"pack stopped: File too large, with [\d,]+ bytes free .* goes on where"),
    ):
        write_pack(source, out, scheme_named(scheme))
    assert not out.exists()
    assert list(tmp_path.rglob("*.tmp")) == []
    write_pack(source, out, scheme_named(scheme), progress=reports.append)
    assert reports[0].resumed_bytes > 0
    assert files_of(out) == files_of(tiny_pack(scheme))


def test_a_journal_that_cannot_grow_costs_one_file_at_most(tiny_model: TinyCheckpoint, tmp_path: Path) -> None:
    source, out = open_source(tiny_model(layers=32, hidden=32, intermediate=32, vocab=260)), tmp_path / "pack"
    scheme = scheme_named("bf16")
    with largest_file(max(file_sizes(source, scheme).values()) + 100), pytest.raises(CapacityError):
        write_pack(source, out, scheme)
    reports: list[PackProgress] = []
    write_pack(source, out, scheme, progress=reports.append)
    assert reports[0].resumed_bytes > reports[0].total_bytes / 4
    Pack.open(out).verify()
