"""Below float32 kernels may round differently by rows: answers differ only where two tokens are almost equally good."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from decode_service.text.tokenizer import Tokenizer
from shared.metrics import Totals
from shared.pack.reader import Pack
from tests.conftest import Smollm2Pack
from tests.end_to_end.conftest import SchemePack
from tests.end_to_end.reference import plain_answer
from tests.end_to_end.stack import answers, everything, quarter, services

MAX_TOKENS = 48

KERNEL_NOISE = 4 * 2**-8
"""Four rounding steps of bfloat16, in which logits are computed: nearer than this, two tokens may change places."""

MOST_DIVERGENCES = 2
"""Of 8 tiny answers, or 16 real ones."""

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
    scheme: str,
    draft: str,
) -> None:
    kind, _, copy_scheme = draft.partition(" ")
    options: dict[str, Any] = {
        "ngram": {"draft": "ngram"},
        "self": {"draft": "self", "draft_pack": target_pack(copy_scheme or scheme)},
        "truncated": {"draft": "model", "draft_pack": truncated_pack(scheme)},
    }[kind]
    got, totals = await answered(target_pack(scheme), options, prompts, at_once=True)
    divergences = divergences_of(got, references[scheme])
    print(f"{len(divergences)} of {len(got)} answers diverge, at (position, margin) {divergences}")
    assert all(margin <= KERNEL_NOISE for _, margin in divergences), divergences
    assert len(divergences) <= MOST_DIVERGENCES, divergences
    if draft == "self int8":
        agreed = totals.accepted_tokens / totals.draft_tokens
        assert agreed > (0.5 if scheme == "bf16" else 0.99 if scheme == "int8" else 0)


async def answered(
    path: Path, options: dict[str, Any], prompts: list[list[int]], *, at_once: bool
) -> tuple[list[tuple[int, ...]], Totals]:
    """The answers of streaming services, and what was done for them."""
    requests = [{"token_ids": prompt, "max_tokens": MAX_TOKENS} for prompt in prompts]
    async with services(path, residency=quarter, **options) as decode:
        got = await answers(decode.client, requests, at_once=at_once)
        await decode.idle()
        return [answer.token_ids for answer in got], decode.telemetry.totals


def divergences_of(got: Sequence[Sequence[int]], references: Sequence[Reference]) -> list[tuple[int, float]]:
    """Where answers leave their references."""
    found = (first_difference(tokens, reference) for tokens, reference in zip(got, references, strict=True))
    return [difference for difference in found if difference is not None]


def first_difference(token_ids: Sequence[int], reference: Reference) -> tuple[int, float] | None:
    """Where an answer leaves the reference, and how much better the reference's token was there."""
    tokens, margins = reference
    pairs = enumerate(zip(token_ids, tokens, strict=False))
    position = next((index for index, (ours, theirs) in pairs if ours != theirs), None)
    if position is None:
        assert len(token_ids) == len(tokens), "one answer ends before the other"
        return None
    return position, margins[position]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("scheme", ["bf16", "int8"])
async def test_the_real_model_agrees_up_to_kernel_noise_and_whatever_the_draft_and_the_batch(
    smollm2_pack: Smollm2Pack, scheme: str
) -> None:
    path = smollm2_pack(scheme)
    tokenizer = Tokenizer(Pack.open(path).tokenizer_json(), None, {})
    prompts = [tokenizer.encode(text) for text in REAL_PROMPTS]
    references = [plain_answer(path, everything(Pack.open(path)), prompt, MAX_TOKENS) for prompt in prompts]
    alone, _ = await answered(path, {"draft": "none"}, prompts, at_once=False)
    prompt_lookup, _ = await answered(path, {"draft": "ngram"}, prompts, at_once=True)
    copy, _ = await answered(path, {"draft": "self", "draft_pack": smollm2_pack("nf4")}, prompts, at_once=True)
    for got in (alone, prompt_lookup, copy):
        divergences = divergences_of(got, references)
        print(f"{len(divergences)} of {len(got)} leave the single process, at (position, margin) {divergences}")
        assert all(margin <= KERNEL_NOISE for _, margin in divergences), divergences
    changed = sum(ours != theirs for got in (prompt_lookup, copy) for ours, theirs in zip(got, alone, strict=True))
    print(f"{changed} of {2 * len(alone)} answers depend on draft or batch")
    assert changed <= MOST_DIVERGENCES


REAL_PROMPTS = (
    "The pump in cellar 7",
    "Shift report, 14 March. Crew: three. Weather: rain since noon.",
    "Inlet gate 2 was found half open at 06:10. " * 6,
    "1, 2, 3, 4, 5, 6, 7, 8, 9,",
    "def area(width, height):",
    "Dear colleagues,",
    "The capital of France is",
    "Q: Why do pumps fail?\nA:",
)
