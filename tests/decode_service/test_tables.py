"""Block tables: what sequences share, what they may still grow to, and what is refused or found out."""

from __future__ import annotations

from typing import Any

import pytest

from decode_service.sequence import Sequence
from decode_service.tables import BlockTables
from shared.blocks import BlockIntegrityError, BlockPool
from shared.errors import InvalidRequestError
from tests.decode_service.simulated import sequence_of

BLOCKS, BLOCK_TOKENS = 10, 4


def make(**options: Any) -> BlockTables:
    return BlockTables(BlockPool(BLOCKS, BLOCK_TOKENS), "digest", **options)


def make_sequence(prompt: list[int], max_tokens: int = 4, **fields: Any) -> Sequence:
    return sequence_of(prompt, max_tokens, None, lambda: None, **fields)  # type: ignore[arg-type]  # nobody reads


def admitted(tables: BlockTables, prompt: list[int], max_tokens: int = 4, **fields: Any) -> Sequence:
    sequence = make_sequence(prompt, max_tokens, **fields)
    assert tables.admit(sequence, overcommits=True)
    return sequence


def compute(tables: BlockTables, sequence: Sequence, generated: list[int], drafted: int = 0) -> None:
    """Passes that leave out nothing but the last token."""
    sequence.tokens += generated
    assert tables.cover(sequence, len(sequence.tokens))
    sequence.kv_length = len(sequence.tokens) - 1
    sequence.draft_kv_length = drafted
    tables.filled(sequence)


def test_a_prompts_whole_blocks_are_found_while_it_runs_and_its_answers_once_it_has_ended() -> None:
    tables = make()
    first = admitted(tables, list(range(10)), 8)
    compute(tables, first, [50, 51, 52, 53])
    running = admitted(tables, [*range(10), 50, 51, 9])
    assert (running.blocks[:2], running.kv_length) == (first.blocks[:2], 8)
    assert running.blocks[2] != first.blocks[2], "which holds part of the answer"
    blocks = first.blocks
    tables.release(first)
    after = admitted(tables, [*range(10), 50, 51, 52, 53, 54])
    assert (after.blocks[:3], after.kv_length) == (blocks[:3], 12)
    assert tables.held_count == 2 + 2 + 2, "the shared ones count once"
    tables.check_integrity()


def test_only_what_is_in_a_block_to_its_end_is_found() -> None:
    tables = make()
    sequence = admitted(tables, list(range(8)), 8)
    sequence.kv_length = 7
    tables.filled(sequence)
    assert admitted(tables, [*range(8), 9]).kv_length == 4


def test_a_draft_goes_on_where_it_has_seen_a_shared_block_and_not_beyond() -> None:
    tables = make()
    compute(tables, admitted(tables, list(range(12))), [50], drafted=9)
    assert admitted(tables, [*range(12), 1]).draft_kv_length == 8
    fresh = make()
    first = admitted(fresh, list(range(12)))
    compute(fresh, first, [50], drafted=12)
    fresh.release(first)
    other = admitted(fresh, [99] * 33)  # takes the blocks away
    compute(fresh, other, [50], drafted=0)
    fresh.release(other)
    again = admitted(fresh, [99] * 33)
    assert (again.kv_length, again.draft_kv_length) == (32, 0)
    fresh.check_integrity()


def test_drafts_that_were_rejected_do_not_count_as_seen() -> None:
    tables = make()
    sequence = admitted(tables, list(range(6)), 12)
    compute(tables, sequence, [50], drafted=15)
    assert sequence.draft_kv_length == 6


def test_nothing_is_found_of_a_sequence_that_failed_or_where_sharing_is_off() -> None:
    tables = make()
    failed = admitted(tables, list(range(8)))
    compute(tables, failed, [50])
    tables.release(failed, forget=True)
    assert admitted(tables, list(range(8))).kv_length == 0
    alone = make(shares_prefixes=False)
    compute(alone, admitted(alone, list(range(8))), [50])
    assert admitted(alone, list(range(8))).kv_length == 0
    assert alone.cached_count == 0


def test_without_over_commit_whoever_is_admitted_can_grow_up() -> None:
    tables = make()
    first = admitted(tables, [1], 19)
    second = make_sequence([2], 20)
    assert not tables.admit(second, overcommits=True)
    assert tables.admit(make_sequence([2], 19), overcommits=True)
    assert tables.held_count == 2
    assert tables.cover(first, 20)


def test_an_over_commit_admits_more_and_is_not_used_where_it_is_not_asked_for() -> None:
    tables = make(overcommit=1.5)
    admitted(tables, [1], 23)
    assert not tables.admit(make_sequence([2], 23), overcommits=False)
    assert tables.admit(make_sequence([2], 23), overcommits=True)
    assert not tables.admit(make_sequence([3], 23), overcommits=True)


def test_nobody_is_admitted_to_be_preempted_at_once() -> None:
    tables = make(overcommit=10.0)
    admitted(tables, [1] * 16, 8)
    assert not tables.admit(make_sequence([2] * 20, 8), overcommits=True), "one block is left for two that grow"
    assert tables.admit(make_sequence([2] * 16, 8), overcommits=True)


def test_blocks_that_are_shared_are_promised_once() -> None:
    tables = make()
    compute(tables, admitted(tables, list(range(17)), 3), [50])
    for _ in range(5):
        assert tables.admit(make_sequence([*range(17)], 3), overcommits=True)
    assert not tables.admit(make_sequence([*range(17)], 3), overcommits=True)
    assert tables.held_count == 4 + 6


def test_the_fewest_victims_are_named_or_none_if_all_would_not_do() -> None:
    tables = make()
    holders = [admitted(tables, [number] * 11, 1) for number in range(3)]
    wanting = make_sequence([9] * 15, 1)
    assert tables.fewest_victims(wanting, holders, overcommits=True) == holders[:1]
    large = make_sequence([9] * 31, 1)
    assert tables.fewest_victims(large, holders, overcommits=True) == holders[:3]
    assert tables.fewest_victims(large, holders[:2], overcommits=True) is None
    tables.check_integrity()


def test_blocks_that_others_hold_too_are_not_won_by_a_victim() -> None:
    tables = make()
    first = admitted(tables, list(range(17)), 3)
    compute(tables, first, [50])
    sharing = admitted(tables, list(range(17)), 3)
    assert tables.held_count == 6
    assert tables.fewest_victims(make_sequence([9] * 19, 1), [sharing], overcommits=True) == [sharing]
    assert tables.fewest_victims(make_sequence([9] * 23, 1), [sharing], overcommits=True) is None
    assert tables.fewest_victims(make_sequence([9] * 23, 1), [sharing, first], overcommits=True) == [sharing, first]


def test_room_for_drafts_is_given_where_there_is_any_and_taken_back() -> None:
    tables = make(overcommit=4.0)
    first, second = admitted(tables, [1] * 4, 30), admitted(tables, [2] * 24, 16)
    tables.stretch(first, 20)
    assert len(first.blocks) == 4, "one short of what was asked"
    assert not tables.cover(second, 25)
    tables.trim(first)
    assert len(first.blocks) == 1
    assert tables.cover(second, 25)
    tables.check_integrity()


def test_what_could_never_fit_is_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidRequestError, match="make 41 tokens, this server's KV memory holds 40"):
        make().require_possible(make_sequence([1], 40))


def test_a_shared_block_that_could_be_written_is_found_out() -> None:
    tables = make()
    first = admitted(tables, list(range(8)))
    compute(tables, first, [50])
    tables.check_integrity()
    first.kv_length = 3
    with pytest.raises(BlockIntegrityError, match="are shared and may yet be written"):
        tables.check_integrity()


def test_a_block_that_nobody_counted_is_found_out() -> None:
    tables = make()
    sequence = admitted(tables, list(range(8)))
    sequence.blocks.pop()
    with pytest.raises(BlockIntegrityError, match="leaked"):
        tables.check_integrity()
