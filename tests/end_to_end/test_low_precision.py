"""Below float32 kernels may round differently by rows: answers differ only where two tokens are almost equally good."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from shared.pack.reader import Pack
from tests.end_to_end.conftest import SchemePack
from tests.end_to_end.reference import plain_answer
from tests.end_to_end.stack import answers, everything, quarter, services

MAX_TOKENS = 48

KERNEL_NOISE = 4 * 2**-8
"""Four rounding steps of bfloat16, in which logits are computed: nearer than this, two tokens may change places."""

MOST_DIVERGENCES = 2
"""Of 16 answers: each prompt is answered twice, and one has two equally good tokens in int8."""

Reference = tuple[tuple[int, ...], Sequence[float]]


@pytest.fixture(scope="module")
def references(target_pack: SchemePack, prompts: list[list[int]]) -> dict[str, list[Reference]]:
    """The answers of one process without services, in each scheme."""
    return {
        scheme: [plain_answer(path, everything(Pack.open(path)), prompt, MAX_TOKENS) for prompt in prompts]
        for scheme, path in ((scheme, target_pack(scheme)) for scheme in ("bf16", "int8", "nf4"))
    }


@pytest.mark.parametrize("scheme", ["bf16", "int8", "nf4"])
@pytest.mark.parametrize("draft", ["ngram", "self int8", "self nf4", "truncated"])
async def test_answers_agree_up_to_kernel_noise_with_every_draft(
    target_pack: SchemePack,
    truncated_pack: SchemePack,
    prompts: list[list[int]],
    references: dict[str, list[Reference]],
    record_property: Any,
    scheme: str,
    draft: str,
) -> None:
    kind, _, copy_scheme = draft.partition(" ")
    options: dict[str, Any] = {
        "ngram": {"draft": "ngram"},
        "self": {"draft": "self", "draft_pack": target_pack(copy_scheme or scheme)},
        "truncated": {"draft": "model", "draft_pack": truncated_pack(scheme)},
    }[kind]
    requests = [{"token_ids": prompt, "max_tokens": MAX_TOKENS} for prompt in prompts]
    async with services(target_pack(scheme), residency=quarter, **options) as decode:
        got = [answer for _ in range(2) for answer in await answers(decode.client, requests, at_once=True)]
        await decode.idle()
        totals = decode.telemetry.totals
    divergences = [
        (position, margin)
        for answer, reference in zip(got, references[scheme] * 2, strict=True)
        if (found := first_difference(answer.token_ids, reference)) is not None
        for position, margin in [found]
    ]
    record_property("divergences", f"{len(divergences)} of {len(got)}: {divergences}")
    assert all(margin <= KERNEL_NOISE for _, margin in divergences), divergences
    assert len(divergences) <= MOST_DIVERGENCES, divergences
    if draft == "self int8":
        agreed = totals.accepted_tokens / totals.draft_tokens
        assert agreed > (0.5 if scheme == "bf16" else 0.99 if scheme == "int8" else 0)


def first_difference(token_ids: Sequence[int], reference: Reference) -> tuple[int, float] | None:
    """Where an answer leaves the reference, and how much better the reference's token was there."""
    tokens, margins = reference
    pairs = enumerate(zip(token_ids, tokens, strict=False))
    position = next((index for index, (ours, theirs) in pairs if ours != theirs), None)
    if position is None:
        assert len(token_ids) == len(tokens), "one answer ends before the other"
        return None
    return position, margins[position]
