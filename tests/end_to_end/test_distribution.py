"""What the running services draw at temperature 1 has the probabilities that transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.decode_service.chi_square import require_fit
from tests.end_to_end.conftest import SchemePack
from tests.end_to_end.reference import transformers_model
from tests.end_to_end.stack import answers, services

TOP_K = 4
TOKENS = 3
"""The first comes with the prompt; the others may come from drafts."""
DRAWS = 600
REPETITION_PENALTY = 1.25

Answer = tuple[int, ...]


@pytest.mark.parametrize(
    ("draft", "repetition_penalty"),
    [("none", 1.0), ("ngram", 1.0), ("truncated", 1.0), ("truncated", REPETITION_PENALTY), ("auto", 1.0)],
)
async def test_draws_through_the_services_fit_the_exact_probabilities_of_whole_answers(
    endless_checkpoint: Path,
    endless_pack: Path,
    truncated_pack: SchemePack,
    draft: str,
    repetition_penalty: float,
) -> None:
    prompt = prompt_with_lookups(endless_checkpoint)
    drafting: dict[str, Any] = {
        "truncated": {"draft": "model", "draft_pack": truncated_pack("fp32")},
        "auto": {"draft": "auto", "draft_pack": truncated_pack("fp32"), "draft_length": None},
    }.get(draft, {"draft": draft})
    request = {"token_ids": prompt, "max_tokens": TOKENS, "temperature": 1.0, "top_k": TOP_K}
    request |= {"repetition_penalty": repetition_penalty}
    async with services(endless_pack, **drafting) as decode:
        got = await answers(decode.client, [request | {"seed": seed} for seed in range(DRAWS)], at_once=True)
        await decode.idle()
        proposed = decode.telemetry.totals.draft_tokens
    assert (proposed > 0) == (draft != "none")
    require_fit([answer.token_ids for answer in got], probabilities(endless_checkpoint, prompt, repetition_penalty))


def prompt_with_lookups(folder: Path) -> list[int]:
    """A prompt whose likeliest first token makes an n-gram that occurred before: prompt lookup has a proposal."""
    last, random = 7, torch.Generator().manual_seed(0)
    while True:
        followers = torch.randint(2, 320, (20,), generator=random).tolist()
        prompt = [*(token for follower in followers for token in (last, follower)), last]
        if int(next_logits(folder, prompt).argmax()) in followers:
            return prompt


def next_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    """Transformers' logits after tokens, float64 [vocabulary]."""
    with torch.inference_mode():
        logits: torch.Tensor = transformers_model(folder)(torch.tensor([tokens])).logits[0, -1].double()
    return logits


def probabilities(folder: Path, prompt: list[int], repetition_penalty: float) -> dict[Answer, float]:
    """Of every answer that top-k allows, penalized by transformers."""
    from transformers import RepetitionPenaltyLogitsProcessor

    penalize: Any = RepetitionPenaltyLogitsProcessor(penalty=repetition_penalty)
    known: dict[Answer, float] = {(): 1.0}
    for _ in range(TOKENS):
        longer: dict[Answer, float] = {}
        for answer, probability in known.items():
            tokens = [*prompt, *answer]
            kept = penalize(torch.tensor([tokens]), next_logits(folder, tokens)[None])[0].topk(TOP_K)
            for token, share in zip(kept.indices.tolist(), kept.values.softmax(0).tolist(), strict=True):
                longer[(*answer, token)] = probability * share
        known = longer
    return known
