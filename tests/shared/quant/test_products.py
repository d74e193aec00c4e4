"""Products with stored matrices, by every candidate: right within rounding, and a row's result is its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from shared.quant.candidates import CANDIDATES
from shared.quant.kernels import mixed_int8
from shared.quant.schemes import SCHEMES
from tests.shared.quant.matrices import meaning, random_activations, random_matrix, stored

SHAPES = [(960, 576), (576, 1536), (3072, 576), (96, 64)]
"""(outputs, inputs): those of SmolLM2-135M's fused matrices, and small ones."""
MOST_ROWS = 40

Product = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
RUNNING = [
    pytest.param(scheme, candidate.product, id=f"{scheme}-{candidate.name}")
    for scheme, candidates in CANDIDATES.items()
    for candidate in candidates
    if candidate.runs()
]
"""All candidates of this processor, whichever is chosen, and float32, which has one product."""
RUNNING.append(pytest.param("fp32", SCHEMES["fp32"].product, id="fp32"))

# Half a step between neighbouring results, relative.
ROUNDING = {torch.float32: 2**-18, torch.bfloat16: 2**-8}


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 33])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize(("scheme", "product"), RUNNING)
def test_a_product_is_that_of_the_values_stored(
    scheme: str, product: Product, outputs: int, inputs: int, rows: int
) -> None:
    components = stored(scheme, random_matrix(outputs, inputs))
    x = random_activations(rows, inputs, SCHEMES[scheme].compute_dtype)
    assert_product(scheme, x, product(x, components), meaning(scheme, components), roundings(product))


@pytest.mark.parametrize(("scheme", "product"), RUNNING)
def test_large_and_vanishing_activations_keep_their_precision(scheme: str, product: Product) -> None:
    components = stored(scheme, random_matrix(96, 1536))
    x = random_activations(4, 1536, SCHEMES[scheme].compute_dtype)
    x *= torch.tensor([[1e4], [1e30], [1e-20], [1e-4]])
    x = x.to(SCHEMES[scheme].compute_dtype)
    found = product(x, components)
    assert torch.isfinite(found).all()
    assert_product(scheme, x, found, meaning(scheme, components), roundings(product))


@pytest.mark.parametrize(("scheme", "product"), RUNNING)
def test_the_largest_integer_sums_do_not_overflow(scheme: str, product: Product) -> None:
    inputs = 16_384
    components = stored(scheme, torch.ones(32, inputs))
    found = product(torch.full((3, inputs), 1e4, dtype=SCHEMES[scheme].compute_dtype), components)
    expected = torch.tensor(1e4).to(SCHEMES[scheme].compute_dtype).double() * inputs
    assert ((found.double() - expected).abs() <= expected * 2**-7).all()


@pytest.mark.parametrize(("scheme", "product"), RUNNING)
def test_rows_of_zeros_give_zeros_and_disturb_nobody(scheme: str, product: Product) -> None:
    components = stored(scheme, random_matrix(96, 64))
    x = random_activations(5, 64, SCHEMES[scheme].compute_dtype)
    zeroed = x.clone()
    zeroed[2] = 0
    found = product(zeroed, components)
    assert (found[2] == 0).all()
    others = [0, 1, 3, 4]
    assert torch.equal(found[others], product(x, components)[others])


@pytest.mark.parametrize(("scheme", "product"), RUNNING)
def test_no_rows_give_no_rows(scheme: str, product: Product) -> None:
    found = product(torch.empty(0, 64, dtype=SCHEMES[scheme].compute_dtype), stored(scheme, random_matrix(96, 64)))
    assert found.shape == (0, 96)


@pytest.mark.parametrize(("scheme", "product"), RUNNING)
def test_fusing_matrices_changes_no_result(scheme: str, product: Product) -> None:
    parts = [random_matrix(rows, 576, seed) for seed, rows in enumerate((576, 192, 192))]
    for rows in (1, 8, 40):
        x = random_activations(rows, 576, SCHEMES[scheme].compute_dtype)
        fused = product(x, stored(scheme, *parts))
        separate = torch.cat([product(x, stored(scheme, part)) for part in parts], dim=1)
        assert_same(scheme, fused, separate)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize(("scheme", "product"), RUNNING)
def test_a_row_has_the_same_result_whatever_rows_are_beside_it(
    scheme: str, product: Product, outputs: int, inputs: int
) -> None:
    components = stored(scheme, random_matrix(outputs, inputs))
    x = random_activations(MOST_ROWS, inputs, SCHEMES[scheme].compute_dtype)
    alone = torch.cat([product(row[None], components) for row in x])
    for rows in range(1, MOST_ROWS + 1):
        assert_same(scheme, product(x[:rows], components), alone[:rows])
        assert_same(scheme, product(x[-rows:].flip(0), components), alone[-rows:].flip(0))


def roundings(product: Product) -> int:
    """How often a result is rounded to its dtype."""
    return 2 if product is mixed_int8 else 1


def assert_product(scheme: str, x: Tensor, found: Tensor, matrix: Tensor, roundings: int) -> None:
    """Compares with the product in float64, allowing for roundings of the result, and one of what is summed.

    int8 rounds activations too, to 127 × 254 steps of their row's maximum; nf4 rounds weights to bfloat16, the kernel
    before scaling them and dequantization afterwards.
    """
    exact, sizes = x.double() @ matrix.T, x.double().abs() @ matrix.abs().T
    allowed = exact.abs() * roundings * ROUNDING[x.dtype] + sizes * 2**-18
    if scheme == "int8":
        half_step = x.double().abs().amax(1, keepdim=True) / (127 * 254) / 2
        allowed += half_step * matrix.abs().sum(1)
    if scheme == "nf4":
        allowed += sizes * ROUNDING[torch.bfloat16]
    worst = ((found.double() - exact).abs() / allowed).max().item()
    assert worst <= 1, f"{worst:.2f} times the error that rounding explains"


def assert_same(scheme: str, found: Tensor, expected: Tensor) -> None:
    """To the last bit; in float32, whose sums may be ordered otherwise, to five digits of the largest."""
    if scheme == "fp32":
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    else:
        assert torch.equal(found, expected)
