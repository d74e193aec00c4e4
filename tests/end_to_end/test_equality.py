"""One answer, however it is computed: by transformers, without services, with drafts, streamed, alone, in a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decode_service.sampling import SamplingParams
from decode_service.shaping import Shaping
from shared.pack.reader import Pack
from shared.streaming.plan import Residency
from tests.conftest import TinyCheckpoint, TinyPack
from tests.end_to_end.conftest import SchemePack
from tests.end_to_end.reference import plain_answer, transformers_greedy, transformers_model
from tests.end_to_end.stack import answers, everything, quarter, services
from tests.models import EOS_ID

MAX_TOKENS = 24
SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9}

SHAPING: dict[str, Any] = {
    "repetition_penalty": 1.25,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.25,
    "logit_bias": {9: 1.5, 200: -100.0},
    "bad_token_ids": (5, 6),
    "min_tokens": 6,
}

Placement = Callable[[Pack], Residency]
PLACEMENTS = pytest.mark.parametrize("residency", [everything, quarter], ids=["resident", "streamed"])
DRAFTS = pytest.mark.parametrize("draft", ["none", "ngram", "truncated", "stranger", "auto"])


def greedy_requests(prompts: list[list[int]]) -> list[dict[str, Any]]:
    return [{"token_ids": prompt, "max_tokens": MAX_TOKENS} for prompt in prompts]


def sampled_requests(prompts: list[list[int]]) -> list[dict[str, Any]]:
    return [request | SAMPLING | {"seed": 7 + seed} for seed, request in enumerate(greedy_requests(prompts))]


def sampling_params(seed: int) -> SamplingParams:
    """The same, as it arrives: the protos carry single precision."""
    temperature, top_p = (float(np.float32(SAMPLING[name])) for name in ("temperature", "top_p"))
    return SamplingParams(temperature=temperature, top_p=top_p, seed=seed)


def shaped_requests(prompts: list[list[int]]) -> list[dict[str, Any]]:
    return [request | SHAPING | {"min_p": 0.125} for request in sampled_requests(prompts)]


def shaped_params(seed: int) -> SamplingParams:
    fields = SHAPING | {
        "logit_bias": tuple(SHAPING["logit_bias"].items()),
        "bad_token_ids": frozenset(SHAPING["bad_token_ids"]),
        "end_token_ids": frozenset({EOS_ID}),
    }
    return replace(sampling_params(seed), min_p=0.125, shaping=Shaping(**fields))


@pytest.fixture(scope="session")
def greedy(checkpoint: Path, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """The answers of transformers' own `generate`."""
    model = transformers_model(checkpoint)
    return [transformers_greedy(model, prompt, MAX_TOKENS) for prompt in prompts]


@pytest.fixture(scope="session")
def sampled(target_pack: SchemePack, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """The answers of one process without services, drafts and neighbours."""
    path = target_pack("fp32")
    return [
        plain_answer(path, everything(Pack.open(path)), prompt, MAX_TOKENS, sampling_params(7 + seed))[0]
        for seed, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="session")
def shaped(target_pack: SchemePack, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """The same with penalties, biases and tokens ruled out."""
    path = target_pack("fp32")
    return [
        plain_answer(path, everything(Pack.open(path)), prompt, MAX_TOKENS, shaped_params(7 + seed))[0]
        for seed, prompt in enumerate(prompts)
    ]


@pytest.fixture
def drafting(draft: str, truncated_pack: SchemePack, stranger_pack: SchemePack) -> dict[str, Any]:
    """Options that make a decode service draft so."""
    if draft == "auto":
        return {"draft": draft, "draft_pack": truncated_pack("fp32")}
    packs = {"truncated": truncated_pack, "stranger": stranger_pack}
    return {"draft": "model", "draft_pack": packs[draft]("fp32")} if draft in packs else {"draft": draft}


@PLACEMENTS
def test_one_process_without_services_answers_as_transformers_does(
    target_pack: SchemePack, prompts: list[list[int]], greedy: list[tuple[int, ...]], residency: Placement
) -> None:
    path = target_pack("fp32")
    assert [plain_answer(path, residency(Pack.open(path)), prompt, MAX_TOKENS)[0] for prompt in prompts] == greedy


@PLACEMENTS
@DRAFTS
async def test_two_services_answer_the_same_alone_and_in_a_batch_greedy_and_sampled(
    target_pack: SchemePack,
    prompts: list[list[int]],
    greedy: list[tuple[int, ...]],
    sampled: list[tuple[int, ...]],
    drafting: dict[str, Any],
    residency: Placement,
) -> None:
    expected = greedy + sampled
    requests = greedy_requests(prompts) + sampled_requests(prompts)
    async with services(target_pack("fp32"), residency=residency, **drafting) as decode:
        alone = await answers(decode.client, requests[::4], at_once=False)
        eight = await answers(decode.client, requests[:8], at_once=True)
        mixed = await answers(decode.client, requests, at_once=True)
        await decode.idle()
        totals = decode.telemetry.totals
    assert [answer.token_ids for answer in alone] == expected[::4]
    assert [answer.token_ids for answer in eight] == greedy
    assert [answer.token_ids for answer in mixed] == expected
    assert (totals.draft_tokens > 0) == (drafting["draft"] != "none")
    assert totals.accepted_tokens > 0 or "draft_pack" not in drafting
    assert (totals.streamed_bytes > 0) == (residency is quarter)
    assert totals.batched_requests > totals.passes


@DRAFTS
async def test_penalties_biases_and_tokens_ruled_out_change_no_answer_by_a_draft(
    target_pack: SchemePack,
    prompts: list[list[int]],
    sampled: list[tuple[int, ...]],
    shaped: list[tuple[int, ...]],
    drafting: dict[str, Any],
) -> None:
    async with services(target_pack("fp32"), **drafting) as decode:
        got = await answers(decode.client, shaped_requests(prompts), at_once=True)
        await decode.idle()
        accepted = decode.telemetry.totals.accepted_tokens
    assert [answer.token_ids for answer in got] == shaped
    assert shaped != sampled
    assert accepted > 0 or "draft_pack" not in drafting


@pytest.mark.parametrize("draft", ["none", "truncated"])
async def test_greedy_answers_with_penalties_and_ruled_out_tokens_are_those_of_transformers(
    checkpoint: Path, target_pack: SchemePack, prompts: list[list[int]], drafting: dict[str, Any]
) -> None:
    model = transformers_model(checkpoint)
    options = {"repetition_penalty": 1.25, "min_new_tokens": 12, "bad_words_ids": [[5], [6], [40]]}
    expected = [transformers_greedy(model, prompt, MAX_TOKENS, **options) for prompt in prompts]
    ours = {"repetition_penalty": 1.25, "min_tokens": 12, "bad_token_ids": [5, 6, 40]}
    async with services(target_pack("fp32"), **drafting) as decode:
        got = await answers(decode.client, [request | ours for request in greedy_requests(prompts)], at_once=True)
        await decode.idle()
    assert [answer.token_ids for answer in got] == expected


@pytest.mark.parametrize("draft", ["none", "ngram", "truncated"])
async def test_an_end_of_sequence_token_is_ignored_or_put_off_as_asked(
    target_pack: SchemePack, prompts: list[list[int]], drafting: dict[str, Any]
) -> None:
    likely_end = {"token_ids": prompts[3], "max_tokens": 12, "logit_bias": {EOS_ID: 100.0}}
    async with services(target_pack("fp32"), **drafting) as decode:
        plain = await decode.client.complete(**likely_end)
        later = await decode.client.complete(**likely_end, min_tokens=5)
        never = await decode.client.complete(**likely_end, ignore_eos=True)
        await decode.idle()
    assert (plain.token_ids, plain.finish_reason) == ((EOS_ID,), "stop")
    assert EOS_ID not in later.token_ids[:5]
    assert (len(later.token_ids), later.token_ids[-1], later.finish_reason) == (6, EOS_ID, "stop")
    assert (never.token_ids, never.finish_reason) == ((EOS_ID,) * 12, "length")


@pytest.mark.parametrize(
    "model",
    [
        {"tied": False},
        {"attention_bias": True, "mlp_bias": True},
        {"kv_heads": 1},
        {"kv_heads": 4, "head_dim": 32},
        {"layers": 9, "hidden": 128},
    ],
    ids=["untied", "biases", "one kv head", "wide heads", "nine layers"],
)
async def test_every_shape_of_model_answers_as_transformers_does(
    tiny_model: TinyCheckpoint, tiny_pack: TinyPack, prompts: list[list[int]], model: dict[str, Any]
) -> None:
    oracle = transformers_model(tiny_model(**model))
    async with services(tiny_pack("fp32", **model), residency=quarter, draft="ngram") as decode:
        got = await answers(decode.client, greedy_requests(prompts), at_once=True)
        await decode.idle()
    expected = [transformers_greedy(oracle, prompt, MAX_TOKENS) for prompt in prompts]
    assert [answer.token_ids for answer in got] == expected


async def test_a_tiny_batch_limit_and_few_blocks_change_the_order_of_work_and_no_answer(
    target_pack: SchemePack, prompts: list[list[int]], greedy: list[tuple[int, ...]], sampled: list[tuple[int, ...]]
) -> None:
    requests = greedy_requests(prompts) + sampled_requests(prompts)
    async with services(target_pack("fp32"), draft="ngram", batch=2, kv_blocks=21) as decode:
        got = await answers(decode.client, requests, at_once=True)
        await decode.idle()
    assert [answer.token_ids for answer in got] == greedy + sampled
