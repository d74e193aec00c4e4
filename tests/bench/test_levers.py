"""What `bench.levers` makes of its rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.levers import naive_report_s, remarks, table_rows
from bench.levers_choice import Choice
from bench.levers_rows import ALL, CASES, NAIVE, Levers, Result, Shape, Table, equal_texts, mean_equal, service_options

CHOICE = Choice(packs={"bf16": "a", "int8": "b"}, scheme="int8", batch=32, forecasts={"bf16": 2.0, "int8": 1.0})
ROW = Result(
    setting="fits",
    budget="4GiB",
    shape="300:120",
    case="naive",
    scheme="bf16",
    batch=1,
    reports=4,
    prompt_tokens=1200,
    output_tokens=480,
    draft_tokens=0,
    accepted_tokens=0,
    wall_s=40.0,
    processor_s=48.0,
    peak_rss_bytes=600 << 20,
    resident_layers=30,
    equal_tokens=1.0,
    equal_texts=4,
    perplexity_ratio=1.0,
)


def test_naive_pulls_no_lever_and_every_row_but_the_others_adds_one_or_leaves_one_out() -> None:
    assert next(iter(CASES)) == "naive"
    assert CASES["naive"] == CASES["naive, again"] == NAIVE == Levers()
    pulled = [sum(vars(levers).values()) for levers in CASES.values()]
    assert pulled == [0, 1, 2, 3, 4, 3, 3, 3, 0]


def test_a_naive_service_shares_nothing_drafts_nothing_and_reserves_all_that_a_request_may_need() -> None:
    table = Table("fits", "4GiB", Shape(300, 120), 720, [], 3, CHOICE, "copy")
    naive = " ".join(service_options(table, NAIVE, 1))
    assert naive == "--batch 1 --context-length 720 --share-prefixes off --overcommit 1.0 --draft none"
    every = " ".join(service_options(table, ALL, 32))
    assert every == "--batch 32 --context-length 720 --share-prefixes on --draft auto --draft-pack copy"


def test_rows_are_compared_with_the_mean_of_the_naive_ones_and_a_machine_that_changed_is_told() -> None:
    every = replace(ROW, case="+ KV management: all", scheme="int8", reports=32, output_tokens=3840, wall_s=40.0)
    again = replace(ROW, case="naive, again", wall_s=60.0)
    results = [ROW, every, again]
    assert naive_report_s(results) == pytest.approx(12.5)
    assert table_rows(results, price_per_hour=0.36)[1][4:11] == [
        "96.0",
        "12.5",
        "600",
        "30",
        "23,040",
        "0.125",
        "10.00",
    ]
    told = list(remarks(results, CHOICE))
    assert "int8" in told[0]
    assert "The machine changed" in told[1]
    assert len(list(remarks([ROW, every], CHOICE))) == 1


def test_equal_tokens_count_up_to_the_first_difference() -> None:
    assert mean_equal([[1, 2, 9, 4], [1, 2, 3, 4]], [[1, 2, 3, 4], [1, 2, 3, 4]]) == pytest.approx(0.75)
    assert equal_texts([[1, 2], [1, 3]], [[1, 2], [1, 2]]) == 1
