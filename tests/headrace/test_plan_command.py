"""`headrace plan`: the table and the forecast of any stage, and a refusal that names what works."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from headrace.cli import _device_plan, app
from headrace.cli._planning import Planning
from shared.errors import BudgetError, ConfigurationError
from shared.pack.reader import Pack
from shared.quant import candidates
from shared.quant.candidates import DECODE_ROWS, PROMPT_ROWS
from tests.conftest import FamilyPack, TinyPack


@pytest.fixture(scope="module", autouse=True)
def one_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def plan(pack: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["plan", str(pack), *options])


def test_it_shows_where_the_memory_goes_what_fits_and_how_fast_it_goes(tiny_pack: TinyPack) -> None:
    result = plan(tiny_pack("bf16"), "--memory", "2GiB")
    assert result.exit_code == 0, result.output
    rows = ("runtime", "outer weights", "resident layers (4 of 4)", "slots (0)", "KV blocks", "workspace")
    rows += ("streamed from disk", "tokens each", "Forecast, seconds", "bound by", "Measured: disk", "chance of 0.3")
    assert [row for row in rows if row not in result.output] == []


@pytest.mark.parametrize("stage", ["prefill", "decode", "colocated"])
def test_as_json_it_has_the_same_for_every_stage(tiny_pack: TinyPack, stage: str) -> None:
    result = plan(tiny_pack("bf16"), "--memory", "2GiB", "--stage", stage, "--draft", "none", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert sum(part["bytes"] for part in found["parts"]) == found["planned_bytes"] <= found["budget_bytes"] == 2 << 30
    assert found["resident_layers"] == [0, 1, 2, 3]
    assert all(forecast["tokens_per_s"] > 0 for forecast in found["forecasts"])
    fit = [entry["fit"] for entry in found["sequences"]]
    assert fit == sorted(fit, reverse=True)
    assert bool(fit) == (stage != "prefill")
    assert found["draft_length"] == (None if stage == "prefill" else 0)


def test_experts_are_planned_apart_from_layers(family_pack: FamilyPack) -> None:
    pack = family_pack("bf16", "OLMoE")
    found = json.loads(plan(pack, "--memory", "2GiB", "--json").stdout)
    assert (found["experts"], found["expert_slots"], found["experts_kept"]) == (32, 32, 1.0)
    parts = {part["name"]: part["bytes"] for part in found["parts"]}
    assert parts["experts (32 of 32)"] == 32 * Pack.open(pack).expert_bytes
    shown = plan(pack, "--memory", "2GiB").output
    assert [row for row in ("and experts, at most (32 of 32 stay)", "expert is as likely") if row not in shown] == []


def test_prefill_keeps_the_prefixes_that_it_is_asked_to_keep(tiny_pack: TinyPack) -> None:
    options = ("--memory", "2GiB", "--stage", "prefill", "--json")
    blocks = {
        size: json.loads(plan(tiny_pack("bf16"), *options, *(["--prefix-cache", size] if size else [])).stdout)[
            "kv_blocks"
        ]
        for size in ("", "0", "1MiB")
    }
    assert blocks[""] > blocks["1MiB"] > blocks["0"] == 0


def test_drafts_cost_memory_and_time_and_yield_what_acceptance_says(tiny_pack: TinyPack) -> None:
    options = ("--memory", "2GiB", "--draft-length", "3", "--acceptance", "0.5", "--json")
    copy = ("--draft", "self", "--draft-pack", str(tiny_pack("int8")))
    found = json.loads(plan(tiny_pack("bf16"), *options, *copy).stdout)
    assert next(part["bytes"] for part in found["parts"] if part["name"] == "draft") > 0
    assert [forecast["tokens"] for forecast in found["forecasts"]] == [1.875 * batch for batch in (1, 8, 32)]
    assert all(forecast["draft_s"] > 0 for forecast in found["forecasts"])


def test_a_draft_pack_that_the_service_would_leave_out_is_not_planned(tiny_pack: TinyPack) -> None:
    shape = {"layers": 32, "hidden": 256, "intermediate": 1024}
    pack, short = tiny_pack("bf16", **shape), ("--context-length", "64", "--batch", "1")
    refused = plan(pack, "--memory", "1MiB", "--draft", "none", *short)
    smallest = re.search(r"the smallest that works is (\d+) MiB", str(refused.exception))
    assert smallest
    # Layers of 64 MiB, and a copy of half that: room for the model, and not for both.
    copy = ("--memory", f"{int(smallest[1]) + 76}MiB", "--draft-pack", str(tiny_pack("int8", **shape)))
    found = json.loads(plan(pack, *copy, *short, "--json").stdout)
    assert len(found["resident_layers"]) == 32
    assert {part["name"]: part["bytes"] for part in found["parts"]}["draft"] == 0
    assert found["assumed_acceptance"] == 0.3


def test_too_small_a_budget_is_refused_with_the_smallest_that_works(tiny_pack: TinyPack) -> None:
    refused = plan(tiny_pack("bf16"), "--memory", "1MiB")
    assert isinstance(refused.exception, BudgetError)
    smallest = re.search(r"the smallest that works is (\d+) MiB", str(refused.exception))
    assert smallest
    assert plan(tiny_pack("bf16"), "--memory", f"{smallest[1]}MiB").exit_code == 0
    less = plan(tiny_pack("bf16"), "--memory", f"{int(smallest[1]) - 6}MiB")
    assert isinstance(less.exception, BudgetError)


def test_what_the_service_refuses_the_plan_refuses(tiny_pack: TinyPack, tmp_path: Path) -> None:
    for options in (["--draft", "self"], ["--draft", "self", "--draft-pack", str(tiny_pack("fp32", layers=2))]):
        refused = plan(tiny_pack("fp32"), "--memory", "2GiB", *options)
        assert isinstance(refused.exception, ConfigurationError)
    assert isinstance(plan(tmp_path, "--memory", "2GiB").exception, ConfigurationError)


def test_it_shows_what_a_shift_brings_at_what_cost_and_recommends_a_fleet(tiny_pack: TinyPack) -> None:
    report = ("--prompt-tokens", "100", "--output-tokens", "40", "--shared-tokens", "50", "--draft", "none")
    job = (*report, "--reports", "100000", "--shift", "1h", "--price-per-hour", "0.5")
    shown = plan(tiny_pack("bf16"), "--memory", "2GiB", *job)
    assert shown.exit_code == 0, shown.output
    rows = (
        "48 of them shared",
        "colocated",
        "together",
        "apart",
        "A shift of 1 h",
        "100,000",
        "Recommended:",
    )
    assert [row for row in rows if row not in shown.output] == []
    found = json.loads(plan(tiny_pack("bf16"), "--memory", "2GiB", *job, "--json").stdout)["shift"]
    fleets = {fleet["arrangement"]: fleet for fleet in found["fleets"]}
    assert set(fleets) == {"colocated", "together", "apart"}
    assert found["recommended"] in fleets
    for fleet in fleets.values():
        assert fleet["reports_per_shift"] >= 100_000
        cost = fleet["machines"] * 0.5 * fleet["report_s"] / 3600
        assert fleet["cost_of_report"] == pytest.approx(cost)


def test_replicas_that_are_asked_for_are_the_ones_that_are_shown(tiny_pack: TinyPack) -> None:
    job = ("--memory", "2GiB", "--prompt-tokens", "100", "--output-tokens", "40", "--draft", "none", "--json")
    apart = json.loads(plan(tiny_pack("bf16"), *job, "--prefills", "2", "--decodes", "3").stdout)["shift"]["fleets"]
    assert [(fleet["arrangement"], fleet["machines"]) for fleet in apart] == [("apart", 5)]
    alone = json.loads(plan(tiny_pack("bf16"), *job, "--prefills", "0", "--decodes", "3").stdout)["shift"]["fleets"]
    assert [(fleet["arrangement"], fleet["machines"]) for fleet in alone] == [("colocated", 3)]


@pytest.mark.parametrize(
    "options",
    [
        ("--reports", "100"),
        ("--prompt-tokens", "100"),
        ("--prompt-tokens", "100", "--output-tokens", "20", "--shared-tokens", "100"),
        ("--prompt-tokens", "100", "--output-tokens", "20", "--decodes", "2"),
        ("--prompt-tokens", "500", "--output-tokens", "20"),
        ("--prompt-tokens", "100", "--output-tokens", "20", "--shift", "0s"),
        ("--prefills", "1", "--decodes", "2"),
    ],
    ids=" ".join,
)
def test_jobs_that_make_no_sense_are_refused(tiny_pack: TinyPack, options: tuple[str, ...]) -> None:
    refused = plan(tiny_pack("bf16"), "--memory", "2GiB", "--draft", "none", *options)
    assert isinstance(refused.exception, ConfigurationError)


def without_draft(pack: Path) -> Planning:
    return Planning(
        pack=Pack.open(pack),
        draft="none",
        draft_path=None,
        draft_length=None,
        given_acceptance=None,
        batch=4,
        context_length=None,
        prefix_cache=None,
        again=False,
    )


@pytest.mark.parametrize("stage", ["prefill", "decode", "colocated"])
def test_a_process_with_a_device_has_two_budgets(
    tiny_pack: TinyPack, stage: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain arithmetic: no device is needed, and none was there when it was written."""
    planning = without_draft(tiny_pack("bf16"))
    found = _device_plan.tiered(planning, stage, 2 << 30, 1 << 30, 640 << 20)
    described = _device_plan.to_json(found)
    assert described["device_memory"]["planned_bytes"] <= described["device_memory"]["budget_bytes"] == 1 << 30
    assert described["host_memory"]["planned_bytes"] <= described["host_memory"]["budget_bytes"] == 2 << 30
    assert described["residency"]["resident"] == [0, 1, 2, 3]
    json.dumps(described)
    _device_plan.show(found)
    shown = capsys.readouterr().out
    assert [text for text in ("Device memory", "Host memory", "no GPU") if text not in shown] == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--device", "gpu"), "'gpu' is not a device; write cpu, cuda or cuda:N"),
        (("--device-memory", "1GiB"), "--device-memory is for a CUDA device"),
        (("--device", "cuda", "--prompt-tokens", "9", "--output-tokens", "9"), "a shift is forecast for the CPU only"),
    ],
)
def test_a_device_that_cannot_be_planned_for_is_told(
    tiny_pack: TinyPack, arguments: tuple[str, ...], says: str
) -> None:
    result = plan(tiny_pack("bf16"), "--memory", "2GiB", *arguments)
    assert isinstance(result.exception, ConfigurationError)
    assert says in str(result.exception)


def test_each_stage_is_forecast_with_the_products_that_it_takes(
    tiny_pack: TinyPack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for rows, name in ((DECODE_ROWS, "integers"), (PROMPT_ROWS, "widened")):
        candidates.forget()
        known = set(tmp_path.glob("headrace/products-*"))
        candidates.ranked("int8", rows)
        (file,) = set(tmp_path.glob("headrace/products-*")) - known
        file.write_text(json.dumps([name]))
    candidates.forget()
    planning = without_draft(tiny_pack("int8"))
    outlooks = [planning.outlook(stage).model for stage in ("prefill", "decode")]
    assert len(list(tmp_path.glob("headrace/calibration-*"))) == 2
    assert outlooks == [planning.prefill_model, planning.model]
    candidates.forget()
