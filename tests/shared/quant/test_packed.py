"""Packed weights: the same bits as stored ones, and memory of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.processor import instructions
from shared.quant.candidates import CANDIDATES
from shared.quant.kernels import PACKED
from shared.quant.packed import PACKERS, packing_pays, settle
from shared.quant.schemes import SCHEMES
from tests.shared.quant.matrices import random_activations, random_matrix, stored

SHAPES = [(960, 576), (576, 1536), (3072, 576), (96, 64), (100, 72)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    packing_pays.cache_clear()
    return tmp_path


def packed_by(scheme: str, components: dict[str, Tensor]) -> dict[str, Tensor]:
    """The components packed; the test is skipped where the processor lacks the instructions."""
    if scheme == "int8" and not {"avx512_vnni", "avx_vnni"} & instructions():
        pytest.skip("sums of int8 products saturate on this processor")
    try:
        return PACKERS[scheme](components)
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("scheme", PACKERS)
def test_a_packed_product_has_the_bits_of_the_kernel_for_stored_weights(scheme: str, outputs: int, inputs: int) -> None:
    components = stored(scheme, random_matrix(outputs, inputs))
    packed, product = packed_by(scheme, components), SCHEMES[scheme].product
    for rows in (0, 1, 2, 3, 5, 8, 31, 64, 130):
        x = random_activations(rows, inputs, SCHEMES[scheme].compute_dtype)
        assert torch.equal(product(x, packed), CANDIDATES[scheme][0].product(x, components))


def test_the_largest_sums_of_packed_codes_keep_their_bits() -> None:
    inputs = 16_384
    components = stored("int8", torch.cat((torch.ones(16, inputs), -torch.ones(16, inputs))))
    packed, product = packed_by("int8", components), SCHEMES["int8"].product
    for value in (1.0, -1.0):
        x = torch.full((3, inputs), value, dtype=torch.bfloat16)
        assert torch.equal(product(x, packed), CANDIDATES["int8"][0].product(x, components))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_settled_weights_do_not_need_the_buffer_that_they_came_in(scheme: str) -> None:
    components = stored(scheme, random_matrix(96, 64))
    tensors = {f"mlp.down.{suffix}": tensor for suffix, tensor in components.items()}
    tensors |= {"mlp.down.bias": torch.ones(96), "mlp_norm.weight": torch.ones(64)}
    x = random_activations(3, 64, SCHEMES[scheme].compute_dtype)
    expected = SCHEMES[scheme].product(x, components)
    settled = settle(tensors, ["mlp.down"], SCHEMES[scheme])
    for tensor in tensors.values():
        tensor.zero_()
    assert (settled["mlp_norm.weight"] == 1).all()
    assert (settled["mlp.down.bias"] == 1).all()
    weight = {name.removeprefix("mlp.down."): tensor for name, tensor in settled.items() if name.startswith("mlp.down")}
    assert torch.equal(SCHEMES[scheme].product(x, weight), expected)


@pytest.mark.parametrize("scheme", PACKERS)
def test_the_choice_is_measured_once_and_followed(scheme: str, cache: Path) -> None:
    packed_by(scheme, stored(scheme, random_matrix(96, 64)))
    pays = packing_pays(SCHEMES[scheme], 96, 64)
    (file,) = (cache / "headrace").glob("packing-*")
    assert file.read_text() == str(pays).lower()
    for answer in (True, False):
        file.write_text(str(answer).lower())
        packing_pays.cache_clear()
        tensors = {f"m.{suffix}": tensor for suffix, tensor in stored(scheme, random_matrix(96, 64)).items()}
        assert (f"m.{PACKED}" in settle(tensors, ["m"], SCHEMES[scheme])) is answer
