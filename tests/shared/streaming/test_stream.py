"""The layer stream: the right weights in order, whatever is resident, and honest faults."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from shared.errors import DataLossError, UnavailableError
from shared.model.layers import LayerWeights
from shared.model.model import Model
from shared.pack.reader import Pack
from shared.quant.kernels import PACKED, packed_integer_product
from shared.streaming.plan import Residency
from shared.streaming.stream import LayerStream
from tests.conftest import TinyPack
from tests.shared.model.runs import prompt_logits, random_tokens

LAYERS = 6
NOTHING_RESIDENT = Residency(frozenset(), 2)


@pytest.fixture(scope="module")
def pack(tiny_pack: TinyPack) -> Pack:
    return Pack.open(tiny_pack("int8", layers=LAYERS, attention_bias=True))


@pytest.fixture
def damaged(pack: Pack, tmp_path: Path) -> Pack:
    """A copy of the pack that a test may damage."""
    return Pack.open(Path(shutil.copytree(pack.path, tmp_path / "pack")))


@pytest.fixture(scope="module")
def stored(pack: Pack) -> list[dict[str, Tensor]]:
    """The tensors of every layer, as the safetensors library reads them."""
    layers = [load_file(pack.layer_path(layer)) for layer in range(LAYERS)]
    return [{name: value for name, value in layer.items() if not name.startswith("pad.")} for layer in layers]


@st.composite
def residencies(draw: st.DrawFn) -> Residency:
    slots = draw(st.integers(2, 4))
    resident = draw(st.sets(st.sampled_from(range(LAYERS)), max_size=LAYERS - slots))
    return draw(st.sampled_from([Residency(frozenset(resident), slots), Residency(frozenset(range(LAYERS)), 0)]))


@settings(max_examples=40, deadline=None)
@given(residencies(), st.lists(st.integers(1, LAYERS), min_size=1, max_size=5), st.integers(1, 3))
def test_walks_bring_the_right_weights_in_order_also_after_early_ends(
    pack: Pack, stored: list[dict[str, Tensor]], residency: Residency, ends: list[int], readers: int
) -> None:
    stream = LayerStream(pack, residency, readers)
    try:
        for end in ends:
            for expected, (layer, weights) in enumerate(stream.walk()):
                assert layer == expected
                assert_equal(tensors_of(weights), stored[layer])
                if layer + 1 == end:
                    break
    finally:
        stream.close()


def test_only_streamed_layers_that_were_used_count_as_streamed(pack: Pack) -> None:
    stream = LayerStream(pack, Residency(frozenset({0, 3}), 2))
    try:
        for _ in stream.walk():
            pass
        assert stream.streamed_bytes == 4 * pack.layer_layout.data_bytes
    finally:
        stream.close()


@pytest.mark.parametrize("scheme", ["fp32", "bf16", "int8", "nf4"])
def test_logits_are_the_same_to_the_last_bit_resident_and_streamed(tiny_pack: TinyPack, scheme: str) -> None:
    pack = Pack.open(tiny_pack(scheme, layers=LAYERS))
    prompts = [random_tokens(length, pack.spec.vocab_size, length) for length in (5, 40)]
    results = []
    for residency in (Residency(frozenset(range(LAYERS)), 0), NOTHING_RESIDENT, Residency(frozenset({1, 4}), 3)):
        model = Model(pack, residency)
        results += [torch.cat(prompt_logits(model, prompts)) for _ in range(2)]
        model.close()
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_file_that_is_cut_off_fails_by_name_and_is_read_again_once_it_is_whole(
    damaged: Pack, stored: list[dict[str, Tensor]]
) -> None:
    for layer in (0, 4):
        path = damaged.layer_path(layer)
        whole = path.read_bytes()
        stream = LayerStream(damaged, NOTHING_RESIDENT)
        try:
            with path.open("r+b") as file:
                file.truncate(damaged.layer_layout.data_start + 4096)
                with pytest.raises(
                    DataLossError, match=f"layer {layer} is truncated at byte 8192; pack the model again"
                ):
                    walk_twice(stream)
                file.write(whole)
            assert_walk(stream, stored)
        finally:
            stream.close()


def test_changed_bytes_fail_by_name_and_are_read_again_once_they_are_right(
    damaged: Pack, stored: list[dict[str, Tensor]]
) -> None:
    for layer in (0, 5):
        with changed_byte(damaged.layer_path(layer)):
            stream = LayerStream(damaged, NOTHING_RESIDENT)
            for _ in range(2):
                with pytest.raises(
                    DataLossError, match=f"layer {layer} does not match its digest; pack the model again"
                ):
                    walk_twice(stream)
        assert_walk(stream, stored)
        stream.close()


def test_a_damaged_resident_layer_is_refused_at_the_start(damaged: Pack) -> None:
    with changed_byte(damaged.layer_path(2)), pytest.raises(DataLossError, match="layer 2 does not match its digest"):
        LayerStream(damaged, Residency(frozenset({2}), 2))


def test_a_file_that_cannot_be_opened_is_refused_at_the_start(damaged: Pack) -> None:
    damaged.layer_path(3).unlink()
    with pytest.raises(UnavailableError, match=r"layer 3 cannot be opened: No such file.*; restore 00003\.safetensors"):
        LayerStream(damaged, NOTHING_RESIDENT)


def test_a_file_that_the_disk_cannot_read_fails_by_name(damaged: Pack) -> None:
    damaged.layer_path(3).unlink()
    damaged.layer_path(3).mkdir()  # opens, but reading reports an error
    stream = LayerStream(damaged, NOTHING_RESIDENT)
    try:
        for _ in range(2):
            with pytest.raises(UnavailableError, match="layer 3 cannot be read: Is a directory; check the disk"):
                walk_twice(stream)
    finally:
        stream.close()


def test_a_file_that_is_replaced_by_another_is_read_again_once_the_old_one_fails(
    damaged: Pack, stored: list[dict[str, Tensor]]
) -> None:
    path = damaged.layer_path(3)
    stream = LayerStream(damaged, NOTHING_RESIDENT)
    try:
        restored = Path(shutil.copy(path, path.with_name("restored")))
        os.truncate(path, 8192)
        path.unlink()
        for _ in range(2):
            with pytest.raises(UnavailableError, match="layer 3 cannot be opened: No such file"):
                walk_twice(stream)
        restored.rename(path)
        assert_walk(stream, stored)
        walk_twice(stream)
    finally:
        stream.close()


def test_bytes_that_change_after_the_first_pass_are_never_used(damaged: Pack) -> None:
    stream = LayerStream(damaged, NOTHING_RESIDENT)
    try:
        walk_twice(stream)
        with changed_byte(damaged.layer_path(4)), pytest.raises(DataLossError, match="layer 4 does not match"):
            walk_twice(stream)
    finally:
        stream.close()


def test_a_walk_that_is_closed_late_does_not_disturb_the_one_that_runs(
    pack: Pack, stored: list[dict[str, Tensor]]
) -> None:
    stream = LayerStream(pack, NOTHING_RESIDENT)
    try:
        left = stream.walk()
        next(left)
        running = stream.walk()
        _, weights = next(running)
        closing = threading.Thread(target=left.close)
        closing.start()
        closing.join()
        assert_equal(tensors_of(weights), stored[0])
        for layer, weights in running:
            assert_equal(tensors_of(weights), stored[layer])
    finally:
        stream.close()


def test_a_stream_that_cannot_start_leaves_nothing_open(damaged: Pack) -> None:
    damaged.layer_path(LAYERS - 1).unlink()
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    for resident in (frozenset[int](), frozenset({LAYERS - 1})):
        with pytest.raises(UnavailableError, match=f"layer {LAYERS - 1} cannot be opened"):
            LayerStream(damaged, Residency(resident, 2))
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert set(threading.enumerate()) == threads


def test_no_thread_is_left_after_closing(pack: Pack) -> None:
    before = set(threading.enumerate())
    stream = LayerStream(pack, NOTHING_RESIDENT, readers=3)
    walk_twice(stream)
    stream.close()
    assert set(threading.enumerate()) == before


@contextmanager
def changed_byte(path: Path) -> Iterator[None]:
    """While the context lasts, a byte in the middle of the file is another one."""
    whole = path.read_bytes()
    middle = len(whole) // 2
    with path.open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), bytes([whole[middle] ^ 1]), middle)
        try:
            yield
        finally:
            os.pwrite(file.fileno(), whole[middle : middle + 1], middle)


def walk_twice(stream: LayerStream) -> None:
    for _ in range(2):
        for _ in stream.walk():
            pass


def assert_walk(stream: LayerStream, stored: list[dict[str, Tensor]]) -> None:
    layers = []
    for layer, weights in stream.walk():
        assert_equal(tensors_of(weights), stored[layer])
        layers.append(layer)
    assert layers == list(range(LAYERS))


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Compares a layer's tensors; what a resident layer has packed is compared by what it does to the identity."""
    assert {name.replace(f".{PACKED}", ".weight") for name in found} == expected.keys()
    for name, tensor in found.items():
        if name.endswith(f".{PACKED}"):
            weight = expected[name.replace(f".{PACKED}", ".weight")]
            columns = packed_integer_product(torch.eye(weight.shape[1], dtype=torch.int8), tensor)
            assert torch.equal(columns.t(), weight.float())
        else:
            assert torch.equal(tensor, expected[name])


def tensors_of(weights: LayerWeights) -> dict[str, Tensor]:
    """A layer's tensors by their stored names."""
    matrices = {
        "attention.qkv": weights.qkv,
        "attention.output": weights.attention_output,
    }
    if weights.mlp is not None:
        matrices |= {"mlp.gate_up": weights.mlp.gate_up, "mlp.down": weights.mlp.down}
    tensors = {"attention_norm.weight": weights.attention_norm, "mlp_norm.weight": weights.mlp_norm}
    for name, matrix in matrices.items():
        tensors |= {f"{name}.{component}": tensor for component, tensor in matrix.components.items()}
        if matrix.bias is not None:
            tensors[f"{name}.bias"] = matrix.bias
    return tensors
