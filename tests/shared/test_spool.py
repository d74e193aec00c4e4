"""The spool: memory, then files, then the end of the slowest reader's stream alone; and everything comes back."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from shared.errors import CapacityError, ConfigurationError, UnavailableError
from shared.spool import Spool, SpooledOutlet
from shared.spool_file import SpoolFile, SpoolFolder

SIZE = 1000


@dataclass(frozen=True)
class Parcel:
    """An item with two parts of bytes."""

    number: int
    first: bytes
    second: bytes

    @property
    def payload(self) -> tuple[bytes, bytes]:
        return self.first, self.second

    def with_payload(self, payload: Sequence[bytes]) -> Parcel:
        return replace(self, first=payload[0], second=payload[1])


def parcels(count: int) -> list[Parcel]:
    return [Parcel(number, bytes([number % 251]) * 400, os.urandom(600)) for number in range(count)]


@contextmanager
def spool_of(memory_bytes: int, folder: SpoolFolder | None = None) -> Iterator[Spool]:
    spool = Spool(memory_bytes, folder)
    try:
        yield spool
    finally:
        spool.close()
    assert "spool-writer" not in [thread.name for thread in threading.enumerate()]


async def filled(outlet: SpooledOutlet[Parcel], items: Sequence[Parcel]) -> None:
    """Puts items as an engine does: on a thread."""

    def fill() -> None:
        for item in items:
            outlet.put(item, SIZE)

    await asyncio.to_thread(fill)


async def drained(outlet: SpooledOutlet[Parcel]) -> list[Parcel]:
    return [item async for item in outlet]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_what_memory_does_not_hold_waits_in_a_file_without_a_name_and_comes_back_in_order(tmp_path: Path) -> None:
    items = parcels(50)
    await asyncio.to_thread(int)  # the executor's thread and its files are there
    before = open_files()
    with spool_of(10 * SIZE, SpoolFolder(tmp_path, 1 << 20)) as spool:
        outlet = SpooledOutlet[Parcel](spool)
        await filled(outlet, items)
        assert spool.memory_bytes <= 10 * SIZE
        assert spool.memory_bytes + spool.disk_bytes == outlet.pending == 50 * SIZE
        assert (os.listdir(tmp_path), open_files() - before) == ([], 1)
        outlet.close()
        assert await drained(outlet) == items
        assert (spool.memory_bytes, spool.disk_bytes, outlet.pending) == (0, 0, 0)
    assert open_files() == before


async def test_while_half_of_the_memory_suffices_no_file_is_made(tmp_path: Path) -> None:
    with spool_of(10 * SIZE, SpoolFolder(tmp_path / "none", 1 << 20)) as spool:
        outlet = SpooledOutlet[Parcel](spool)
        await filled(outlet, parcels(5))
        assert (spool.memory_bytes, spool.disk_bytes) == (5 * SIZE, 0)


async def test_where_all_is_full_only_the_slowest_reader_loses_its_stream(tmp_path: Path) -> None:
    with spool_of(10 * SIZE, SpoolFolder(tmp_path, 20 * SIZE)) as spool:
        slow, fast = SpooledOutlet[Parcel](spool), SpooledOutlet[Parcel](spool)
        items = parcels(3)
        await filled(fast, items)
        await filled(slow, parcels(60))
        assert (slow.ended, slow.pending) == (True, 0)
        assert spool.memory_bytes + spool.disk_bytes == fast.pending == 3 * SIZE
        with pytest.raises(CapacityError, match=r"^\d+ bytes of KV wait for a caller that reads too slowly"):
            await drained(slow)
        fast.close()
        assert await drained(fast) == items


async def test_without_files_memory_is_all_there_is() -> None:
    with spool_of(4 * SIZE) as spool:
        outlet = SpooledOutlet[Parcel](spool)
        await filled(outlet, parcels(4))
        assert not outlet.ended
        await filled(outlet, parcels(1))
        with pytest.raises(CapacityError, match=f"{5 * SIZE} bytes of KV wait"):
            await drained(outlet)


async def test_a_reader_that_goes_on_while_items_come_gets_each_of_them_once(tmp_path: Path) -> None:
    items = parcels(400)
    with spool_of(8 * SIZE, SpoolFolder(tmp_path, 1 << 20)) as spool:
        outlet = SpooledOutlet[Parcel](spool)
        reading = asyncio.create_task(drained(outlet))
        await filled(outlet, items)
        outlet.close()
        assert await reading == items
        assert (spool.memory_bytes, spool.disk_bytes) == (0, 0)


async def test_dropping_a_stream_frees_its_memory_and_its_file_and_takes_nothing_more(tmp_path: Path) -> None:
    await asyncio.to_thread(int)
    before = open_files()
    with spool_of(10 * SIZE, SpoolFolder(tmp_path, 1 << 20)) as spool:
        outlet = SpooledOutlet[Parcel](spool)
        await filled(outlet, parcels(30))
        outlet.drop(UnavailableError("the call is over"))
        await filled(outlet, parcels(3))
        assert (spool.memory_bytes, spool.disk_bytes, outlet.pending) == (0, 0, 0)
    assert open_files() == before


async def test_a_reader_that_leaves_halfway_leaves_nothing(tmp_path: Path) -> None:
    with spool_of(10 * SIZE, SpoolFolder(tmp_path, 1 << 20)) as spool:
        outlet = SpooledOutlet[Parcel](spool)
        await filled(outlet, parcels(30))
        reader = outlet.__aiter__()
        for _ in range(20):
            await anext(reader)
        outlet.drop(UnavailableError("the call is over"))
        await reader.aclose()
        assert (spool.memory_bytes, spool.disk_bytes) == (0, 0)


class FullDisk(SpoolFolder):
    """A disk on which files can be made but not written."""

    def new_file(self) -> SpoolFile:
        return _FullFile(self.path)


class _FullFile(SpoolFile):
    def append(self, parts: Sequence[bytes]) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("kind", ["full", "gone"])
async def test_a_disk_that_does_not_take_anything_costs_only_the_slowest_reader_who_is_told_why(
    tmp_path: Path, kind: str
) -> None:
    folder = FullDisk(tmp_path, 1 << 20) if kind == "full" else SpoolFolder(tmp_path / "gone", 1 << 20)
    with spool_of(10 * SIZE, folder) as spool:
        slow, fast = SpooledOutlet[Parcel](spool), SpooledOutlet[Parcel](spool)
        items = parcels(3)
        await filled(fast, items)
        await filled(slow, parcels(7))
        assert not slow.ended, "memory still has room"
        await filled(slow, parcels(1))
        reason = "No space left on device" if kind == "full" else "No such file or directory"
        with pytest.raises(CapacityError, match=f"{8 * SIZE} bytes .* does not take them: {reason}"):
            await drained(slow)
        fast.close()
        assert await drained(fast) == items


async def test_a_disk_that_has_room_again_is_used_again(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    with spool_of(10 * SIZE, SpoolFolder(folder, 1 << 20)) as spool:
        first, second = SpooledOutlet[Parcel](spool), SpooledOutlet[Parcel](spool)
        await filled(first, parcels(11))
        assert first.ended
        folder.mkdir()
        items = parcels(30)
        await filled(second, items)
        second.close()
        assert await drained(second) == items


async def test_a_file_that_cannot_be_read_back_is_that_readers_error(tmp_path: Path) -> None:
    with spool_of(10 * SIZE, SpoolFolder(tmp_path, 1 << 20)) as spool:
        outlet = SpooledOutlet[Parcel](spool)
        await filled(outlet, parcels(30))
        spool.close()  # nothing is written any more
        assert outlet.file is not None
        os.ftruncate(outlet.file._descriptor, 100)
        with pytest.raises(UnavailableError, match="cannot be read back"):
            await drained(outlet)


def test_a_folder_where_no_file_can_be_made_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"{tmp_path / 'none'}: No such file or directory.*--spool-dir"):
        SpoolFolder.checked(tmp_path / "none", 1)


def test_the_default_folder_is_usable() -> None:
    assert SpoolFolder.checked(None, 1).path.is_dir()
