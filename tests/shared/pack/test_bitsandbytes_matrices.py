"""Matrices that bitsandbytes quantized are read to the last bit, and what does not fit together is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.errors import DataLossError, UnsupportedModelError
from shared.pack.sources.bitsandbytes_matrices import quantized_matrices
from shared.pack.sources.stored_tensors import StoredTensors
from tests.conftest import TinyCheckpoint
from tests.shared.pack.quantized_checkpoints import FORMS, quantized_model

WEIGHT = "model.layers.0.mlp.down_proj.weight"
ALL = slice(None)


@pytest.fixture(scope="module")
def saved(tiny_model: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """The file that transformers saves for a form, and the model that it saved."""

    @cache
    def make(form: str) -> tuple[Path, Any]:
        model = quantized_model(tiny_model(layers=2), form)
        folder = tmp_path_factory.mktemp("quantized")
        model.save_pretrained(folder)
        return folder / "model.safetensors", model

    return make


def stored_in(path: Path) -> StoredTensors:
    with safe_open(path, framework="pt") as file:
        return StoredTensors.of(dict.fromkeys(file.keys(), path))


def dequantized_by_bitsandbytes(module: Any) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant

    weight = module.weight
    if weight.dtype == torch.int8:
        return int8_vectorwise_dequant(weight.data, weight.SCB)
    return dequantize_4bit(weight.data, weight.quant_state)


@pytest.mark.parametrize("form", FORMS)
def test_every_matrix_is_what_bitsandbytes_dequantizes(form: str, saved: Callable[[str], tuple[Path, Any]]) -> None:
    path, model = saved(form)
    matrices = quantized_matrices("m", stored_in(path))
    assert len(matrices) == 2 * 7
    for name, matrix in matrices.items():
        expected = dequantized_by_bitsandbytes(model.get_submodule(name.removesuffix(".weight")))
        assert torch.equal(matrix.dequantized(ALL), expected)
        assert torch.equal(matrix.dequantized(slice(7, 40)), expected[7:40])
        assert matrix.shape == expected.shape
        assert matrix.stored_as == form.partition(",")[0]


def test_blocks_that_run_over_the_ends_of_rows(tmp_path: Path) -> None:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    values = torch.randn(37, 90, generator=torch.Generator().manual_seed(0))
    codes, state = quantize_4bit(values, blocksize=128, quant_type="nf4", compress_statistics=True)
    tensors = {"w.weight": codes} | {f"w.weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    save_file(tensors, tmp_path / "m.safetensors")
    (matrix,) = quantized_matrices("m", stored_in(tmp_path / "m.safetensors")).values()
    assert torch.equal(matrix.dequantized(slice(5, 30)), dequantize_4bit(codes, state)[5:30])
    assert matrix.stored_as == "nf4 in blocks of 128"


@pytest.mark.parametrize("form", ["nf4", "nf4, double", "int8"])
def test_codes_are_taken_as_they_are(form: str, saved: Callable[[str], tuple[Path, Any]]) -> None:
    path, model = saved(form)
    matrix, weight = quantized_matrices("m", stored_in(path))[WEIGHT], model.model.layers[0].mlp.down_proj.weight
    found = matrix.encoded(slice(8, 24))
    if form == "int8":
        assert torch.equal(found["weight"], weight.data[8:24])
        assert torch.equal(found["SCB"], weight.SCB[8:24])
        return
    assert torch.equal(found["weight"], weight.data.view(matrix.shape[0], -1)[8:24])
    expected = matrix.dequantized(slice(8, 24)).unflatten(1, (-1, 64)).abs().amax(-1)
    assert torch.equal(found["weight.absmax"], expected.to(torch.bfloat16))


def changed(path: Path, out: Path, change: Callable[[dict[str, Tensor]], None]) -> StoredTensors:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, out / "changed.safetensors")
    return stored_in(out / "changed.safetensors")


def as_bytes(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def state_with(**fields: Any) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        name = f"{WEIGHT}.quant_state.bitsandbytes__nf4"
        state = json.loads(bytes(tensors[name].tolist())) | fields
        tensors[name] = as_bytes(json.dumps(state))

    return change


def without(suffix: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{WEIGHT}{suffix}"]

    return change


def cut(suffix: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{WEIGHT}{suffix}"] = tensors[f"{WEIGHT}{suffix}"][:-1].clone()

    return change


def add(suffix: str, value: Tensor) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{WEIGHT}{suffix}"] = value

    return change


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (state_with(blocksize=65), UnsupportedModelError, "blocksize 65"),
        (state_with(quant_type="fp4"), UnsupportedModelError, "quant_type 'fp4'"),
        (state_with(dtype="float64"), UnsupportedModelError, "dtype 'float64'"),
        (state_with(shape=[64]), UnsupportedModelError, "shape"),
        (state_with(shape=[2**40, 2**40]), UnsupportedModelError, "shape"),
        (state_with(shape=[64, 129]), UnsupportedModelError, "shape"),
        (state_with(shape=[64, 256]), DataLossError, "4,096 bytes of 4-bit codes, .* asks for 8,192"),
        (state_with(nested_offset=float("nan")), UnsupportedModelError, "nested_offset nan"),
        (state_with(nested_blocksize=1), UnsupportedModelError, "nested_blocksize 1"),
        (without(".absmax"), DataLossError, "no tensor .*absmax"),
        (without(".nested_quant_map"), DataLossError, "no tensor .*nested_quant_map"),
        (cut(".absmax"), DataLossError, r"absmax is U8 \[127\], expected U8 \[128\]"),
        (cut(".nested_absmax"), DataLossError, "nested_absmax"),
        (cut(""), DataLossError, "4-bit codes"),
        (add(".quant_map", torch.zeros(16)), UnsupportedModelError, "code table of its own"),
        (add(".quant_state.bitsandbytes__nf4", as_bytes("[9]")), DataLossError, "no description"),
        (add(".quant_state.bitsandbytes__nf4", as_bytes(" " * 9999)), DataLossError, "no description"),
        (add(".quant_state.bitsandbytes__int4", as_bytes("{}")), UnsupportedModelError, "int4"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_a_kernel_sees_it(
    change: Callable[[dict[str, Tensor]], None],
    error: type[Exception],
    message: str,
    saved: Callable[[str], tuple[Path, Any]],
    tmp_path: Path,
) -> None:
    stored = changed(saved("nf4, double")[0], tmp_path, change)
    with pytest.raises(error, match=message):
        quantized_matrices("m", stored)


def test_int8_in_another_order_or_without_its_codes_is_refused(
    saved: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    def reorder(tensors: dict[str, Tensor]) -> None:
        tensors[WEIGHT.replace(".weight", ".weight_format")] = torch.tensor(1, dtype=torch.uint8)

    with pytest.raises(UnsupportedModelError, match="order of older versions"):
        quantized_matrices("m", changed(saved("int8")[0], tmp_path, reorder))
    with pytest.raises(DataLossError, match="belongs to no int8 matrix"):
        quantized_matrices("m", changed(saved("int8")[0], tmp_path, add("", torch.zeros(4))))
    scb = WEIGHT.replace(".weight", ".SCB")
    stored = changed(saved("int8")[0], tmp_path, lambda tensors: tensors.update({scb: torch.zeros(63)}))
    with pytest.raises(DataLossError, match=r"SCB is F32 \[63\]"):
        quantized_matrices("m", stored)
