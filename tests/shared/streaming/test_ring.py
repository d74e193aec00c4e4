"""The ring: files come in their cyclic order, reading runs ahead across the end, and faults do not stick."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue

import pytest
import torch

from shared.errors import DataLossError, UnavailableError
from shared.pack.reader import Pack
from shared.streaming.files import DataFile
from shared.streaming.ring import READ_BYTES, Ring
from tests.conftest import TinyPack
from tests.shared.streaming.watched import PATIENCE_S, WatchedFile, slot_for

LAYERS = 5


@dataclass(frozen=True)
class Reels:
    """A ring over the layers of a pack, and everything to watch it with."""

    pack: Pack
    files: list[WatchedFile]
    slots: int
    reads: SimpleQueue[int]
    ring: Ring

    def walk(self) -> list[bytes]:
        """One pass: the contents of each slot, as they came."""
        contents = []
        for _ in self.files:
            slot = self.ring.take()
            contents.append(slot.buffer.numpy().tobytes())
            self.ring.give_back(slot)
        return contents

    def walk_twice(self) -> None:
        """Two passes: the second one uses nothing that was read before this call."""
        self.walk()
        self.walk()

    def next_reads(self, count: int) -> list[int]:
        """The layers that the next reads are of, waiting for the reads to begin."""
        return [self.reads.get(timeout=PATIENCE_S) for _ in range(count)]


@pytest.fixture(params=[2, 3, 4])
def reels(request: pytest.FixtureRequest, tiny_pack: TinyPack) -> Iterator[Reels]:
    """Five layers through two to four slots, read by one thread."""
    pack = Pack.open(tiny_pack("fp32", layers=LAYERS))
    reads: SimpleQueue[int] = SimpleQueue()
    files = [WatchedFile(pack, layer, reads) for layer in range(LAYERS)]
    assert pack.layer_layout.data_bytes <= READ_BYTES, "one read a layer, so that reads are easy to count"
    ring = Ring(files, [slot_for(pack) for _ in range(request.param)], readers=1)
    yield Reels(pack, files, request.param, reads, ring)
    ring.close()


def test_every_pass_brings_every_file_in_order(reels: Reels) -> None:
    expected = [stored(reels.pack, layer) for layer in range(LAYERS)]
    for passes in range(1, 4):
        assert reels.walk() == expected
        assert reels.ring.bytes_read == passes * LAYERS * reels.pack.layer_layout.data_bytes


def test_when_a_pass_ends_the_next_one_is_already_being_read(reels: Reels) -> None:
    slots = reels.slots
    reels.walk()
    order = reels.next_reads(LAYERS + slots)
    assert order == [index % LAYERS for index in range(LAYERS + slots)]


def test_a_slot_in_use_is_not_read_into(reels: Reels) -> None:
    slots = reels.slots
    taken = [reels.ring.take() for _ in range(slots)]
    assert reels.next_reads(slots) == list(range(slots))
    assert reels.reads.empty()
    assert [slot.buffer.numpy().tobytes() for slot in taken] == [stored(reels.pack, i) for i in range(slots)]
    for slot in taken:
        reels.ring.give_back(slot)
    assert reels.next_reads(slots) == [(slots + index) % LAYERS for index in range(slots)]


def test_rewinding_starts_again_from_the_first_file_at_once(reels: Reels) -> None:
    slots = reels.slots
    reels.ring.give_back(reels.ring.take())
    reels.ring.take()
    reels.ring.rewind()
    seen = reels.next_reads(1)
    while seen.count(0) < 2:
        seen += reels.next_reads(1)
    assert reels.next_reads(slots - 1) == list(range(1, slots))
    assert reels.walk() == [stored(reels.pack, layer) for layer in range(LAYERS)]


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_file_that_cannot_be_read_fails_when_its_turn_comes_and_is_tried_again(reels: Reels, layer: int) -> None:
    reels.files[layer].broken = True
    for _ in range(2):
        reels.ring.rewind()
        with pytest.raises(UnavailableError, match=f"layer {layer} cannot be read"):
            reels.walk()
    reels.files[layer].broken = False
    assert reels.walk() == [stored(reels.pack, layer) for layer in range(LAYERS)]


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_file_that_breaks_later_fails_and_is_tried_again(reels: Reels, layer: int) -> None:
    reels.walk()
    reels.files[layer].broken = True
    with pytest.raises(UnavailableError, match=f"layer {layer} cannot be read"):
        reels.walk_twice()
    reels.files[layer].broken = False
    assert reels.walk() == [stored(reels.pack, layer) for layer in range(LAYERS)]


def test_a_layer_is_read_in_parts_by_several_readers(tiny_pack: TinyPack) -> None:
    pack = Pack.open(tiny_pack("fp32", layers=3, hidden=256, intermediate=1024))
    reads: SimpleQueue[int] = SimpleQueue()
    ring = Ring([WatchedFile(pack, i, reads) for i in range(3)], [slot_for(pack) for _ in range(2)], readers=3)
    try:
        slot = ring.take()
        assert slot.buffer.numpy().tobytes() == stored(pack, 0)
        parts = -(-pack.layer_layout.data_bytes // READ_BYTES)
        assert parts > 1
        assert [reads.get(timeout=PATIENCE_S) for _ in range(2 * parts)] == [0] * parts + [1] * parts
    finally:
        ring.close()


def test_closing_stops_the_readers_and_closes_the_files(tiny_pack: TinyPack) -> None:
    pack = Pack.open(tiny_pack("fp32", layers=LAYERS))
    before = set(threading.enumerate())
    files = [WatchedFile(pack, layer, SimpleQueue()) for layer in range(LAYERS)]
    ring = Ring(files, [slot_for(pack) for _ in range(2)], readers=2)
    ring.give_back(ring.take())
    assert set(threading.enumerate()) > before
    ring.close()
    assert set(threading.enumerate()) == before
    with pytest.raises(UnavailableError, match="Bad file descriptor"):
        files[0].read(torch.empty(1, dtype=torch.uint8), 0)


def test_a_file_in_the_place_of_another_is_refused(tiny_pack: TinyPack) -> None:
    pack = Pack.open(tiny_pack("fp32", layers=LAYERS))
    files = [DataFile(pack.layer_path(i), pack.layer_layout, pack.layer_digest(2 * i), f"layer {i}") for i in (0, 1)]
    ring = Ring(files, [slot_for(pack) for _ in range(2)], readers=1)
    try:
        ring.give_back(ring.take())
        with pytest.raises(DataLossError, match="layer 1 does not match its digest"):
            ring.take()
    finally:
        ring.close()


def stored(pack: Pack, layer: int) -> bytes:
    """The data section of a layer's file."""
    return pack.layer_path(layer).read_bytes()[pack.layer_layout.data_start :]
