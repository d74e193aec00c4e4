"""The KV block pool: counts, refusals, and integrity under random use."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from shared.blocks import BlockIntegrityError, BlockPool
from shared.errors import CapacityError


def test_allocation_takes_distinct_blocks_and_release_returns_them() -> None:
    pool = BlockPool(8)
    table = pool.allocate(5)
    assert len(set(table)) == 5
    assert (pool.free_count, pool.used_count) == (3, 5)
    pool.release(table)
    assert (pool.free_count, pool.used_count) == (8, 0)


def test_a_request_for_more_than_is_free_takes_nothing_and_names_both_numbers() -> None:
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(CapacityError, match=r"4 KV blocks of 16 tokens are needed, 3 of 4 are free"):
        pool.allocate(4)
    assert pool.free_count == 3


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (160, 10)])
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert BlockPool(1).blocks_for(tokens) == blocks


def test_a_shared_block_is_free_only_after_its_last_owner_releases_it() -> None:
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.share(table)
    assert pool.reference_count(table[0]) == 2
    pool.release(table)
    assert pool.used_count == 1
    pool.release(table)
    assert pool.used_count == 0


def test_double_release_is_a_programming_error_and_changes_nothing() -> None:
    pool = BlockPool(4)
    table = pool.allocate(2)
    with pytest.raises(RuntimeError, match="more often than they are owned"):
        pool.release([table[0], table[1], table[1]])
    pool.check_integrity([table])
    pool.release(table)
    with pytest.raises(RuntimeError, match="more often than they are owned"):
        pool.release(table)


def test_free_and_unknown_blocks_cannot_be_shared_or_released() -> None:
    pool = BlockPool(2)
    with pytest.raises(RuntimeError, match="they are free"):
        pool.share([1])
    for block in (2, -1):
        with pytest.raises(RuntimeError, match="not in the pool of 2"):
            pool.share([block])
        with pytest.raises(RuntimeError, match="not in the pool of 2"):
            pool.release([block])


@pytest.mark.parametrize(("blocks", "tokens"), [(-1, 16), (4, 0)])
def test_impossible_pools_are_refused(blocks: int, tokens: int) -> None:
    with pytest.raises(ValueError, match="not possible"):
        BlockPool(blocks, tokens)


def test_negative_counts_are_refused() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="cannot allocate -1"):
        pool.allocate(-1)
    with pytest.raises(ValueError, match="-1 tokens"):
        pool.blocks_for(-1)


def test_integrity_names_each_kind_of_fault() -> None:
    pool = BlockPool(6)
    leaked, doubly, twice = pool.allocate(3)
    with pytest.raises(BlockIntegrityError) as caught:
        pool.check_integrity([[doubly, 5], [doubly, 9], [twice, twice]])
    message = str(caught.value)
    assert f"blocks [{leaked}] are leaked" in message
    assert f"blocks [{doubly}, {twice}] are doubly owned" in message
    assert f"table 2 holds blocks [{twice}] twice" in message
    assert "blocks [5] are free yet owned" in message
    assert "blocks [9] are owned but not in the pool" in message


class PoolMachine(RuleBasedStateMachine):
    """Random allocation, sharing and release; a plain list of tables is the model."""

    tables: Bundle[list[int]] = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, block_tokens=4)
        self.live: list[list[int]] = []

    @rule(target=tables, count=st.integers(0, 6))
    def allocate(self, count: int) -> list[int]:
        if count > self.pool.free_count:
            with pytest.raises(CapacityError):
                self.pool.allocate(count)
            count = 0
        table = self.pool.allocate(count)
        self.live.append(table)
        return table

    @rule(target=tables, table=tables, share=st.floats(0, 1))
    def share_prefix(self, table: list[int], share: float) -> list[int]:
        prefix = table[: round(share * len(table))]
        self.pool.share(prefix)
        self.live.append(prefix)
        return prefix

    @rule(table=consumes(tables))
    def release(self, table: list[int]) -> None:
        self.live = [other for other in self.live if other is not table]
        self.pool.release(table)

    @rule(block=st.integers(0, 11))
    @precondition(lambda self: self.pool.free_count)
    def release_of_a_free_block_is_refused(self, block: int) -> None:
        if not self.pool.reference_count(block):
            with pytest.raises(RuntimeError):
                self.pool.release([block])

    @invariant()
    def counts_agree_with_the_tables(self) -> None:
        self.pool.check_integrity(self.live)
        assert self.pool.used_count == len({block for table in self.live for block in table})


TestPoolMachine = PoolMachine.TestCase
