"""A device's tiers, with host memory for the device's: order, what is never overwritten, and honest faults."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from shared.errors import DataLossError, UnavailableError, UnsupportedModelError
from shared.model.model import Model
from shared.pack.reader import Pack
from shared.streaming.copies import Copies, SynchronousCopies
from shared.streaming.device_ring import DeviceRing
from shared.streaming.plan import Residency
from shared.streaming.ring import Ring
from shared.streaming.stream import LayerStream
from shared.streaming.tiers import device_slot
from tests.conftest import FamilyPack, TinyPack
from tests.shared.model.runs import prompt_logits, random_tokens
from tests.shared.streaming.slow_device import SlowDevice
from tests.shared.streaming.test_ring import open_descriptors
from tests.shared.streaming.test_ring import stored as stored_bytes
from tests.shared.streaming.test_stream import assert_equal, assert_walk, tensors_of, walk_twice
from tests.shared.streaming.watched import PATIENCE_S, Disk, WatchedFile, following, slot_for

LAYERS = 6
EVERYTHING = frozenset(range(LAYERS))


@pytest.fixture(scope="module")
def pack(tiny_pack: TinyPack) -> Pack:
    return Pack.open(tiny_pack("int8", layers=LAYERS, attention_bias=True))


def stored_tensors(pack: Pack) -> list[dict[str, Tensor]]:
    """The tensors of every layer, as the safetensors library reads them."""
    layers = [load_file(pack.layer_path(layer)) for layer in range(LAYERS)]
    return [{name: value for name, value in layer.items() if not name.startswith("pad.")} for layer in layers]


@dataclass(frozen=True)
class Tiers:
    """A ring of two slots of device memory behind one of host memory, and everything to watch them with."""

    pack: Pack
    disk: Disk
    device: SlowDevice
    ring: DeviceRing

    def layer(self, layer: int) -> bytes:
        """A layer's bytes."""
        return stored_bytes(self.pack, layer)

    def walk(self) -> list[bytes]:
        """One pass: the contents of each slot, as they came."""
        self.ring.rewind()
        contents = []
        for _ in range(LAYERS):
            slot = self.ring.take()
            contents.append(slot.buffer.numpy().tobytes())
            self.ring.give_back(slot)
        return contents

    def copied(self, count: int) -> list[int]:
        """The layers of the next copies, waiting for them to end."""
        beginnings = {self.layer(layer)[:64]: layer for layer in range(LAYERS)}
        return [beginnings[self.device.copies.get(timeout=PATIENCE_S)] for _ in range(count)]

    @property
    def whole(self) -> list[bytes]:
        return [self.layer(layer) for layer in range(LAYERS)]


@contextmanager
def tiers_of(
    pack: Pack, device: SlowDevice, host_slots: int = 2, kept: frozenset[int] = frozenset()
) -> Iterator[Tiers]:
    disk = Disk()
    files = [WatchedFile(pack, layer, disk) for layer in range(LAYERS) if layer not in kept]
    buffers = {layer: torch.frombuffer(bytearray(stored_bytes(pack, layer)), dtype=torch.uint8) for layer in kept}
    host = Ring(files, [slot_for(pack) for _ in range(host_slots)], readers=1)
    ring = ring_of(pack, device, host, buffers)
    try:
        yield Tiers(pack, disk, device, ring)
    finally:
        device.may_copy.set()
        device.computes_slowly = False
        device.finish_computing()
        ring.close()
        device.close()


def ring_of(pack: Pack, device: SlowDevice, host: Ring, kept: Mapping[int, Tensor] | None = None) -> DeviceRing:
    slots = dict(device_slot(pack, device.device) for _ in range(2))
    return DeviceRing(host, kept or {}, LAYERS, slots, device)


@st.composite
def residencies(draw: st.DrawFn) -> Residency:
    """Every mixture of the three tiers."""
    resident = frozenset(draw(st.sets(st.sampled_from(range(LAYERS)))))
    others = EVERYTHING - resident
    host = frozenset(draw(st.sets(st.sampled_from(sorted(others))))) if others else frozenset()
    read = len(others - host)
    return Residency(
        resident,
        slots=draw(st.integers(1, read)) if read else 0,
        device_slots=draw(st.integers(1, 3)) if others else 0,
        host=host,
    )


@settings(max_examples=40, deadline=None)
@given(residencies(), st.lists(st.integers(1, LAYERS), min_size=1, max_size=5), st.booleans())
def test_walks_bring_the_right_weights_in_order_whichever_tiers_they_lie_in_also_after_early_ends(
    pack: Pack, residency: Residency, ends: list[int], slow: bool
) -> None:
    stored = stored_tensors(pack)
    copies: Copies = SlowDevice() if slow else SynchronousCopies()
    with closing(copies), closing(LayerStream(pack, residency, copies=copies)) as stream:
        for end in ends:
            for expected, (layer, weights) in enumerate(stream.walk()):
                assert layer == expected
                assert_equal(tensors_of(weights), stored[layer])
                if layer + 1 == end:
                    break


@pytest.mark.parametrize("scheme", ["fp32", "bf16", "int8", "nf4"])
def test_logits_are_the_same_to_the_last_bit_in_all_tiers(tiny_pack: TinyPack, scheme: str) -> None:
    pack = Pack.open(tiny_pack(scheme, layers=LAYERS))
    prompts = [random_tokens(length, pack.spec.vocab_size, length) for length in (5, 40)]
    with closing(Model(pack, Residency(EVERYTHING, 0))) as model:
        expected = torch.cat(prompt_logits(model, prompts))
    for residency in (
        Residency(EVERYTHING, 0),
        Residency(frozenset(), 2, device_slots=2),
        Residency(frozenset({1}), 2, device_slots=2, host=frozenset({0, 4})),
        Residency(frozenset(), 0, device_slots=3, host=EVERYTHING),
    ):
        device = SlowDevice()
        with closing(device), closing(Model(pack, residency, copies=device)) as model:
            for _ in range(2):
                assert torch.equal(torch.cat(prompt_logits(model, prompts)), expected)


def test_only_layers_that_were_read_for_a_pass_count_as_streamed(pack: Pack) -> None:
    residency = Residency(frozenset({0}), 2, device_slots=2, host=frozenset({2, 3}))
    with closing(LayerStream(pack, residency, copies=SynchronousCopies())) as stream:
        for _ in range(2):
            for _ in stream.walk():
                pass
        assert stream.streamed_bytes == 2 * 3 * pack.layer_layout.data_bytes


def test_when_a_pass_ends_the_beginning_of_the_next_one_is_already_on_the_device(pack: Pack) -> None:
    with tiers_of(pack, SlowDevice(), kept=frozenset({1, 4})) as tiers:
        assert tiers.walk() == tiers.whole
        assert tiers.copied(LAYERS + 2) == [*range(LAYERS), 0, 1]
        assert tiers.walk() == tiers.whole


def test_nothing_comes_into_a_slot_that_is_taken_or_still_computed_with(pack: Pack) -> None:
    with tiers_of(pack, SlowDevice()) as tiers:
        device = tiers.device
        first, second = tiers.ring.take(), tiers.ring.take()
        assert tiers.copied(2) == [0, 1]
        assert [device.asked.get(timeout=PATIENCE_S)[0] is slot.buffer for slot in (first, second)] == [True, True]
        device.computes_slowly = True
        tiers.ring.give_back(first)
        target, after = device.asked.get(timeout=PATIENCE_S)
        assert target is first.buffer
        assert [after] == device.computing, "the copy comes after what was asked for when the slot was given back"
        assert device.copies.empty()
        assert [slot.buffer.numpy().tobytes() for slot in (first, second)] == tiers.whole[:2]
        device.finish_computing()
        assert tiers.copied(1) == [2]
        assert tiers.ring.take() is first
        assert [slot.buffer.numpy().tobytes() for slot in (first, second)] == [tiers.layer(2), tiers.layer(1)]
        assert device.asked.empty(), "the other slot is taken"


def test_nothing_is_read_into_host_memory_that_is_still_copied_from(pack: Pack) -> None:
    device = SlowDevice()
    device.may_copy.clear()
    with tiers_of(pack, device) as tiers:
        assert following(tiers.disk.reads, 2) == [0, 1]
        assert tiers.disk.reads.empty()
        device.may_copy.set()
        assert tiers.walk() == tiers.whole


@pytest.mark.parametrize("used", range(LAYERS))
@pytest.mark.parametrize("in_use", [False, True])
@pytest.mark.parametrize("kept", [frozenset(), frozenset({0, 3})])
def test_rewinding_starts_again_from_the_first_layer(pack: Pack, used: int, in_use: bool, kept: frozenset[int]) -> None:
    with tiers_of(pack, SlowDevice(), host_slots=3, kept=kept) as tiers:
        for _ in range(used):
            tiers.ring.give_back(tiers.ring.take())
        if in_use:
            tiers.ring.take()
        assert tiers.walk() == tiers.whole
        assert tiers.walk() == tiers.whole


@pytest.mark.parametrize("layer", [0, 1, LAYERS - 1])
def test_a_file_that_cannot_be_read_fails_when_its_turn_comes_and_is_tried_again(pack: Pack, layer: int) -> None:
    with tiers_of(pack, SlowDevice(), kept=frozenset({2})) as tiers:
        tiers.walk()
        tiers.disk.broken.add(layer)
        for _ in range(3):
            with pytest.raises(UnavailableError, match=f"layer {layer} cannot be read: Input/output error"):
                [tiers.walk() for _ in range(2)]
        tiers.disk.broken.clear()
        assert tiers.walk() == tiers.whole


def test_a_file_that_could_not_be_read_ahead_but_can_be_when_its_turn_comes_is_no_fault(pack: Pack) -> None:
    taker = threading.current_thread()

    class Restored(WatchedFile):
        """A file that can be read again when the one who needs it asks for it anew, and nobody before."""

        def reopen(self, label: str | None = None) -> None:
            if threading.current_thread() is taker:
                disk.broken.clear()
            super().reopen(label)

    disk, device = Disk(broken={4}), SlowDevice()
    host = Ring([Restored(pack, layer, disk) for layer in range(LAYERS)], [slot_for(pack), slot_for(pack)], readers=1)
    with closing(device), closing(ring_of(pack, device, host)) as ring:
        tiers = Tiers(pack, disk, device, ring)
        assert tiers.walk() == tiers.whole
        assert following(disk.failed, 1) == [4]
        assert disk.failed.empty()


def test_a_device_that_fails_fails_the_pass_and_the_next_one_is_right(pack: Pack) -> None:
    with tiers_of(pack, SlowDevice()) as tiers:
        assert tiers.walk() == tiers.whole
        tiers.device.fails = True
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the device is broken"):
                [tiers.walk() for _ in range(2)]
        tiers.device.fails = False
        assert tiers.walk() == tiers.whole


def test_a_stream_recovers_from_a_damaged_file(pack: Pack, tmp_path: Path) -> None:
    damaged = Pack.open(Path(shutil.copytree(pack.path, tmp_path / "pack")))
    path = damaged.layer_path(4)
    whole = path.read_bytes()
    residency = Residency(frozenset({0}), 2, device_slots=2, host=frozenset({2}))
    with closing(LayerStream(damaged, residency, copies=SynchronousCopies())) as stream:
        assert_walk(stream, stored_tensors(pack))
        with path.open("r+b") as file:
            file.truncate(damaged.layer_layout.data_start + 4096)
            with pytest.raises(DataLossError, match="layer 4 is truncated at byte 8192; pack the model again"):
                walk_twice(stream)
            file.write(whole)
        assert_walk(stream, stored_tensors(pack))


def test_closing_stops_the_threads_and_closes_the_files(pack: Pack) -> None:
    before, descriptors = set(threading.enumerate()), open_descriptors()
    with tiers_of(pack, SlowDevice()) as tiers:
        tiers.ring.give_back(tiers.ring.take())
        tiers.ring.take()
        assert set(threading.enumerate()) > before
    assert set(threading.enumerate()) == before
    assert open_descriptors() == descriptors


def test_experts_are_refused_on_a_device(family_pack: FamilyPack) -> None:
    pack = Pack.open(family_pack("fp32", "Mixtral"))
    everything = Residency(frozenset(range(pack.spec.layers)), 0)
    with pytest.raises(UnsupportedModelError, match="experts run on the CPU only, not on cpu; leave --device out"):
        LayerStream(pack, everything, copies=SynchronousCopies())
