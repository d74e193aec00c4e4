"""The folder that layers are read from: its filesystem, and how fast it is past the page cache."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from mmap import mmap
from pathlib import Path

from headrace.doctor import Finding

READ_BYTES, READERS = 8 << 20, 2
"""About as layers are read."""
PROBE_BYTES = 128 << 20
"""Of the file that is written where the folder holds none that is large enough."""
PROBE_S = 1.5
SLOW_BYTES_PER_S = 500e6
"""A disk that is slower makes nearly any streamed model wait for it."""

_IN_MEMORY = ("tmpfs", "ramfs")
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse", "virtiofs", "ceph", "lustre")


def filesystem(folder: Path, root: Path = Path("/")) -> Finding:
    """Kind and free space."""
    kind = _kind(folder.resolve(), root)
    found = f"{kind}, {shutil.disk_usage(folder).free / 1e9:,.1f} GB free, at {folder}"
    if kind in _IN_MEMORY:
        advice = "this filesystem lies in memory, so a pack here takes memory beside every budget; use one on a disk"
        return Finding("filesystem", "problem", found, advice)
    if kind.split(".")[0] in _REMOTE:
        return Finding("filesystem", "warning", found, "a pack is read again in every pass; copy it to a local disk")
    return Finding("filesystem", "ok", found)


def direct_reading(folder: Path) -> Finding:
    """Whether O_DIRECT works, and the bandwidth of reading in blocks as layers are."""
    try:
        with _probe_file(folder) as path:
            direct = _takes_direct(path)
            speed = _bytes_per_s(path, direct)
    except OSError as error:
        advice = "name a folder that can be read and written, or free 200 MB in it"
        return Finding("disk", "problem", f"{folder} cannot be measured: {error.strerror}", advice)
    found = f"{speed / 1e9:.2f} GB/s {'with O_DIRECT' if direct else 'through the page cache'}, {READERS} readers"
    if not direct:
        advice = "O_DIRECT is refused here: reading fills the page cache beside the budget; use ext4 or xfs on a disk"
        return Finding("disk", "warning", found, advice)
    if speed < SLOW_BYTES_PER_S:
        advice = "streamed layers will wait for this disk: use a faster one, a smaller scheme, or a larger --memory"
        return Finding("disk", "warning", found, advice)
    return Finding("disk", "ok", found)


@contextlib.contextmanager
def _probe_file(folder: Path) -> Iterator[Path]:
    """The largest file of a pack; else one that is written for the time of the measurement."""
    files = sorted(folder.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    if files and files[-1].stat().st_size >= READ_BYTES * READERS:
        yield files[-1]
        return
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".headrace-doctor-") as file:
        block = os.urandom(1 << 20)
        for _ in range(PROBE_BYTES >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        yield Path(file.name)


def _takes_direct(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def _bytes_per_s(path: Path, direct: bool) -> float:
    """Reads the file's whole blocks, over and over, for `PROBE_S`."""
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        blocks = range(path.stat().st_size // READ_BYTES)
        buffers = [memoryview(mmap(-1, READ_BYTES)) for _ in range(READERS)]  # page-aligned, as O_DIRECT wants
        for buffer in buffers:
            buffer[:] = bytes(len(buffer))  # the first touch of memory is no part of reading
        begin_s = time.perf_counter()
        counts = _read_until(descriptor, blocks, buffers, begin_s + PROBE_S)
        return sum(counts) / (time.perf_counter() - begin_s)
    finally:
        os.close(descriptor)


def _read_until(descriptor: int, blocks: Sequence[int], buffers: Sequence[memoryview], end_s: float) -> list[int]:
    counts = [0] * len(buffers)

    def work(reader: int) -> None:
        block = reader
        while time.perf_counter() < end_s:
            counts[reader] += os.preadv(descriptor, [buffers[reader]], blocks[block % len(blocks)] * READ_BYTES)
            block += len(buffers)

    workers = [threading.Thread(target=work, args=(reader,)) for reader in range(len(buffers))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return counts


def _kind(folder: Path, root: Path) -> str:
    """The type of the filesystem that is mounted nearest above the folder."""
    try:
        lines = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "unknown filesystem"
    mounts = {}
    for line in lines:
        before, _, after = line.partition(" - ")
        mounts[before.split()[4].replace("\\040", " ")] = after.split()[0]
    above = next((str(path) for path in (folder, *folder.parents) if str(path) in mounts), "")
    return mounts.get(above, "unknown filesystem")
