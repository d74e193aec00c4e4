"""Models with experts through the services: the same text whatever is in memory, and experts that cannot be read."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import DataLoss, Unavailable
from shared.pack.format import experts_file_name
from shared.pack.reader import Pack
from shared.streaming.plan import Residency
from tests.conftest import FamilyPack
from tests.end_to_end.stack import decode_replica, services
from tests.end_to_end.test_storage_faults import NOT_SERVING, SERVING, everything_of, health_of

CASE = "OLMoE"
LAYER = 2
TOKENS = 24
LONG = 480
"""More tokens than are generated before anything happens to the request."""


def few_experts(pack: Pack) -> Residency:
    """One of four layers in memory, and of 32 experts those that 6 slots leave room for."""
    return Residency(frozenset({1}), slots=2, expert_slots=6)


@pytest.mark.parametrize("draft", ["none", "ngram", "self"])
async def test_texts_do_not_depend_on_experts_in_memory_nor_on_neighbours_nor_on_the_draft(
    family_pack: FamilyPack, prompts: list[list[int]], draft: str
) -> None:
    pack = family_pack("fp32", CASE)
    draft_pack = pack if draft == "self" else None
    async with decode_replica(pack) as decode:
        expected = [(await decode.client.complete(token_ids=tokens, max_tokens=TOKENS)).token_ids for tokens in prompts]
    async with services(pack, residency=few_experts, draft=draft, draft_pack=draft_pack) as decode:
        together = await asyncio.gather(
            *(decode.client.complete(token_ids=tokens, max_tokens=TOKENS) for tokens in prompts)
        )
        assert [completion.token_ids for completion in together] == expected
        await decode.idle()


def cut_off(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(4096)


def lose(path: Path) -> None:
    """What a device leaves that is gone: no file, and descriptors that fail."""
    with path.open("r+b") as file:
        path.unlink()
        file.truncate(0)


def restore(whole: Path, path: Path) -> None:
    """Replaces the file by the whole one, as a careful operator does."""
    whole.rename(path)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (cut_off, DataLoss, rf"layer {LAYER}, expert \d is truncated at byte"),
        (lose, Unavailable, rf"layer {LAYER}, expert \d cannot be opened: No such file or directory"),
    ],
)
async def test_an_expert_lost_during_an_answer_ends_it_by_name_and_decode_serves_again_once_it_is_back(
    family_pack: FamilyPack, tmp_path: Path, damage: Callable[[Path], None], error: type[Exception], message: str
) -> None:
    damageable = Path(shutil.copytree(family_pack("fp32", CASE), tmp_path / "pack"))
    path = damageable / experts_file_name(LAYER)
    whole = Path(shutil.copy2(path, tmp_path / "whole"))
    request = {"token_ids": [3, 4, 5], "max_tokens": 8}
    async with decode_replica(damageable, residency=few_experts) as decode, health_of(decode.address) as becomes:
        expected = await decode.client.complete(**request)
        async with decode.client.generate(token_ids=[8, 9], max_tokens=LONG) as running:
            await anext(running)
            damage(path)
            with pytest.raises(error, match=message):
                await everything_of(running)
        await becomes(NOT_SERVING)
        await decode.idle()
        restore(whole, path)
        await becomes(SERVING)
        assert (await decode.client.complete(**request)).token_ids == expected.token_ids
        await decode.idle()
