"""Both services on a device: the same answers as on the CPU, with layers in all three tiers.

The device is one that refuses to be mixed with the CPU (`tests.shared.strict_device`); it is no GPU.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from decode_service.prompts import LocalPrefill
from shared.pack.reader import Pack
from shared.streaming.copies import SynchronousCopies
from shared.streaming.plan import Residency
from tests.end_to_end.conftest import SchemePack
from tests.end_to_end.stack import answers, services
from tests.shared.strict_device import strict_device

MODES: dict[str, dict[str, Any]] = {
    "received, n-grams": {"draft": "ngram"},
    "received, a copy drafts": {"draft": "self"},
    "received, a model drafts": {"draft": "model"},
    "computed in decode's own passes": {"local_prefill": LocalPrefill.ALWAYS, "pass_tokens": 40},
}


def three_tiers(pack: Pack) -> Residency:
    """One layer stays on the device, one on the host, the others are read."""
    return Residency(frozenset({1}), slots=2, device_slots=2, host=frozenset({2}))


def requests(prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Greedy and sampled, two that begin alike, with log-probabilities."""
    asked = [*prompts[2:6], prompts[4] + prompts[3]]
    greedy: list[dict[str, Any]] = [
        {"token_ids": prompt, "max_tokens": 12, "logprobs": True, "top_logprobs": 2} for prompt in asked
    ]
    return greedy + [request | {"temperature": 0.8, "seed": seed} for seed, request in enumerate(greedy)]


async def answered(path: Path, prompts: list[list[int]], **options: Any) -> list[tuple[int, ...]]:
    async with services(path, **options) as decode:
        found = await answers(decode.client, requests(prompts), at_once=True)
        await decode.idle()
    return [answer.token_ids for answer in found]


@pytest.mark.parametrize("mode", MODES)
async def test_answers_are_those_of_the_cpu(
    target_pack: SchemePack, truncated_pack: SchemePack, prompts: list[list[int]], mode: str
) -> None:
    path = target_pack("fp32")
    drafts = {"self": path, "model": truncated_pack("fp32")}
    options = MODES[mode] | {"draft_pack": drafts.get(MODES[mode].get("draft", "none"))}
    with closing(SynchronousCopies(strict_device())) as copies:
        found = await answered(path, prompts, residency=three_tiers, copies=copies, **options)
    assert found == await answered(path, prompts)


async def test_scores_are_those_of_the_cpu(target_pack: SchemePack, prompts: list[list[int]]) -> None:
    logprobs = []
    with closing(SynchronousCopies(strict_device())) as copies:
        on_device: dict[str, Any] = {"residency": three_tiers, "copies": copies}
        for options in ({}, on_device):
            async with services(target_pack("fp32"), **options) as decode:
                logprobs.append((await decode.client.score(token_ids=prompts[4])).logprobs)
    assert logprobs[0] == logprobs[1]
