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
from shared.quant.candidates import CANDIDATES, DRAFT_ROWS, PROMPT_ROWS, ROWS, ranked, trial_weights
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
    for candidate in ranked(scheme, ROWS):
        file = known_file(cache, scheme)
        file.write_text(json.dumps([candidate.name]))
        candidates.forget()
        assert torch.equal(product(x, weight), candidate.product(x, weight))
    assert before.keys() == set(cache.iterdir())


def test_a_weight_that_the_best_product_does_not_take_goes_to_the_next(cache: Path) -> None:
    ranked("int8", ROWS)
    known_file(cache, "int8").write_text(json.dumps(["mixed", "widened"]))
    candidates.forget()
    (weight, _), x = trial_weights("int8", 7, 33), torch.randn(5, 33).to(torch.bfloat16)
    widened = next(candidate for candidate in CANDIDATES["int8"] if candidate.name == "widened")
    assert torch.equal(SCHEMES["int8"].product(x, weight), widened.product(x, weight))


@pytest.mark.parametrize("scheme", CANDIDATES)
def test_each_service_has_a_choice_of_its_own_and_follows_it(scheme: str, cache: Path) -> None:
    (weight, _), x = trial_weights(scheme, 96, 640), torch.randn(5, 640).to(torch.bfloat16)
    drafts, prompts = SCHEMES[scheme].for_rows(DRAFT_ROWS), SCHEMES[scheme].for_rows(PROMPT_ROWS)
    ranked(scheme, DRAFT_ROWS)
    file = known_file(cache, scheme)
    for candidate in CANDIDATES[scheme]:
        if candidate.runs():
            file.write_text(json.dumps([candidate.name]))
            candidates.forget()
            assert torch.equal(drafts.product(x, weight), candidate.product(x, weight))
            assert torch.equal(prompts.product(x, weight), ranked(scheme, PROMPT_ROWS)[0].product(x, weight))
            assert drafts.product_name == candidate.name


def test_threads_that_need_a_choice_at_once_get_the_same(cache: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: ranked("bf16", ROWS), range(4)))
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


def test_the_rule_is_the_mean_over_the_numbers_of_rows(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"bfloat16": [1.0, 1.0, 2.0, 9.0], "widened": [2.0, 2.0, 3.0, 4.0]}

    def times_of(timed: list[object], rows: tuple[int, ...]) -> list[list[float]]:
        columns = [ROWS.index(count) for count in rows]
        return [[times[candidate.name][column] for column in columns] for candidate in CANDIDATES["bf16"]]

    monkeypatch.setattr(candidates, "times_s", times_of)
    assert [candidate.name for candidate in ranked("bf16", DRAFT_ROWS)] == ["bfloat16", "widened"]
    assert [candidate.name for candidate in ranked("bf16", PROMPT_ROWS)] == ["widened", "bfloat16"]
