"""A draft knows as much after a handoff as in a single process: the same share of its tokens is accepted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.client import AsyncClient
from headrace.types import Completion
from tests.end_to_end.conftest import SchemePack
from tests.end_to_end.stack import Decode, answers, decode_replica, prefill_replica

MAX_TOKENS = 48
ALLOWED = 0.05

Packs = Callable[[str], tuple[Path, Path | None]]


@pytest.fixture
def packs(target_pack: SchemePack, truncated_pack: SchemePack) -> Packs:
    """Target and draft's pack, by draft: a copy in a lower scheme, or another model."""

    def found(draft: str) -> tuple[Path, Path | None]:
        if draft == "self":
            return target_pack("bf16"), target_pack("int8")
        return target_pack("fp32"), truncated_pack("fp32") if draft in ("model", "auto") else None

    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", ["self", "model", "auto"])
async def test_as_many_draft_tokens_are_accepted_after_a_handoff_as_in_one_process(
    packs: Packs, prompts: list[list[int]], draft: str, temperature: float
) -> None:
    target, draft_pack = packs(draft)
    requests = [
        {"token_ids": prompt, "max_tokens": MAX_TOKENS, "temperature": temperature, "seed": 3, "ignore_eos": True}
        for prompt in prompts
    ]

    async def asked(client: AsyncClient) -> list[Completion]:
        return await answers(client, requests, at_once=True)

    async with decode_replica(target, draft=draft, draft_pack=draft_pack) as decode:
        alone = await asked(decode.client)
        in_one_process = acceptance(decode)
    async with (
        prefill_replica(target) as prefill,
        decode_replica(target, prefill.address, draft=draft, draft_pack=draft_pack) as decode,
    ):
        handed_off = await asked(decode.client)
        after_a_handoff = acceptance(decode)
    assert all(answer.timings.prefill_compute_ms > 0 for answer in handed_off)
    assert all(answer.timings.prefill_compute_ms == 0 for answer in alone)
    assert after_a_handoff > 0
    assert after_a_handoff == pytest.approx(in_one_process, rel=ALLOWED)


def acceptance(decode: Decode) -> float:
    """Share of the draft tokens so far that the target chose itself."""
    totals = decode.telemetry.totals
    return totals.accepted_tokens / totals.draft_tokens
