"""The prefix cache: what is found, what is given up, and that no block is lost under random use."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from shared.blocks import BlockPool
from shared.errors import CapacityError
from shared.prefix_cache import PrefixCache


def make(blocks: int = 8, block_tokens: int = 4) -> tuple[BlockPool, PrefixCache]:
    pool = BlockPool(blocks, block_tokens)
    return pool, PrefixCache(pool, "digest")


def remember(pool: BlockPool, cache: PrefixCache, tokens: list[int], salt: str = "") -> list[int]:
    """A sequence that came and went; returns its block table."""
    table = cache.allocate(pool.blocks_for(len(tokens)))
    cache.insert(tokens, salt, table)
    pool.release(table)
    return table


def test_the_longest_known_prefix_of_whole_blocks_is_found_and_shared() -> None:
    pool, cache = make()
    table = remember(pool, cache, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    found = cache.match([1, 2, 3, 4, 5, 6, 7, 8, 50, 51], "")
    assert found == table[:2]
    assert [pool.reference_count(block) for block in found] == [2, 2]
    pool.check_integrity([found, cache.blocks])
    assert pool.used_count == 2, "the incomplete block is free again"


def test_the_last_token_of_a_prompt_is_never_in_the_cache() -> None:
    pool, cache = make()
    table = remember(pool, cache, list(range(8)))
    assert cache.match(list(range(8)), "") == table[:1]
    assert cache.match([0], "") == []


@pytest.mark.parametrize("tokens", [[9, 1, 2, 3, 4, 5], [0, 1, 2, 9, 4, 5]])
def test_a_difference_anywhere_before_a_block_makes_it_another_block(tokens: list[int]) -> None:
    pool, cache = make()
    remember(pool, cache, list(range(8)))
    assert cache.match(tokens, "") == []


def test_another_salt_or_another_model_finds_nothing() -> None:
    pool, cache = make()
    remember(pool, cache, list(range(8)), salt="tenant a")
    assert cache.match(list(range(8)), "tenant b") == []
    assert cache.match(list(range(8)), "tenant a")
    other = PrefixCache(pool, "other digest")
    assert other.match(list(range(8)), "tenant a") == []


def test_what_is_known_already_is_not_kept_twice() -> None:
    pool, cache = make()
    first = remember(pool, cache, list(range(8)))
    remember(pool, cache, list(range(8)))
    assert cache.blocks
    assert set(cache.blocks) == set(first)
    assert pool.used_count == 2


def test_the_least_recently_used_is_given_up_first_and_tails_before_heads() -> None:
    pool, cache = make(blocks=4)
    old = remember(pool, cache, list(range(8)))
    new = remember(pool, cache, list(range(10, 18)))
    pool.release(cache.match([*list(range(8)), 0], ""))  # used again: now the other one is the older
    taken = cache.allocate(1)
    assert taken == [new[1]]
    taken += cache.allocate(2)
    assert set(cache.blocks) == {old[0]}
    assert cache.free_count == 1
    pool.check_integrity([taken, cache.blocks])


def test_blocks_in_use_are_never_given_up() -> None:
    pool, cache = make(blocks=2)
    remember(pool, cache, list(range(8)))
    held = cache.match(list(range(9)), "")
    assert cache.free_count == 0
    with pytest.raises(CapacityError, match="0 of 2 are free"):
        cache.allocate(1)
    assert cache.match(list(range(9)), "") == held, "a refused allocation gives nothing up"


def test_forgotten_blocks_are_not_found_and_free_again() -> None:
    pool, cache = make()
    table = remember(pool, cache, list(range(8)))
    cache.forget(table[:1])
    assert cache.match(list(range(9)), "") == []
    assert pool.used_count == 1
    pool.check_integrity([cache.blocks])


class Requests(RuleBasedStateMachine):
    """Random sequences of a small alphabet come, grow out of what is cached, and go, in a pool that is too small."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.cache = make(blocks=6, block_tokens=2)
        self.held: list[list[int]] = []
        self.contents: dict[int, tuple[int, ...]] = {}
        """What a real pool would hold: each block's prefix, written by whoever allocated it."""

    @rule(target=tables, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=7))
    def admit(self, tokens: list[int]) -> list[int]:
        table = self.cache.match(tokens, "")
        for number, block in enumerate(table):
            assert self.contents[block] == tuple(tokens[: 2 * number + 2])
        needed = self.pool.blocks_for(len(tokens)) - len(table)
        if needed > self.cache.free_count:
            self.pool.release(table)
            return []
        table += self.cache.allocate(needed)
        for number, block in enumerate(table):
            self.contents[block] = tuple(tokens[: 2 * number + 2])
        self.cache.insert(tokens, "", table)
        self.held.append(table)
        return table

    @rule(table=consumes(tables))
    def leave(self, table: list[int]) -> None:
        if table:
            self.held.remove(table)
            self.pool.release(table)

    @rule(table=consumes(tables))
    def fail(self, table: list[int]) -> None:
        if table:
            self.held.remove(table)
            self.cache.forget(table)
            self.pool.release(table)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.pool.check_integrity([*self.held, self.cache.blocks])
        assert self.cache.free_count <= self.pool.block_count


TestRequests = Requests.TestCase
