"""Reported log-probabilities are those of transformers, whatever is asked of sampling, however tokens are drafted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.types import TokenLogprobs
from tests.end_to_end.conftest import SchemePack
from tests.end_to_end.reference import transformers_model
from tests.end_to_end.stack import answers, decode_replica, services

TOLERANCE = 1e-4
TOP = 20
REQUEST: dict[str, Any] = {"max_tokens": 12, "logprobs": True, "top_logprobs": TOP, "seed": 3, "min_tokens": 4}
SHAPED: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "repetition_penalty": 1.5, "logit_bias": {9: 3.0}}


def requests(prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Each prompt greedily, and with options that change what is drawn."""
    greedy = [{"token_ids": prompt} | REQUEST for prompt in prompts]
    return greedy + [request | SHAPED for request in greedy]


def require_logprobs(
    folder: Path, prompt: list[int], token_ids: tuple[int, ...], reported: tuple[TokenLogprobs, ...]
) -> None:
    """Fails unless every token has transformers' own log-probabilities."""
    with torch.inference_mode():
        logits = transformers_model(folder)(torch.tensor([[*prompt, *token_ids]])).logits[0, len(prompt) - 1 : -1]
    expected = logits.float().log_softmax(-1)
    assert len(reported) == len(token_ids)
    for row, token_id, place in zip(expected, token_ids, reported, strict=True):
        assert place.logprob == pytest.approx(float(row[token_id]), abs=TOLERANCE)
        ids = [other for other, _ in place.top]
        values = [logprob for _, logprob in place.top]
        assert len(set(ids)) == TOP
        assert values == pytest.approx(row.topk(TOP).values.tolist(), abs=TOLERANCE)
        assert values == pytest.approx(row[ids].tolist(), abs=TOLERANCE)


@pytest.mark.parametrize("draft", ["none", "ngram", "truncated"])
async def test_every_token_has_transformers_log_probabilities_after_a_handoff_with_and_without_drafts(
    checkpoint: Path, target_pack: SchemePack, truncated_pack: SchemePack, prompts: list[list[int]], draft: str
) -> None:
    drafting: dict[str, Any] = (
        {"draft": "model", "draft_pack": truncated_pack("fp32")} if draft == "truncated" else {"draft": draft}
    )
    async with services(target_pack("fp32"), **drafting) as decode:
        got = await answers(decode.client, requests(prompts), at_once=True)
        await decode.idle()
        accepted = decode.telemetry.totals.accepted_tokens
    assert accepted > 0 or draft != "truncated"
    for request, answer in zip(requests(prompts), got, strict=True):
        require_logprobs(checkpoint, request["token_ids"], answer.token_ids, answer.logprobs)


async def test_a_prompt_computed_by_decode_itself_and_a_stream_report_the_same(
    checkpoint: Path, target_pack: SchemePack, prompts: list[list[int]]
) -> None:
    async with decode_replica(target_pack("fp32"), draft="ngram") as decode:
        for request in requests(prompts[4:6]):
            chunks = [chunk async for chunk in decode.client.generate(**request)]
            assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in chunks)
            token_ids = tuple(token for chunk in chunks for token in chunk.token_ids)
            reported = tuple(place for chunk in chunks for place in chunk.logprobs)
            require_logprobs(checkpoint, request["token_ids"], token_ids, reported)
        await decode.idle()


async def test_alternatives_are_as_many_as_asked_for_and_without_asking_nothing_is_reported(
    target_pack: SchemePack, prompts: list[list[int]]
) -> None:
    request = {"token_ids": prompts[4], "max_tokens": 3, "min_tokens": 3}
    async with services(target_pack("fp32")) as decode:
        nothing = await decode.client.complete(**request)
        chosen = await decode.client.complete(**request, logprobs=True)
        best = await decode.client.complete(**request, logprobs=True, top_logprobs=1)
        await decode.idle()
    assert nothing.logprobs == ()
    assert [place.top for place in chosen.logprobs] == [()] * 3
    assert [place.top[0] for place in best.logprobs] == [
        (token_id, place.logprob) for token_id, place in zip(best.token_ids, best.logprobs, strict=True)
    ]
