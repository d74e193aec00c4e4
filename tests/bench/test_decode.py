"""The benchmark of decode: what its limits are made of, and that an interrupted run keeps what it has."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.decode_limits import Bandwidths, Done, Products, limit
from bench.decode_report import COLUMNS, category_rows, rows
from bench.decode_result import PEER, Result
from bench.prompts import exact_prompts
from shared.pack.reader import Pack
from tests.conftest import TinyPack

PRODUCTS = Products(layers=4, layer_s={1: 0.01, 8: 0.01, 512: 0.4}, output_s={1: 0.002, 8: 0.004})
FAST = Bandwidths(disk=1e18, memory=1e18)
DONE = Done(tokens=64, draft_tokens=0, prompt_tokens=0, passes=64, streamed_bytes_per_pass=8e6, pass_prompt_tokens=512)


@pytest.fixture
def pack(tiny_pack: TinyPack) -> Pack:
    return Pack.open(tiny_pack("bf16"))


def test_what_is_streamed_is_read_in_every_pass(pack: Pack) -> None:
    slow = limit(pack, DONE, Bandwidths(disk=8e6, memory=1e18), PRODUCTS)
    assert (slow.least_s, slow.bound_by) == (64.0, "reading")
    drafted = replace(DONE, passes=16, draft_tokens=60)
    assert limit(pack, drafted, Bandwidths(disk=8e6, memory=1e18), PRODUCTS).least_s == 16.0


def test_layers_that_stay_are_read_from_memory_in_every_pass(pack: Pack) -> None:
    layers_bytes = pack.spec.layers * pack.layer_layout.data_bytes
    found = limit(pack, replace(DONE, streamed_bytes_per_pass=0.0), Bandwidths(1e18, layers_bytes), PRODUCTS)
    assert found.least_s == 64.0


def test_tokens_are_computed_at_the_rate_of_as_many_rows_as_their_passes_have(pack: Pack) -> None:
    one = limit(pack, DONE, FAST, PRODUCTS)
    assert one.least_s == pytest.approx(64 * (4 * 0.01 + 0.002))
    assert one.bound_by == "arithmetic"
    eight = limit(pack, replace(DONE, passes=8), FAST, PRODUCTS)
    assert eight.least_s == pytest.approx(8 * (4 * 0.01 + 0.004))
    rejected = limit(pack, replace(DONE, passes=16, draft_tokens=64), FAST, PRODUCTS)
    assert rejected.least_s == pytest.approx(8 * (4 * 0.01 + 0.004)), "8 rows a pass, half of them for nothing"


def test_prompts_come_on_top_in_as_few_passes_as_they_fit_in(pack: Pack) -> None:
    prompts = replace(DONE, prompt_tokens=2048, passes=68)
    computing = limit(pack, prompts, FAST, PRODUCTS)
    assert computing.least_s == pytest.approx(64 * (4 * 0.01 + 0.002) + 4 * 4 * 0.4)
    reading = limit(pack, prompts, Bandwidths(disk=1e6, memory=1e18), PRODUCTS)
    assert reading.least_s == 68 * 8.0


def test_prompts_of_a_length_have_it_and_differ(pack: Pack) -> None:
    prompts = exact_prompts(pack, 70)
    assert {len(prompt.token_ids) for prompt in prompts} == {70}
    assert len({prompt.token_ids for prompt in prompts}) > 1


def test_each_line_has_a_cell_for_each_column_and_ratios_are_those_of_rounds() -> None:
    plain = Result(
        memory="1GiB",
        batch=1,
        draft="none",
        requests=1,
        tokens=10,
        wall_s=2.0,
        decode_tokens_per_s=5.0,
        tokens_per_pass=1.0,
        passes=10,
        streamed_bytes_per_pass=0.0,
        disk_bytes_per_s=1e9,
        limit_tokens_per_s=10.0,
        peak_rss_bytes=1 << 20,
        resident_layers=4,
        equal_texts=1,
        draft_tokens={},
        accepted_tokens={},
    )
    peer = replace(plain, draft=PEER, wall_s=4.0)
    fast = replace(plain, draft="ngram", wall_s=1.0)
    slower = [replace(result, wall_s=3 * result.wall_s) for result in (plain, peer, fast)]
    lines = {line[2]: line for line in rows([plain, peer, fast, *slower])}
    assert {len(line) for line in lines.values()} == {len(COLUMNS)}
    assert category_rows([replace(fast, draft_tokens={"report": 4}, accepted_tokens={"report": 1}), peer]) == [
        ["report", "25%"]
    ]
    over_none, over_peer = COLUMNS.index("× none"), COLUMNS.index(f"× {PEER}")
    assert (lines["ngram"][over_none], lines["ngram"][over_peer]) == ("2.00", "4.00")
    assert lines["none"][over_peer] == "2.00"


def test_results_that_were_kept_before_can_still_be_shown() -> None:
    kept = json.loads((Path(__file__).parents[2] / "bench/results/decode-w1-bf16.json").read_text())["results"]
    assert rows([Result(**result) for result in kept])


@pytest.mark.slow
def test_every_case_is_kept_and_what_they_answer_is_the_same(tiny_pack: TinyPack, tmp_path: Path) -> None:
    found = tmp_path / "decode.json"
    options = ["--memory", "1GiB", "--drafts", "none,ngram", "--batches", "1,2", "--rounds", "1", "--max-tokens", "6"]
    options += ["--prompt-tokens", "40", "--context-length", "128", "--json", str(found)]
    command = [sys.executable, "-m", "bench.decode", str(tiny_pack("fp32"))]
    run = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    results = json.loads(found.read_text())["results"]
    cases = [(result["batch"], result["draft"]) for result in results]
    assert cases == [(1, "none"), (1, "ngram"), (2, "none"), (2, "ngram")]
    assert [result["prompt_tokens"] for result in results] == [40, 40, 80, 80]
    assert all(result["equal_texts"] == result["requests"] for result in results)
    assert "acceptance by category" in run.stdout
    found.unlink()
    options[options.index("none,ngram")] = "none,nonsense"
    assert subprocess.run([*command, *options], capture_output=True, check=False).returncode
    (kept,) = json.loads(found.read_text())["results"]
    assert kept["draft"] == "none"
