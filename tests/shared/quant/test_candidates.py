"""The choice between products: only right ones, by the stated rule, once per machine, and followed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.machine import cached
from shared.quant import candidates
from shared.quant.candidates import CANDIDATES, FEW_ROWS, best_first, ranked, trial_weights
from shared.quant.products import int8_for_few_rows
from shared.quant.schemes import SCHEMES
from shared.quant.trial import SHAPES, Components, is_right
from shared.quant.widened import widened_dense


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    candidates.forget()
    yield tmp_path / "headrace"
    candidates.forget()


def known_file(cache: Path, scheme: str) -> Path:
    """The only file of choices that names this scheme's candidates."""
    names = {candidate.name for candidate in CANDIDATES[scheme]}
    (file,) = (file for file in cache.glob("products-*") if names >= set(json.loads(file.read_text())))
    return file


@pytest.mark.parametrize("scheme", CANDIDATES)
def test_the_choice_is_measured_once_and_followed(scheme: str, cache: Path) -> None:
    (weight, _), x = trial_weights(scheme, 96, 640), torch.randn(5, 640).to(torch.bfloat16)
    product = SCHEMES[scheme].product
    product(x, weight)
    before = {file: file.stat().st_mtime_ns for file in cache.iterdir()}
    for candidate in ranked(scheme):
        file = known_file(cache, scheme)
        file.write_text(json.dumps([candidate.name]))
        candidates.forget()
        assert torch.equal(product(x, weight), candidate.product(x, weight))
    assert before.keys() == set(cache.iterdir())


def test_a_weight_that_the_best_product_does_not_take_goes_to_the_next(cache: Path) -> None:
    ranked("int8")
    known_file(cache, "int8").write_text(json.dumps(["mixed", "widened"]))
    candidates.forget()
    (weight, _), x = trial_weights("int8", 7, 33), torch.randn(5, 33).to(torch.bfloat16)
    widened = next(candidate for candidate in CANDIDATES["int8"] if candidate.name == "widened")
    assert torch.equal(SCHEMES["int8"].product(x, weight), widened.product(x, weight))


def test_drafts_have_a_choice_of_their_own_and_follow_it(cache: Path) -> None:
    (weight, _), x = trial_weights("int8", 96, 640), torch.randn(5, 640).to(torch.bfloat16)
    ranked("int8", FEW_ROWS)
    file = known_file(cache, "int8")
    ranked("int8")
    for candidate in CANDIDATES["int8"]:
        file.write_text(json.dumps([candidate.name]))
        candidates.forget()
        assert torch.equal(int8_for_few_rows(x, weight), candidate.product(x, weight))
        assert torch.equal(SCHEMES["int8"].product(x, weight), ranked("int8")[0].product(x, weight))


def test_threads_that_need_a_choice_at_once_get_the_same(cache: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: ranked("bf16"), range(4)))
    assert all(choice is found[0] for choice in found)


def test_what_another_process_has_written_meanwhile_counts(cache: Path) -> None:
    def measure_as_another_process_does() -> str:
        cached("products", {}, lambda: "theirs")
        return "ours"

    assert cached("products", {}, measure_as_another_process_does) == "theirs"
    assert cached("products", {}, lambda: "ours", again=True) == "ours"
    assert cached("products", {}, lambda: "unused") == "ours"


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_wrong_or_depends_on_the_number_of_rows_is_refused(shape: tuple[int, int]) -> None:
    def one_bit_more_for_many_rows(x: Tensor, weight: Components) -> Tensor:
        found = widened_dense(x, weight)
        return found * (1 + 2**-7) if len(x) > 4 else found

    def saturating(x: Tensor, weight: Components) -> Tensor:
        found = widened_dense(x, weight)
        return found.clamp(-32, 32)

    weights = trial_weights("bf16", *shape)
    assert all(is_right(widened_dense, widened_dense, weight) for weight in weights)
    for wrong in (one_bit_more_for_many_rows, saturating):
        assert not all(is_right(wrong, widened_dense, weight) for weight in weights)


def test_the_rule_is_the_mean_over_rows_of_what_does_not_lose_to_bf16() -> None:
    times = {"slow": [4.0, 4.0, 4.0, 4.0], "for few": [1.0, 1.0, 2.0, 9.0], "for all": [2.0, 2.0, 3.0, 4.0]}
    assert best_first(times, bf16_s=4.0) == ["for all", "slow", "for few"]
    assert best_first(times, bf16_s=1.0) == ["for few", "for all", "slow"], "all lose"
    assert best_first(times, bf16_s=float("inf")) == ["for few", "for all", "slow"]
