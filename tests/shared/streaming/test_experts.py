"""Experts: the right weights in the order asked for, each read once, the hot ones kept, and honest faults."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from shared.errors import DataLossError, HeadraceError, UnavailableError
from shared.model.mlp import Mlp
from shared.model.model import Model
from shared.pack.format import FileLayout
from shared.pack.reader import Pack
from shared.streaming.experts import ExpertStream
from shared.streaming.files import DataFile
from shared.streaming.plan import Residency, kept_experts
from shared.streaming.stream import LayerStream
from tests.conftest import FamilyPack
from tests.shared.model.runs import PagedSequences, prompt_logits, random_tokens

CASE = "Qwen3-MoE"
LAYERS, PER_LAYER = 4, 12
ALL = LAYERS * PER_LAYER
PATIENCE_S = 60

Stored = list[dict[str, Tensor]]


@pytest.fixture(scope="module")
def pack(family_pack: FamilyPack) -> Pack:
    return Pack.open(family_pack("int8", CASE))


@pytest.fixture
def damaged(pack: Pack, tmp_path: Path) -> Pack:
    """A copy of the pack that a test may damage."""
    return Pack.open(Path(shutil.copytree(pack.path, tmp_path / "pack")))


@pytest.fixture(scope="module")
def stored(pack: Pack) -> Stored:
    """The tensors of every layer's experts, as the safetensors library reads them."""
    return [load_file(pack.experts_path(layer)) for layer in range(LAYERS)]


@settings(max_examples=40, deadline=None)
@given(
    slots=st.one_of(st.integers(2, 8), st.integers(9, ALL + 1), st.none()),
    calls=st.lists(
        st.tuples(
            st.integers(0, LAYERS - 1),
            st.sets(st.integers(0, PER_LAYER - 1), min_size=1),
            st.booleans(),
            st.integers(0, PER_LAYER),
        ),
        min_size=1,
        max_size=8,
    ),
)
def test_every_expert_that_is_asked_for_comes_once_with_its_weights_also_after_calls_left_early(
    pack: Pack, stored: Stored, slots: int | None, calls: list[tuple[int, set[int], bool, int]]
) -> None:
    left = []
    with closing(ExpertStream(pack, slots)) as stream:
        for layer, asked, in_order, stay in calls:
            came = []
            experts = stream.bring(layer, sorted(asked), in_order=in_order)
            left.append(experts)  # as an error's traceback does
            for expert, mlp in experts:
                assert_weights(mlp, stored[layer], expert)
                came.append(expert)
                if len(came) == stay:
                    break
            else:
                assert came == sorted(asked) if in_order else sorted(came) == sorted(asked)


def test_only_what_is_not_in_memory_is_read_and_counted(pack: Pack) -> None:
    with closing(ExpertStream(pack, 10)) as stream:
        kept = kept_experts(10, ALL)
        for _ in range(3):
            use(stream, 1, range(PER_LAYER))
        assert stream.uses == 3 * PER_LAYER
        assert stream.reads == PER_LAYER + 2 * (PER_LAYER - kept)
        assert stream.bytes_read == stream.reads * pack.expert_bytes


def test_a_cycle_through_more_experts_than_fit_still_finds_those_that_fit(pack: Pack) -> None:
    """The least recently used one would always be the next."""
    with closing(ExpertStream(pack, ALL // 2)) as stream:
        for _ in range(4):
            walk(stream)
        assert stream.uses - stream.reads == 3 * kept_experts(ALL // 2, ALL)


def test_experts_that_more_passes_use_take_the_place_of_others(pack: Pack) -> None:
    hot = {0: [1, 2], 3: [7, 11]}
    with closing(ExpertStream(pack, 6)) as stream:
        assert kept_experts(6, ALL) == 4
        walk(stream)
        for number in range(4):
            for layer in range(LAYERS):
                use(stream, layer, sorted({*hot.get(layer, ()), number}))
        before = stream.reads
        for layer, experts in hot.items():
            use(stream, layer, experts)
        assert stream.reads == before


def test_where_every_expert_has_a_slot_nothing_is_read_after_the_start(pack: Pack) -> None:
    for slots in (ALL, ALL + 5, None):
        with closing(ExpertStream(pack, slots)) as stream:
            walk(stream)
            assert (stream.uses, stream.reads, stream.bytes_read) == (ALL, 0, 0)


def test_reads_begin_when_the_experts_are_known_and_those_in_memory_come_first(pack: Pack) -> None:
    gate = Gate()
    with closing(ExpertStream(pack, 6, readers=1, open_file=gate.open)) as stream:
        use(stream, 2, [4, 9])
        gate.shut()
        came = stream.bring(2, [3, 4, 6, 9], in_order=False)
        assert [next(came)[0] for _ in range(2)] == [4, 9]
        assert gate.asked.get(timeout=PATIENCE_S) == 3
        gate.admit()
        assert [expert for expert, _ in came] == [3, 6]


@pytest.mark.parametrize("scheme", ["fp32", "bf16", "int8", "nf4"])
def test_logits_are_the_same_to_the_last_bit_with_all_experts_in_memory_and_with_few(
    family_pack: FamilyPack, scheme: str
) -> None:
    pack = Pack.open(family_pack(scheme, CASE))
    prompts = [random_tokens(length, pack.spec.vocab_size, length) for length in (5, 290)]
    results: list[list[Tensor]] = []
    for residency in (
        Residency(frozenset(range(LAYERS)), 0),
        Residency(frozenset(), 2, expert_slots=2),
        Residency(frozenset({1}), 2, expert_slots=20),
    ):
        with closing(Model(pack, residency)) as model:
            paged = PagedSequences(model, 2, 300)
            steps = [[(0, prompts[0]), (1, prompts[1])], [(0, [7]), (1, [8, 9])], [(1, [3])], [(0, [5]), (1, [6])]]
            found = [torch.cat(prompt_logits(model, prompts))]
            results.append(found + [torch.cat(paged.extend(step)) for step in steps])
    for found in results[1:]:
        assert all(torch.equal(ours, expected) for ours, expected in zip(found, results[0], strict=True))


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def flip_the_last_bit(path: Path) -> None:
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(bytes([content[-1] ^ 1]))


def lose(path: Path) -> None:
    """What a device leaves that is gone: no file, and descriptors that fail."""
    with path.open("r+b") as file:
        path.unlink()
        file.truncate(0)


LAST = "layer 2, expert 11"
FAULTS = [
    pytest.param(cut_off, DataLossError, f"{LAST} is truncated at byte", id="truncated"),
    pytest.param(flip_the_last_bit, DataLossError, f"{LAST} does not match its digest", id="changed"),
    pytest.param(lose, UnavailableError, f"{LAST} cannot be opened: No such file", id="gone"),
]


@pytest.mark.parametrize("slots", [2, 20])
@pytest.mark.parametrize(("damage", "error", "message"), FAULTS)
def test_an_expert_that_is_damaged_fails_by_name_and_is_read_again_once_it_is_whole(
    damaged: Pack, stored: Stored, slots: int, damage: Callable[[Path], None], error: type[HeadraceError], message: str
) -> None:
    path = damaged.experts_path(2)
    whole = Path(shutil.copy2(path, path.with_name("whole")))
    with closing(ExpertStream(damaged, slots)) as stream:
        use(stream, 2, [0])
        damage(path)
        for _ in range(2):
            with pytest.raises(error, match=message):
                use(stream, 2, [11])
            with pytest.raises(error, match=message):
                stream.bring_lost()
        use(stream, 1, range(PER_LAYER))
        whole.rename(path)
        stream.bring_lost()
        for expert, mlp in stream.bring(2, range(PER_LAYER), in_order=True):
            assert_weights(mlp, stored[2], expert)


def test_an_expert_that_could_not_be_read_but_can_be_by_now_is_no_fault(damaged: Pack, stored: Stored) -> None:
    path = damaged.experts_path(0)
    whole = Path(shutil.copy2(path, path.with_name("whole")))
    with closing(ExpertStream(damaged, 4)) as stream:
        lose(path)
        whole.rename(path)
        for expert, mlp in stream.bring(0, range(PER_LAYER), in_order=False):
            assert_weights(mlp, stored[0], expert)


def test_bytes_that_a_disk_silently_brings_later_are_found_out_where_digests_are_always_compared(pack: Pack) -> None:
    class Flipping(DataFile):
        flips = False

        def read(self, into: memoryview, offset: int, label: str | None = None) -> int:
            count = super().read(into, offset, label)
            into[-1] ^= Flipping.flips
            return count

    with closing(ExpertStream(pack, 2, verify_always=True, open_file=Flipping)) as stream:
        use(stream, 3, [5])
        Flipping.flips = True
        with pytest.raises(DataLossError, match="layer 3, expert 5 does not match its digest; pack the model again"):
            use(stream, 3, [5])


def test_a_stream_that_cannot_start_leaves_nothing_open(damaged: Pack) -> None:
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    flip_the_last_bit(damaged.experts_path(2))
    with pytest.raises(DataLossError, match=f"{LAST} does not match its digest"):
        ExpertStream(damaged, None)
    damaged.experts_path(3).unlink()
    with pytest.raises(UnavailableError, match="layer 3, experts cannot be opened"):
        ExpertStream(damaged, 2)
    with pytest.raises(UnavailableError, match="layer 3, experts cannot be opened"):
        LayerStream(damaged, Residency(frozenset(), 2, expert_slots=2))
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert set(threading.enumerate()) == threads


def test_closing_stops_the_threads_and_closes_the_files(pack: Pack) -> None:
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    stream = ExpertStream(pack, 8)
    next(stream.bring(1, range(PER_LAYER), in_order=False))
    assert set(threading.enumerate()) > threads
    stream.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert set(threading.enumerate()) == threads


class Gate:
    """Holds reads back while it is shut, and tells which experts are asked for."""

    def __init__(self) -> None:
        self.asked: SimpleQueue[int] = SimpleQueue()
        self._open = threading.Event()
        self._open.set()

    def shut(self) -> None:
        while not self.asked.empty():
            self.asked.get()
        self._open.clear()

    def admit(self) -> None:
        self._open.set()

    def open(self, path: Path, layout: FileLayout, sha256: str, label: str) -> DataFile:
        gate = self

        class Guarded(DataFile):
            def read(self, into: memoryview, offset: int, label: str | None = None) -> int:
                gate.asked.put(int(str(label).rpartition(" ")[2]))
                assert gate._open.wait(PATIENCE_S)
                return super().read(into, offset, label)

        return Guarded(path, layout, sha256, label)


def use(stream: ExpertStream, layer: int, experts: Sequence[int]) -> None:
    for _ in stream.bring(layer, list(experts), in_order=False):
        pass


def walk(stream: ExpertStream) -> None:
    """A pass that needs every expert."""
    for layer in range(LAYERS):
        use(stream, layer, range(PER_LAYER))


def assert_weights(mlp: Mlp, layer: dict[str, Tensor], expert: int) -> None:
    for name, matrix in (("gate_up", mlp.gate_up), ("down", mlp.down)):
        assert matrix.components.keys() == {"weight", "SCB"}
        for suffix, tensor in matrix.components.items():
            assert torch.equal(tensor, layer[f"experts.{expert}.{name}.{suffix}"])
