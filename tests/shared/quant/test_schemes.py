"""What is stored: the very codes of bitsandbytes, in the announced shapes, fused without change."""

from __future__ import annotations

import pytest
import torch

from shared.errors import ConfigurationError, UnsupportedModelError
from shared.quant.kernels import NF4_BLOCK, load_bitsandbytes, nf4_dequantize, nf4_interleave, nf4_separate
from shared.quant.schemes import SCHEMES, scheme_named
from tests.shared.quant.matrices import meaning, random_matrix, stored


@pytest.mark.parametrize("scheme", SCHEMES)
def test_components_are_as_announced(scheme: str) -> None:
    for rows, columns in ((32, 64), (96, 192)):
        components = stored(scheme, random_matrix(rows, columns))
        announced = SCHEMES[scheme].components(rows, columns)
        assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in components.items()} == announced


@pytest.mark.parametrize(("scheme", "share"), [("fp32", 0.0), ("bf16", 2**-7), ("int8", 1 / 127), ("nf4", 0.31)])
def test_a_stored_matrix_is_close_to_the_original(scheme: str, share: float) -> None:
    """Within half of what lies between two values: of int8 and nf4, a share of the row's or the block's maximum."""
    original = random_matrix(64, 256)
    error = (meaning(scheme, stored(scheme, original)) - original.double()).abs()
    blocks = original.view(64, -1, NF4_BLOCK).abs().amax(-1).repeat_interleave(NF4_BLOCK, dim=1)
    largest = {"int8": original.abs().amax(1, keepdim=True), "nf4": blocks}.get(scheme, original.abs())
    assert (error <= largest * share / 2).all()


def test_int8_codes_and_scales_are_those_of_bitsandbytes() -> None:
    load_bitsandbytes()
    matrix = random_matrix(96, 320)
    codes, scales, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(matrix)
    encoded = SCHEMES["int8"].encode(matrix)
    assert torch.equal(encoded["weight"], codes)
    assert torch.equal(encoded["SCB"], scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_stands_for_exactly_what_bitsandbytes_says(dtype: torch.dtype) -> None:
    load_bitsandbytes()
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    matrix = random_matrix(96, 320)
    codes, state = quantize_4bit(matrix, blocksize=NF4_BLOCK, quant_type="nf4")
    state.absmax, state.dtype = state.absmax.to(torch.bfloat16).float(), dtype
    assert torch.equal(nf4_dequantize(stored("nf4", matrix), dtype), dequantize_4bit(codes, state))


def test_nf4_interleaving_loses_nothing() -> None:
    codes = torch.randint(0, 256, (96, 40), dtype=torch.uint8)
    interleaved = nf4_interleave(codes)
    assert interleaved.shape == codes.shape
    assert not torch.equal(interleaved, codes)
    assert torch.equal(nf4_separate(interleaved), codes)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_fused_matrices_stand_for_the_same_rows(scheme: str) -> None:
    parts = [random_matrix(rows, 128, seed) for seed, rows in enumerate((64, 32, 96))]
    fused = meaning(scheme, stored(scheme, *parts))
    assert torch.equal(fused, torch.cat([meaning(scheme, stored(scheme, part)) for part in parts]))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_of_zeros_stay_zeros(scheme: str) -> None:
    matrix = random_matrix(32, 64)
    matrix[3] = matrix[31] = 0
    found = meaning(scheme, stored(scheme, matrix))
    assert (found[[3, 31]] == 0).all()
    assert (found[[2, 30]] != 0).any(dim=1).all()


@pytest.mark.parametrize("value", [3e38, 1e-37, 1e-45])
def test_int8_keeps_the_extremes_of_float32_finite(value: float) -> None:
    matrix = torch.full((1, 64), value)
    encoded = SCHEMES["int8"].encode(matrix)
    assert torch.isfinite(meaning("int8", encoded)).all()
    assert (encoded["weight"] >= 0).all()


def test_nf4_refuses_matrices_that_do_not_divide_into_its_blocks() -> None:
    for matrix, message in ((torch.ones(32, 96), "64 columns, found 96"), (torch.ones(48, 64), "32 rows, found 48")):
        with pytest.raises(UnsupportedModelError, match=f"a multiple of {message}; use int8 or bf16"):
            SCHEMES["nf4"].encode(matrix)


def test_an_unknown_scheme_is_refused_with_those_that_exist() -> None:
    assert [scheme_named(name).name for name in ("fp32", "bf16", "int8", "nf4")] == list(SCHEMES)
    with pytest.raises(ConfigurationError, match="unknown scheme 'int4'; choose one of fp32, bf16, int8, nf4"):
        scheme_named("int4")
