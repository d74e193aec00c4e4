"""The ring: files come in their cyclic order, reading runs ahead across the end, and faults do not stick."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shared.errors import DataLossError, UnavailableError
from shared.pack.reader import Pack
from shared.streaming.files import DataFile
from shared.streaming.loader import READ_BYTES
from shared.streaming.ring import Ring
from tests.conftest import TinyPack
from tests.shared.streaming.watched import Disk, WatchedFile, following, slot_for

LAYERS = 5


@dataclass(frozen=True)
class Reels:
    """A ring over the layers of a pack, and everything to watch it with."""

    pack: Pack
    disk: Disk
    slots: int
    ring: Ring

    def walk(self) -> list[bytes]:
        """One pass: the contents of each slot, as they came."""
        self.ring.rewind()
        contents = []
        for _ in range(LAYERS):
            slot = self.ring.take()
            contents.append(slot.buffer.numpy().tobytes())
            self.ring.give_back(slot)
        return contents

    def walk_twice(self) -> None:
        """Two passes: the second one uses nothing that was read before this call."""
        self.walk()
        self.walk()

    @property
    def stored(self) -> list[bytes]:
        return [stored(self.pack, layer) for layer in range(LAYERS)]


@pytest.fixture(scope="module")
def pack(tiny_pack: TinyPack) -> Pack:
    return Pack.open(tiny_pack("fp32", layers=LAYERS))


@pytest.fixture(params=[2, 3, 4])
def reels(request: pytest.FixtureRequest, pack: Pack) -> Iterator[Reels]:
    """Five layers through two to four slots, read by one thread."""
    disk = Disk()
    assert pack.layer_layout.data_bytes <= READ_BYTES, "one read a layer, so that reads are easy to count"
    ring = Ring(watched(pack, disk), [slot_for(pack) for _ in range(request.param)], readers=1)
    yield Reels(pack, disk, request.param, ring)
    ring.close()


@pytest.fixture
def verifying_reels(pack: Pack) -> Iterator[Reels]:
    """The same, with digests compared whenever a file is read."""
    disk = Disk()
    ring = Ring(watched(pack, disk), [slot_for(pack) for _ in range(2)], readers=1, verify_always=True)
    yield Reels(pack, disk, 2, ring)
    ring.close()


def test_every_pass_brings_every_file_in_order(reels: Reels) -> None:
    for passes in range(1, 4):
        assert reels.walk() == reels.stored
        assert reels.ring.bytes_read == passes * LAYERS * reels.pack.layer_layout.data_bytes


def test_when_a_pass_ends_the_next_one_is_already_being_read(reels: Reels) -> None:
    slots = reels.slots
    reels.walk()
    order = following(reels.disk.reads, LAYERS + slots)
    assert order == [index % LAYERS for index in range(LAYERS + slots)]


def test_a_slot_in_use_is_not_read_into(reels: Reels) -> None:
    slots = reels.slots
    taken = [reels.ring.take() for _ in range(slots)]
    assert following(reels.disk.reads, slots) == list(range(slots))
    assert reels.disk.reads.empty()
    assert [slot.buffer.numpy().tobytes() for slot in taken] == reels.stored[:slots]
    for slot in taken:
        reels.ring.give_back(slot)
    assert following(reels.disk.reads, slots) == [(slots + index) % LAYERS for index in range(slots)]


@pytest.mark.parametrize("used", range(LAYERS))
@pytest.mark.parametrize("in_use", [False, True])
def test_rewinding_starts_again_from_the_first_file_and_reads_only_what_is_in_no_slot(
    reels: Reels, used: int, in_use: bool
) -> None:
    for _ in range(used):
        reels.ring.give_back(reels.ring.take())
    if in_use:
        reels.ring.take()
    there = [(used + ahead) % LAYERS for ahead in range(reels.slots)]
    following(reels.disk.reads, used + reels.slots)
    reels.ring.rewind()
    first = range(reels.slots)
    assert sorted(following(reels.disk.reads, len(set(first) - set(there)))) == sorted(set(first) - set(there))
    assert reels.disk.reads.empty()
    assert reels.walk() == reels.stored
    assert reels.walk() == reels.stored


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_file_that_cannot_be_read_fails_when_its_turn_comes_and_is_tried_again(reels: Reels, layer: int) -> None:
    reels.disk.broken.add(layer)
    for _ in range(3):
        with pytest.raises(UnavailableError, match=f"layer {layer} cannot be read: Input/output error"):
            reels.walk_twice()
    reels.disk.broken.clear()
    assert reels.walk() == reels.stored


def test_a_file_that_could_not_be_read_ahead_but_can_be_by_now_is_no_fault(reels: Reels) -> None:
    taken = [reels.ring.take() for _ in range(reels.slots)]
    reels.disk.broken.add(reels.slots)
    for slot in taken:
        reels.ring.give_back(slot)
    assert following(reels.disk.failed, 1) == [reels.slots]
    reels.disk.broken.clear()
    assert reels.ring.take().buffer.numpy().tobytes() == reels.stored[reels.slots]


def test_each_digest_is_compared_once_and_again_when_the_file_has_changed(reels: Reels) -> None:
    for _ in range(3):
        reels.walk()
    assert following(reels.disk.verified, LAYERS) == list(range(LAYERS))
    for _ in range(reels.slots):
        reels.ring.take()  # nothing is being read when the file changes
    os.utime(reels.pack.layer_path(2))
    reels.walk_twice()
    assert following(reels.disk.verified, 1) == [2]
    assert reels.disk.verified.empty()


def test_a_file_that_brings_other_bytes_is_refused_when_it_is_first_read(reels: Reels) -> None:
    reels.disk.flipping.add(3)
    with pytest.raises(DataLossError, match="layer 3 does not match its digest"):
        reels.walk()
    reels.disk.flipping.clear()
    assert reels.walk() == reels.stored


def test_a_disk_that_silently_brings_other_bytes_later_is_found_out_where_digests_are_always_compared(
    verifying_reels: Reels,
) -> None:
    verifying_reels.walk_twice()
    for layer in range(LAYERS):
        verifying_reels.disk.flipping.add(layer)
        with pytest.raises(DataLossError, match=f"layer {layer} does not match its digest"):
            verifying_reels.walk_twice()
        verifying_reels.disk.flipping.clear()
        assert verifying_reels.walk() == verifying_reels.stored


def test_a_layer_is_read_in_parts_by_several_readers(tiny_pack: TinyPack) -> None:
    pack = Pack.open(tiny_pack("fp32", layers=3, hidden=256, intermediate=1024))
    disk = Disk()
    ring = Ring(watched(pack, disk), [slot_for(pack) for _ in range(2)], readers=3)
    try:
        slot = ring.take()
        assert slot.buffer.numpy().tobytes() == stored(pack, 0)
        assert following(disk.reads, 6) == [0] * 3 + [1] * 3
        assert disk.reads.empty()
    finally:
        ring.close()


def test_closing_stops_the_threads_and_closes_the_files(pack: Pack) -> None:
    before, descriptors = set(threading.enumerate()), open_descriptors()
    ring = Ring(watched(pack, Disk()), [slot_for(pack) for _ in range(2)], readers=2)
    ring.give_back(ring.take())
    ring.take()
    assert set(threading.enumerate()) > before
    ring.close()
    assert set(threading.enumerate()) == before
    assert open_descriptors() == descriptors


def test_a_file_in_the_place_of_another_is_refused(pack: Pack) -> None:
    files = [DataFile(pack.layer_path(i), pack.layer_layout, pack.layer_digest(2 * i), f"layer {i}") for i in (0, 1)]
    ring = Ring(files, [slot_for(pack) for _ in range(2)], readers=1)
    try:
        ring.give_back(ring.take())
        with pytest.raises(DataLossError, match="layer 1 does not match its digest"):
            ring.take()
    finally:
        ring.close()


def watched(pack: Pack, disk: Disk) -> list[WatchedFile]:
    return [WatchedFile(pack, layer, disk) for layer in range(pack.spec.layers)]


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def stored(pack: Pack, layer: int) -> bytes:
    """The data section of a layer's file."""
    return pack.layer_path(layer).read_bytes()[pack.layer_layout.data_start :]
