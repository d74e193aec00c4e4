"""The budget holds: real processes with the smallest budgets that they accept, under a load of everything at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.budget import Peak, Trial, measure
from tests.conftest import Smollm2Pack, TinyPack

MODEL: dict[str, Any] = {"hidden": 256, "intermediate": 1536, "layers": 12, "heads": 8, "vocab": 4096, "context": 1024}


def check(peaks: list[Peak]) -> None:
    assert [peak.stage for peak in peaks] == ["prefill", "decode"]
    for peak in peaks:
        assert peak.resident_layers < peak.layers, "the smallest budget streams"
        assert peak.holds, f"{peak.stage}: {peak.peak_rss_bytes:,} of {peak.budget_bytes:,} bytes"


@pytest.mark.parametrize(("scheme", "draft", "draft_scheme"), [("fp32", "ngram", None), ("bf16", "self", "int8")])
def test_both_processes_stay_within_the_smallest_budget(
    tiny_pack: TinyPack, scheme: str, draft: str, draft_scheme: str | None
) -> None:
    draft_pack = tiny_pack(draft_scheme, **MODEL) if draft_scheme else None
    target = tiny_pack(scheme, **MODEL)
    check(measure(Trial(pack=target, draft=draft, draft_pack=draft_pack, requests=16, capped=False)))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("scheme", ["bf16", "int8", "nf4"])
def test_both_processes_of_the_real_model_stay_within_the_smallest_budget(
    smollm2_pack: Smollm2Pack, scheme: str
) -> None:
    check(measure(Trial(pack=smollm2_pack(scheme), capped=False)))


def test_a_draft_with_keys_and_values_of_its_own_stays_within_it_too(tiny_pack: TinyPack) -> None:
    draft_pack: Path = tiny_pack("bf16", **(MODEL | {"layers": 2, "seed": 1}))
    check(measure(Trial(pack=tiny_pack("int8", **MODEL), draft="model", draft_pack=draft_pack, capped=False)))
