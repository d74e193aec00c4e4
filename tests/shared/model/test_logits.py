"""The oracle: our logits are those of transformers on the same weights, however the tokens are cut into passes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from shared.kv.paged import SHORT_SEGMENT
from shared.kv.prompt import PromptKeyValues
from shared.model.attention import QUERY_CHUNK
from shared.model.batch import TokenBatch
from shared.model.mlp import ROW_CHUNK
from shared.model.model import Model
from shared.pack.reader import Pack
from tests.conftest import Smollm2Pack, TinyCheckpoint, TinyPack
from tests.models import smollm2_gguf
from tests.shared.model.runs import (
    PagedSequences,
    prompt_logits,
    random_tokens,
    reference_logits,
    reference_model,
    resident_model,
)

TOLERANCE = 1e-4
LONGEST = 500
"""Tokens of a test sequence: two chunks of queries, the second one partial."""

TINY: dict[str, dict[str, Any]] = {
    "grouped heads, tied": {},
    "as many key/value heads as heads, untied": {"kv_heads": 4, "tied": False},
    "one key/value head": {"kv_heads": 1},
    "attention biases": {"attention_bias": True},
    "MLP biases": {"mlp_bias": True, "tied": False},
    "all biases": {"attention_bias": True, "mlp_bias": True},
    "wide heads": {"head_dim": 32},
    "narrow heads": {"head_dim": 8, "heads": 8, "kv_heads": 2},
    "slow rotation": {"rope_theta": 1_000_000.0},
}


@dataclass(frozen=True)
class Case:
    """A model of ours, some sequences, and what transformers makes of them."""

    model: Model
    sequences: list[list[int]]
    expected: list[Tensor]
    """[tokens, vocab_size] each."""


@pytest.fixture(scope="module", params=TINY.values(), ids=TINY.keys())
def case(request: pytest.FixtureRequest, tiny_pack: TinyPack, tiny_model: TinyCheckpoint) -> Case:
    model, theirs = resident_model(tiny_pack("fp32", **request.param)), reference_model(tiny_model(**request.param))
    sequences = [random_tokens(LONGEST, model.spec.vocab_size, seed) for seed in range(8)]
    return Case(model, sequences, [reference_logits(theirs, sequence) for sequence in sequences])


@pytest.fixture(scope="module")
def smollm2(smollm2_pack: Smollm2Pack) -> tuple[Model, nn.Module, list[int]]:
    """Our SmolLM2-135M-Instruct, transformers' (which reads the GGUF file itself), and some English for them."""
    pack, gguf = Pack.open(smollm2_pack("fp32")), smollm2_gguf()
    tokens = Tokenizer.from_str(pack.tokenizer_json()).encode(ENGLISH).ids
    assert len(tokens) > 100
    return resident_model(pack.path), reference_model(gguf.parent, gguf_file=gguf.name), tokens


def test_a_prefill_pass_over_one_prompt(case: Case) -> None:
    (found,) = prompt_logits(case.model, case.sequences[:1])
    assert_close(found, case.expected[0])


def test_a_prefill_pass_over_prompts_of_different_lengths(case: Case) -> None:
    lengths = (1, QUERY_CHUNK + 1, 2, SHORT_SEGMENT + 1, LONGEST, 17, QUERY_CHUNK)
    assert sum(lengths) > ROW_CHUNK
    prompts = [case.sequences[i][:length] for i, length in enumerate(lengths)]
    for i, found in enumerate(prompt_logits(case.model, prompts)):
        assert_close(found, case.expected[i][: lengths[i]])


def test_a_paged_prompt_and_then_token_by_token(case: Case) -> None:
    tokens = case.sequences[0][: QUERY_CHUNK + 40]
    parts = [tokens[: QUERY_CHUNK + 20], *([token] for token in tokens[QUERY_CHUNK + 20 :])]
    assert_close(paged_logits(case.model, parts), case.expected[0][: len(tokens)])


def test_a_paged_sequence_in_chains_of_every_kind_of_length(case: Case) -> None:
    ends = list(accumulate((1, 5, SHORT_SEGMENT, SHORT_SEGMENT + 1, 2, QUERY_CHUNK + 3, 16, 3), initial=0))
    parts = [case.sequences[0][start:end] for start, end in pairwise(ends)]
    assert_close(paged_logits(case.model, parts), case.expected[0][: ends[-1]])


def test_a_paged_batch_of_sequences_of_different_lengths(case: Case) -> None:
    lengths = (3, QUERY_CHUNK + 9, 70, 1, SHORT_SEGMENT, 130, 16, 290)
    chains = (4, 1, SHORT_SEGMENT + 5, 9, 1, 1, 6, QUERY_CHUNK - 60)
    ends = [length + chain for length, chain in zip(lengths, chains, strict=True)]
    assert max(ends) <= LONGEST
    paged = PagedSequences(case.model, len(ends), LONGEST)
    heads = paged.extend([(i, case.sequences[i][:length]) for i, length in enumerate(lengths)])
    backwards = list(reversed(range(len(ends))))
    tails = paged.extend([(i, case.sequences[i][lengths[i] : ends[i]]) for i in backwards])
    for i, tail in zip(backwards, tails, strict=True):
        assert_close(torch.cat([heads[i], tail]), case.expected[i][: ends[i]])


def test_tokens_written_over_rejected_ones_see_nothing_of_them(case: Case) -> None:
    paged = PagedSequences(case.model, 1, LONGEST)
    paged.extend([(0, case.sequences[0][:40])])
    paged.extend([(0, case.sequences[1][:12])])
    paged.lengths[0] = 40
    (found,) = paged.extend([(0, case.sequences[0][40:60])])
    assert_close(found, case.expected[0][40:60])


def test_a_sequence_dropped_from_a_pass_changes_nothing_for_the_others(case: Case) -> None:
    lengths = (40, 7, 90)
    with torch.inference_mode():
        current = case.model.begin(TokenBatch.of((case.sequences[i][:n], 0) for i, n in enumerate(lengths)))
        for layer, weights in case.model.walk():
            if layer == 2:
                current.keep([40, 0, 90])
            current.compute(layer, weights, PromptKeyValues(current.batch.segments))
        found = case.model.logits(current.last_hidden)
    assert_close(found, torch.stack([case.expected[i][lengths[i] - 1] for i in (0, 2)]))


def test_the_real_model_in_a_prefill_pass(smollm2: tuple[Model, nn.Module, list[int]]) -> None:
    ours, theirs, tokens = smollm2
    found = prompt_logits(ours, [tokens, tokens[:5]])
    expected = reference_logits(theirs, tokens)
    assert_close(found[0], expected)
    assert_close(found[1], expected[:5])


def test_the_real_model_paged(smollm2: tuple[Model, nn.Module, list[int]]) -> None:
    ours, theirs, tokens = smollm2
    parts = [tokens[:80], tokens[80:81], tokens[81:82], tokens[82:90], tokens[90:]]
    assert_close(paged_logits(ours, parts), reference_logits(theirs, tokens))


def test_in_bfloat16_the_best_token_is_nearly_always_that_of_transformers(
    smollm2: tuple[Model, nn.Module, list[int]], smollm2_pack: Smollm2Pack
) -> None:
    _, theirs, tokens = smollm2
    (found,) = prompt_logits(resident_model(smollm2_pack("bf16")), [tokens])
    expected = reference_logits(copy.deepcopy(theirs).to(torch.bfloat16), tokens)
    agreement = (found.argmax(-1) == expected.argmax(-1)).float().mean().item()
    assert agreement >= 0.95, f"only {agreement:.1%} of positions agree"


def paged_logits(model: Model, parts: Sequence[Sequence[int]]) -> Tensor:
    """The logits of one sequence that is computed part by part."""
    paged = PagedSequences(model, 1, sum(map(len, parts)))
    return torch.cat([paged.extend([(0, part)])[0] for part in parts])


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    worst = (found - expected).abs().max().item()
    assert worst <= TOLERANCE, f"logits differ by {worst:.2e}"


ENGLISH = (
    "The inspection of pumping station seven began at six in the morning. Bearing temperatures were normal, but the "
    "vibration of the second motor had grown since March, and oil was found below its coupling. We tightened the "
    "flange, replaced a cracked gauge, and asked for a new seal, which should arrive within two weeks. Until then the "
    "motor runs at half its speed, and somebody reads the gauge at the beginning of every shift. The water level in "
    "the basin was four metres and twelve centimetres, slightly above the average of the season. There were no "
    "injuries. The night crew reported that the northern gate does not close when it rains."
)
