"""What the doctor finds, on machines that are folders of made-up /proc and /sys files."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from headrace.doctor import machine, pack, software, storage
from shared.processor import instructions, processor_name
from tests.conftest import TinyPack


def root(folder: Path, **files: str) -> Path:
    """A root with files; "__" in a name stands for "/"."""
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_max", ".max")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def cpu(*flags: str) -> str:
    return f"processor\t: 0\nmodel name\t: Made Up 1\nflags\t\t: fpu {' '.join(flags)}\n"


@pytest.mark.parametrize(
    ("flags", "level", "says"),
    [
        (("avx2", "avx512_bf16", "avx512_vnni", "amx_bf16"), "ok", ""),
        (("avx2", "avx512_bf16", "avx512_vnni"), "ok", ""),
        (("avx2", "avx512_vnni"), "warning", "prefer int8"),
        (("avx2", "avx512_bf16"), "warning", "compare schemes"),
        (("avx2",), "warning", "prefer int8"),
        ((), "warning", "AVX2 or better"),
    ],
)
def test_the_processor_decides_which_scheme_is_advised(
    tmp_path: Path, flags: tuple[str, ...], level: str, says: str
) -> None:
    found = machine.processor(root(tmp_path, proc__cpuinfo=cpu(*flags)))
    assert (found.level, says in found.advice, bool(found.advice)) == (level, True, level != "ok")
    assert found.found.startswith("Made Up 1: ")
    assert all(flag in found.found for flag in flags)


def test_a_system_that_tells_nothing_has_no_instructions_but_a_name(tmp_path: Path) -> None:
    assert instructions(tmp_path) == frozenset()
    assert processor_name(tmp_path) != ""


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"OMP_WAIT_POLICY": "active"}, "unset OMP_WAIT_POLICY"),
        ({"OMP_NUM_THREADS": "4096"}, "set OMP_NUM_THREADS to"),
        ({"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}, ""),
    ],
)
def test_thread_settings_that_cost_time_are_told(tmp_path: Path, environment: dict[str, str], says: str) -> None:
    found = machine.threads(environment, tmp_path)
    assert says in found.advice
    assert found.level == ("warning" if says else "ok")
    assert all(f"{name}={value}" in found.found for name, value in environment.items())


def test_a_control_group_with_less_time_than_cores_needs_fewer_threads(tmp_path: Path) -> None:
    found = machine.threads({}, root(tmp_path, sys__fs__cgroup__cpu_max="50000 100000\n"))
    assert (found.level, "--threads 1" in found.advice) == ("warning", True)


def meminfo(total_gib: float, free_gib: float) -> str:
    return f"MemTotal: {int(total_gib * 2**20)} kB\nMemAvailable: {int(free_gib * 2**20)} kB\n"


@pytest.mark.parametrize(
    ("total", "free", "level", "says"),
    [(16, 12, "ok", ""), (16, 5, "warning", "below 5.0 GiB"), (16, 0.5, "problem", "free memory")],
)
def test_memory_that_others_hold_is_told(tmp_path: Path, total: float, free: float, level: str, says: str) -> None:
    found = machine.memory(root(tmp_path, proc__meminfo=meminfo(total, free)))
    assert (found.level, says in found.advice) == (level, True)


def test_the_limit_of_the_control_group_is_what_counts(tmp_path: Path) -> None:
    files = {"proc__meminfo": meminfo(16, 12), "proc__self__cgroup": "0::/\n"}
    found = machine.memory(root(tmp_path, **files, sys__fs__cgroup__memory_max=str(3 << 29)))
    assert "1.5 GiB available of 16.0 GiB, this control group may have 1.5 GiB" in found.found


@pytest.mark.parametrize(
    ("kind", "level"), [("ext4", "ok"), ("tmpfs", "problem"), ("nfs4", "warning"), ("fuse.sshfs", "warning")]
)
def test_filesystems_in_memory_and_far_away_are_told(tmp_path: Path, kind: str, level: str) -> None:
    folder = tmp_path / "packs"
    folder.mkdir()
    mounts = f"1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 8:2 / {folder.resolve()} rw,noatime shared:1 - {kind} b rw\n"
    found = storage.filesystem(folder, root(tmp_path / "root", proc__self__mountinfo=mounts))
    assert (found.level, found.found.startswith(f"{kind}, ")) == (level, True)


def test_the_disk_is_measured_and_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PROBE_BYTES", 16 << 20)
    monkeypatch.setattr(storage, "PROBE_S", 0.05)
    found = storage.direct_reading(tmp_path)
    assert found.level in ("ok", "warning")  # as fast as this disk is
    assert "GB/s" in found.found
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    found = storage.direct_reading(tmp_path / "absent")
    assert (found.level, "No such file" in found.found) == ("problem", True)


def test_packages_too_old_or_missing_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [found.level for found in software.versions()] == ["ok"]
    monkeypatch.setattr(software, "PACKAGES", ("no-such-package", "grpcio", "bitsandbytes"))
    monkeypatch.setattr(software, "_oldest", lambda: {"grpcio": "9999.0"})
    missing, old, rest = software.versions()
    assert (missing.level, missing.found) == ("warning", "no-such-package is missing")
    assert (old.level, old.advice) == ("problem", "install grpcio 9999.0 or newer")
    assert "bitsandbytes" in rest.found


def test_ports_are_really_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    assert software.ports().level == "ok"

    def refuse(address: object) -> socket.socket:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket, "create_server", refuse)
    assert (software.ports().level, "not permitted" in software.ports().found) == ("problem", True)


def test_a_pack_is_whole_or_the_problem_is_named(tiny_pack: TinyPack, tmp_path: Path) -> None:
    files = {"proc__cpuinfo": cpu("avx512_vnni"), "proc__meminfo": meminfo(16, 12)}
    whole, scheme, fit = pack.health(tiny_pack("bf16"), root(tmp_path, **files))
    assert (whole.level, fit.level) == ("ok", "ok")
    assert (scheme.level, scheme.advice.split(",")[0]) == ("warning", "pack it in int8")
    _, scheme, _ = pack.health(
        tiny_pack("int8"), root(tmp_path, proc__cpuinfo=cpu("avx2"), proc__meminfo=meminfo(16, 12))
    )
    assert scheme.level == "ok"
    (broken,) = pack.health(tmp_path)
    assert (broken.level, "is no pack" in broken.found) == ("problem", True)


def test_a_pack_larger_than_half_of_the_memory_will_be_streamed(tiny_pack: TinyPack, tmp_path: Path) -> None:
    small = root(tmp_path, proc__cpuinfo=cpu("avx512_bf16"), proc__meminfo="MemTotal: 100 kB\n")
    *_, fit = pack.health(tiny_pack("bf16"), small)
    assert (fit.level, "streamed" in fit.advice) == ("note", True)
