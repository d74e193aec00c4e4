"""The oracle for every family: logits and greedy text are those of transformers on the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shared.kv.paged import SHORT_SEGMENT
from shared.model.attention import QUERY_CHUNK
from shared.model.model import Model
from tests.conftest import pack
from tests.shared.model.families import CASES, family_checkpoint
from tests.shared.model.runs import (
    PagedSequences,
    prompt_logits,
    random_tokens,
    reference_logits,
    reference_model,
    resident_model,
)

TOLERANCE = 1e-4
LONGEST = 300
"""Tokens of a test sequence: more than a chunk of queries, and many windows."""
GREEDY_TOKENS = 64


@dataclass(frozen=True)
class Case:
    """A family's model in our hands and in those of transformers."""

    checkpoint: Path
    model: Model
    theirs: nn.Module
    sequences: list[list[int]]
    expected: list[Tensor]
    """[tokens, vocab_size] each."""


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("family")
    checkpoint = family_checkpoint(folder / "checkpoint", request.param)
    model = resident_model(pack(checkpoint, folder / "fp32", "fp32"))
    theirs = reference_model(checkpoint, attn_implementation="eager")
    sequences = [random_tokens(LONGEST, model.spec.vocab_size, seed) for seed in range(3)]
    return Case(checkpoint, model, theirs, sequences, [reference_logits(theirs, tokens) for tokens in sequences])


def test_a_prefill_pass_over_prompts_of_different_lengths(case: Case) -> None:
    lengths = (LONGEST, 1, QUERY_CHUNK + 1)
    prompts = [tokens[:length] for tokens, length in zip(case.sequences, lengths, strict=True)]
    for found, expected in zip(prompt_logits(case.model, prompts), case.expected, strict=True):
        assert_close(found, expected[: len(found)])


def test_a_prompt_and_then_token_by_token(case: Case) -> None:
    paged, tokens = PagedSequences(case.model, 1, LONGEST), case.sequences[0]
    parts = [tokens[:200], *([token] for token in tokens[200:250])]
    assert_close(torch.cat([paged.extend([(0, part)])[0] for part in parts]), case.expected[0][:250])


def test_chains_of_every_kind_of_length_beside_other_sequences(case: Case) -> None:
    paged = PagedSequences(case.model, 3, LONGEST)
    ends = list(accumulate((30, 5, SHORT_SEGMENT, 100, 1, SHORT_SEGMENT + 1, 9, 60), initial=0))
    for start, end in pairwise(ends):
        found = paged.extend([(i, case.sequences[i][start // (i + 1) : end // (i + 1)]) for i in range(3)])
        for i, logits in enumerate(found):
            assert_close(logits, case.expected[i][start // (i + 1) : end // (i + 1)])


def test_greedy_text_is_that_of_transformers(case: Case) -> None:
    prompt = case.sequences[0][:50]
    with torch.inference_mode():
        generate: Any = case.theirs.generate
        expected = generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=GREEDY_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
    paged, new, found = PagedSequences(case.model, 1, LONGEST), prompt, list[int]()
    while len(found) < GREEDY_TOKENS:
        new = [int(paged.extend([(0, new)])[0][-1].argmax())]
        found += new
    assert found == expected
    assert len(set(found)) > 4, "the text does not vary enough to show anything"


def test_in_bfloat16_the_error_is_no_larger_than_that_of_transformers(case: Case, tmp_path: Path) -> None:
    """Where experts are chosen, rounding tips the balance now and then: so all sequences count together."""
    exact = torch.cat(case.expected)
    narrow: Any = reference_model(case.checkpoint, attn_implementation="eager").to(torch.bfloat16)
    model = resident_model(pack(case.checkpoint, tmp_path / "bf16", "bf16"))
    found = torch.cat(prompt_logits(model, case.sequences))
    theirs = (torch.cat([reference_logits(narrow, tokens) for tokens in case.sequences]) - exact).square().mean().sqrt()
    ours = (found - exact).square().mean().sqrt()
    assert ours <= 1.25 * theirs, f"our error is {ours:.3f}, theirs {theirs:.3f}"


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    worst = (found - expected).abs().max().item() if len(found) else 0.0
    assert worst <= TOLERANCE, f"logits differ by {worst:.2e}"
