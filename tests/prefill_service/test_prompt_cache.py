"""What prompts find in the cache was computed for exactly their tokens, whoever leaves a pass, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefill_service.prompt_cache import PassPrompt, PromptCache
from prefill_service.scheduler import PromptJob
from shared.blocks import BlockPool
from shared.outlet import Outlet

BLOCK, LAYERS = 2, 3


def job(*token_ids: int, salt: str = "") -> PromptJob:
    return PromptJob("", token_ids, Outlet(), cache_salt=salt)


def cache_of(blocks: int) -> PromptCache:
    return PromptCache(BlockPool(blocks, BLOCK), "digest")


def contexts(prompts: Sequence[PassPrompt]) -> list[int]:
    return [prompt.context for prompt in prompts]


async def test_a_pass_computes_what_its_prompts_share_once_and_later_ones_find_it() -> None:
    cache = cache_of(8)
    prompts = cache.begin([job(1, 2, 3, 4, 5), job(1, 2, 3, 4, 6), job(1, 2, 9)])
    assert contexts(prompts) == [0, 4, 2]
    assert [prompt.count for prompt in prompts] == [5, 1, 1]
    assert prompts[1].table == prompts[0].table
    cache.check_integrity()
    cache.end(filled=True)
    cache.check_integrity()
    assert cache.blocks_cached == 2
    assert contexts(cache.begin([job(1, 2, 3, 4)])) == [2], "the last token is always computed"
    cache.end(filled=True)


async def test_prompts_with_different_salts_share_nothing() -> None:
    cache = cache_of(8)
    assert contexts(cache.begin([job(1, 2, 3, salt="a"), job(1, 2, 3, salt="b"), job(1, 2, 4, salt="a")])) == [0, 0, 2]
    cache.end(filled=True)
    assert contexts(cache.begin([job(1, 2, 3)])) == [0]
    cache.end(filled=True)


async def test_a_prompt_that_is_too_long_for_the_cache_leaves_its_beginning_there() -> None:
    cache = cache_of(2)
    (prompt,) = cache.begin([job(*range(9))])
    assert (len(prompt.table), prompt.count) == (2, 9)
    cache.end(filled=True)
    assert contexts(cache.begin([job(*range(9))])) == [4]
    cache.end(filled=True)


async def test_what_a_prompt_of_the_pass_reads_makes_no_room_for_another() -> None:
    cache = cache_of(3)
    cache.begin([job(1, 2, 3, 4, 5)])
    cache.end(filled=True)
    assert cache.known_tokens(job(1, 2, 3, 4, 6)) == 4
    prompts = cache.begin([job(7, 7, 7, 7, 7), job(1, 2, 3, 4, 6)])
    assert contexts(prompts) == [0, 4]
    assert len(prompts[0].table) == 1
    cache.end(filled=True)


async def test_a_text_that_is_scored_is_computed_as_a_whole_and_counts_as_such() -> None:
    cache = cache_of(8)
    cache.begin([job(1, 2, 3)])
    cache.end(filled=True)
    text = job(1, 2, 3)
    text.top_logprobs = 0
    assert cache.known_tokens(text) == 0
    assert [(prompt.context, prompt.count) for prompt in cache.begin([text, job(1, 2, 4)])] == [(0, 3), (2, 1)]
    cache.end(filled=True)
    cache.check_integrity()


async def test_without_blocks_every_prompt_is_computed_as_a_whole() -> None:
    cache = cache_of(0)
    prompts = cache.begin([job(1, 2, 3), job(1, 2, 3)])
    assert (contexts(prompts), [prompt.table for prompt in prompts]) == ([0, 0], [[], []])
    cache.drop_cancelled()
    cache.end(filled=True)
    cache.check_integrity()


async def test_a_cancelled_prompt_stays_as_far_as_others_build_on_it_and_no_further() -> None:
    cache = cache_of(8)
    first, second, third = cache.begin([job(1, 2, 3, 4, 5, 6, 7), job(1, 2, 9), job(1, 2, 3, 4, 9)])
    first.job.cancelled = True
    cache.drop_cancelled()
    assert [prompt.count for prompt in (first, second, third)] == [4, 1, 1]
    third.job.cancelled = True
    cache.drop_cancelled()
    assert [prompt.count for prompt in (first, second, third)] == [2, 1, 0]
    cache.check_integrity()
    cache.end(filled=True)
    assert contexts(cache.begin([job(1, 2, 3, 4, 5, 6, 7)])) == [2], "what nobody filled is not known"
    cache.end(filled=True)


async def test_a_chain_of_cancelled_prompts_stays_for_the_one_that_builds_on_it() -> None:
    cache = cache_of(8)
    prompts = cache.begin([job(1, 2, 9), job(1, 2, 3, 4, 9), job(1, 2, 3, 4, 5)])
    assert contexts(prompts) == [0, 2, 4]
    prompts[0].job.cancelled = prompts[1].job.cancelled = True
    cache.drop_cancelled()
    assert [prompt.count for prompt in prompts] == [2, 2, 1]
    prompts[2].job.cancelled = True
    cache.drop_cancelled()
    assert [prompt.count for prompt in prompts] == [0, 0, 0]
    cache.end(filled=True)
    cache.check_integrity()
    assert cache.blocks_cached == 0


@pytest.mark.parametrize("filled", [True, False])
async def test_a_pass_that_fails_leaves_nothing_that_it_was_to_fill_and_all_that_was_there(filled: bool) -> None:
    cache = cache_of(8)
    cache.begin([job(1, 2, 3)])
    cache.end(filled=True)
    cache.begin([job(1, 2, 3, 4, 5), job(1, 2, 3, 4, 6)])
    cache.end(filled=filled)
    cache.check_integrity()
    assert contexts(cache.begin([job(1, 2, 3, 4, 5)])) == [4 if filled else 2]
    cache.end(filled=True)


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
PASS = st.tuples(
    st.lists(TOKENS, min_size=1, max_size=4),
    st.lists(st.sets(st.integers(0, 3)), min_size=LAYERS, max_size=LAYERS),
    st.none() | st.integers(0, LAYERS - 1),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(PASS, max_size=6), st.integers(0, 7))
def test_whatever_is_read_was_computed_for_exactly_these_tokens(
    passes: list[tuple[list[list[int]], list[set[int]], int | None]], blocks: int
) -> None:
    """Passes of prompts over two tokens; before each layer some are cancelled, and a pass may fail before a layer."""

    async def simulate() -> None:
        cache = cache_of(blocks)
        stored: dict[tuple[int, int], tuple[int, ...]] = {}
        for prompts, cancelled, fails_at in passes:
            run(cache, [job(*token_ids) for token_ids in prompts], cancelled, fails_at, stored)
            cache.check_integrity()

    asyncio.run(simulate())


def run(
    cache: PromptCache,
    jobs: list[PromptJob],
    cancelled: list[set[int]],
    fails_at: int | None,
    stored: dict[tuple[int, int], tuple[int, ...]],
) -> None:
    """One pass; `stored` is the pool: (layer, block) -> the tokens up to the block's end."""
    in_pass = cache.begin(jobs)
    for layer in range(LAYERS):
        if layer == fails_at:
            cache.end(filled=False)
            return
        for index in cancelled[layer] & set(range(len(jobs))):
            jobs[index].cancelled = True
        cache.drop_cancelled()
        cache.check_integrity()
        in_pass = [prompt for prompt in in_pass if prompt.count]
        assert {id(prompt.job) for prompt in in_pass} >= {id(job) for job in jobs if not job.cancelled}
        for prompt in in_pass:
            assert (prompt.context + prompt.count) // BLOCK >= len(prompt.table), "own blocks are filled"
            for number, block in enumerate(prompt.table[prompt.reused :], prompt.reused + 1):
                stored[layer, block] = tuple(prompt.job.token_ids[: number * BLOCK])
        for prompt in in_pass:
            for number, block in enumerate(prompt.table[: prompt.reused], 1):
                assert stored[layer, block] == tuple(prompt.job.token_ids[: number * BLOCK])
    cache.end(filled=True)
