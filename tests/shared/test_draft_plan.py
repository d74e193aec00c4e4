"""`auto` keeps the draft's pack where that is worth its memory; what was asked for by name is never left out."""

from __future__ import annotations

import pytest

from shared.demand import DecodeSettings, decode_demand
from shared.draft_pack import DraftPack
from shared.draft_plan import plan_decode
from shared.errors import BudgetError
from shared.pack.reader import Pack
from shared.streaming.plan import MemoryPlan
from tests.conftest import TinyPack

SETTINGS = DecodeSettings(context_length=512, batch=2, draft_length=None, receives=False, prompt_tokens=64)
RUNTIME_BYTES = 100 << 20


def test_auto_leaves_a_copy_out_exactly_where_the_target_has_more_of_the_memory(tiny_pack: TinyPack) -> None:
    shape = {"hidden": 256, "intermediate": 1024, "layers": 6}
    target = Pack.open(tiny_pack("bf16", **shape))
    copy = DraftPack.open("auto", tiny_pack("int8", **shape), target)
    assert copy is not None

    def planned(budget_bytes: int, draft: str = "auto") -> tuple[MemoryPlan, DraftPack | None]:
        return plan_decode(budget_bytes, target, draft, copy, SETTINGS, RUNTIME_BYTES)

    least, with_copy = (decode_demand(target, draft, SETTINGS, RUNTIME_BYTES).least_bytes for draft in (None, copy))
    assert planned(least) == (planned(least)[0], None), "the copy does not fit"
    assert planned(with_copy)[1] is copy, "the target is streamed either way"
    sizes = range(with_copy, with_copy + 4 * copy.weight_bytes, 1 << 18)
    kept = [planned(size)[1] is copy for size in sizes]
    stays = [planned(size, "self")[0].everything_stays for size in sizes]
    could = [plan_decode(size, target, "none", None, SETTINGS, RUNTIME_BYTES)[0].everything_stays for size in sizes]
    assert kept == [with_it or not without for with_it, without in zip(stays, could, strict=True)]
    assert {True, False} == set(kept)
    assert stays[-1]
    assert all(planned(size, "self")[1] is copy for size in sizes)
    with pytest.raises(BudgetError):
        planned(with_copy - 1, "self")
    with pytest.raises(BudgetError):
        planned(least - 1)
