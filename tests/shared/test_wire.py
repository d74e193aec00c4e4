"""Domain values survive the wire, and what this version does not know is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.v1 import kv_cache_pb2, prefill_pb2
from shared.errors import ModelMismatchError
from shared.kv.handoff import Frame, KvLayout, PrefillOutcome
from shared.wire import (
    frame_from_wire,
    frame_to_wire,
    layout_from_wire,
    layout_to_wire,
    outcome_from_wire,
    outcome_to_wire,
)

COUNTS = st.integers(0, 2**32 - 1)
TIMES_MS = st.floats(0, 1e9)

LAYOUTS = st.builds(KvLayout, st.sampled_from(["bf16", "fp32"]), COUNTS, COUNTS, COUNTS)
FRAMES = st.builds(Frame, COUNTS, COUNTS, COUNTS, COUNTS, st.binary(), st.binary(), COUNTS)
OUTCOMES = st.builds(PrefillOutcome, st.binary(), COUNTS, TIMES_MS, TIMES_MS, COUNTS, COUNTS)


@given(LAYOUTS)
def test_layouts_survive_the_wire(layout: KvLayout) -> None:
    data = layout_to_wire(layout).SerializeToString()
    assert layout_from_wire(kv_cache_pb2.KvLayout.FromString(data)) == layout


@given(FRAMES)
def test_frames_survive_the_wire(frame: Frame) -> None:
    message = prefill_pb2.PrefillResponse.FromString(frame_to_wire(frame).SerializeToString())
    assert message.WhichOneof("event") == "frame"
    assert frame_from_wire(message.frame) == frame


@given(OUTCOMES)
def test_outcomes_survive_the_wire(outcome: PrefillOutcome) -> None:
    message = prefill_pb2.PrefillResponse.FromString(outcome_to_wire(outcome).SerializeToString())
    assert message.WhichOneof("event") == "result"
    assert outcome_from_wire(message.result) == outcome
    assert math.isfinite(message.result.queue_ms)


@pytest.mark.parametrize("field", ["dtype", "order"])
@pytest.mark.parametrize("value", [0, 99])
def test_a_layout_of_unset_or_unknown_form_is_refused(field: str, value: int) -> None:
    message = layout_to_wire(KvLayout("bf16", 2, 3, 4))
    setattr(message, field, value)
    with pytest.raises(ModelMismatchError, match=rf"{field} {value}.*; this version knows dtypes \[1, 2\] and order 1"):
        layout_from_wire(message)


def test_an_absent_layout_is_refused() -> None:
    with pytest.raises(ModelMismatchError, match="dtype 0 and order 0"):
        layout_from_wire(prefill_pb2.PrefillRequest().kv_layout)
