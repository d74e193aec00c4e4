"""The handoff: what was cut into frames arrives whole, and anything else is an error, never output."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import DataLossError, ModelMismatchError
from shared.kv.handoff import (
    FRAME_BYTES,
    Frame,
    HandoffReceiver,
    KvLayout,
    PrefillOutcome,
    checksum,
    frames_of_layer,
    prompt_tokens_error,
    tokens_per_frame,
)

LAYOUT = KvLayout("bf16", layers=3, kv_heads=256, head_dim=512)
"""Two tokens fill a frame, so that short prompts make several."""
TOKENS = 5
HIDDEN_SIZE = 8


class Store:
    """Puts frames together again, each layer's keys and values, refusing holes."""

    def __init__(self, layout: KvLayout) -> None:
        self._token_bytes = layout.token_bytes
        self.layers: dict[int, tuple[bytes, bytes]] = {}

    def __call__(self, layer: int, first_token: int, keys: bytes, values: bytes) -> None:
        old_keys, old_values = self.layers.get(layer, (b"", b""))
        assert len(old_keys) == len(old_values) == first_token * self._token_bytes
        self.layers[layer] = (old_keys + keys, old_values + values)


def content(layout: KvLayout, tokens: int) -> list[tuple[bytes, bytes]]:
    """Keys and values of every layer, all different."""
    size = tokens * layout.token_bytes
    return [(bytes([2 * layer]) * size, bytes([2 * layer + 1]) * size) for layer in range(layout.layers)]


def frames_of(layout: KvLayout, tokens: int) -> list[Frame]:
    """All frames of a prompt."""
    frames: list[Frame] = []
    for layer, (keys, values) in enumerate(content(layout, tokens)):
        frames += frames_of_layer(layout, layer, len(frames), keys, values)
    return frames


def outcome(frame_count: int, hidden_bytes: int = 2 * HIDDEN_SIZE) -> PrefillOutcome:
    return PrefillOutcome(bytes(hidden_bytes), frame_count, 1.0, 2.0, 3, 4)


def receive(frames: Sequence[Frame], frame_count: int | None = None, tokens: int = TOKENS) -> Store:
    """Takes frames and the end of a handoff whose layout is `LAYOUT`."""
    store = Store(LAYOUT)
    receiver = HandoffReceiver(LAYOUT, tokens, store)
    for frame in frames:
        receiver.accept(frame)
    receiver.finish(outcome(len(frames) if frame_count is None else frame_count), HIDDEN_SIZE)
    return store


FRAMES = frames_of(LAYOUT, TOKENS)


@settings(deadline=None, max_examples=40)
@given(
    st.builds(
        KvLayout,
        dtype=st.sampled_from(["bf16", "fp32"]),
        layers=st.integers(1, 3),
        kv_heads=st.sampled_from([1, 3, 128]),
        head_dim=st.sampled_from([2, 64, 1024]),
    ),
    st.integers(1, 20),
)
def test_what_was_cut_into_frames_arrives_whole(layout: KvLayout, tokens: int) -> None:
    store = Store(layout)
    receiver = HandoffReceiver(layout, tokens, store)
    frames = frames_of(layout, tokens)
    for frame in frames:
        assert frame.size_bytes <= max(FRAME_BYTES, 2 * layout.token_bytes)
        receiver.accept(frame)
    receiver.finish(outcome(len(frames), HIDDEN_SIZE * {"bf16": 2, "fp32": 4}[layout.dtype]), HIDDEN_SIZE)
    assert [store.layers[layer] for layer in range(layout.layers)] == content(layout, tokens)


@given(st.integers(1, 400), st.integers(1, 64), st.integers(1, 256))
def test_frames_are_as_large_as_allowed_and_hold_at_least_a_token(layers: int, kv_heads: int, head_dim: int) -> None:
    layout = KvLayout("fp32", layers, kv_heads, head_dim)
    tokens = tokens_per_frame(layout)
    assert tokens == 1 or 2 * tokens * layout.token_bytes <= FRAME_BYTES
    assert 2 * (tokens + 1) * layout.token_bytes > FRAME_BYTES


def test_the_frames_of_these_tests_cover_several_per_layer() -> None:
    assert [(frame.layer, frame.first_token, frame.token_count) for frame in FRAMES[:4]] == [
        (0, 0, 2),
        (0, 2, 2),
        (0, 4, 1),
        (1, 0, 2),
    ]
    assert receive(FRAMES).layers == dict(enumerate(content(LAYOUT, TOKENS)))


@pytest.mark.parametrize("index", range(len(FRAMES) - 1))
def test_a_dropped_frame_is_refused_at_the_next_one(index: int) -> None:
    with pytest.raises(DataLossError, match="out of order"):
        receive(FRAMES[:index] + FRAMES[index + 1 :])


@pytest.mark.parametrize("index", range(len(FRAMES)))
def test_a_repeated_frame_is_refused(index: int) -> None:
    with pytest.raises(DataLossError, match="out of order"):
        receive(FRAMES[: index + 1] + FRAMES[index:])


@pytest.mark.parametrize("index", range(len(FRAMES) - 1))
def test_frames_that_change_places_are_refused(index: int) -> None:
    with pytest.raises(DataLossError, match="out of order"):
        receive([*FRAMES[:index], FRAMES[index + 1], FRAMES[index], *FRAMES[index + 2 :]])


@given(st.sampled_from(FRAMES), st.sampled_from(["keys", "values"]), st.data())
def test_a_flipped_bit_is_refused(frame: Frame, part: str, data: st.DataObject) -> None:
    changed = bytearray(getattr(frame, part))
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(DataLossError, match=f"frame {frame.sequence_number} does not match its checksum"):
        receive_instead(frame, **{part: bytes(changed)})


@pytest.mark.parametrize("frame", FRAMES)
def test_keys_and_values_that_change_places_are_refused(frame: Frame) -> None:
    with pytest.raises(DataLossError, match="checksum"):
        receive_instead(frame, keys=frame.values, values=frame.keys)


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("shift", [-1, 1, LAYOUT.layers])
@pytest.mark.parametrize("field", ["sequence_number", "layer", "first_token"])
def test_a_frame_that_names_another_place_is_refused(frame: Frame, field: str, shift: int) -> None:
    with pytest.raises(DataLossError, match="out of order"):
        receive_instead(frame, **{field: getattr(frame, field) + shift})


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("change", [-1, 1, 2**31])
def test_a_frame_that_names_another_number_of_tokens_is_refused(frame: Frame, change: int) -> None:
    count = frame.token_count + change
    with pytest.raises(DataLossError, match=f"frame {frame.sequence_number} has the wrong size for {count} tokens"):
        receive_instead(frame, token_count=count)


def test_more_tokens_than_the_prompt_has_are_refused() -> None:
    longer = frames_of(LAYOUT, TOKENS + 1)
    with pytest.raises(DataLossError, match="frame 2 has the wrong size for 2 tokens"):
        receive(longer)


def test_an_empty_frame_is_refused() -> None:
    with pytest.raises(DataLossError, match="frame 0 has the wrong size for 0 tokens"):
        receive([Frame(0, 0, 0, 0, b"", b"", checksum(b"", b""))])


def test_keys_without_as_many_values_are_refused() -> None:
    keys, values = FRAMES[0].keys, FRAMES[0].values[:-2]
    with pytest.raises(DataLossError, match="wrong size"):
        receive_instead(FRAMES[0], values=values, crc32=checksum(keys, values))


def test_a_layer_too_many_is_refused() -> None:
    extra = dataclasses.replace(FRAMES[0], sequence_number=len(FRAMES), layer=LAYOUT.layers)
    with pytest.raises(DataLossError, match="out of order"):
        receive([*FRAMES, extra])


@pytest.mark.parametrize("count", range(len(FRAMES)))
def test_an_end_before_all_frames_have_come_is_refused(count: int) -> None:
    for claimed in (count, len(FRAMES)):
        with pytest.raises(
            DataLossError, match=f"handoff ended after {count} of {claimed} frames, in layer {count // 3}"
        ):
            receive(FRAMES[:count], claimed)


def test_an_end_that_names_another_number_of_frames_is_refused() -> None:
    with pytest.raises(DataLossError, match="ended after 9 of 10 frames"):
        receive(FRAMES, len(FRAMES) + 1)


@pytest.mark.parametrize("hidden_bytes", [0, 2 * HIDDEN_SIZE - 1, 4 * HIDDEN_SIZE])
def test_final_features_of_another_size_are_refused(hidden_bytes: int) -> None:
    receiver = HandoffReceiver(LAYOUT, TOKENS, Store(LAYOUT))
    for frame in FRAMES:
        receiver.accept(frame)
    with pytest.raises(DataLossError, match=f"ended with {hidden_bytes} bytes of features, not {2 * HIDDEN_SIZE}"):
        receiver.finish(outcome(len(FRAMES), hidden_bytes), HIDDEN_SIZE)


@pytest.mark.parametrize("held", range(TOKENS))
def test_a_receiver_that_holds_the_beginning_takes_exactly_the_rest(held: int) -> None:
    frames: list[Frame] = []
    for layer, (keys, values) in enumerate(content(LAYOUT, TOKENS)):
        rest = slice(held * LAYOUT.token_bytes, None)
        frames += frames_of_layer(LAYOUT, layer, len(frames), keys[rest], values[rest], held)
    ranges: list[tuple[int, int, int]] = []
    for held_here in range(TOKENS):
        receiver = HandoffReceiver(
            LAYOUT, TOKENS, lambda layer, first, keys, _: ranges.append((layer, first, len(keys))), held_here
        )
        if held_here == held:
            for frame in frames:
                receiver.accept(frame)
            receiver.finish(outcome(len(frames)), HIDDEN_SIZE)
        else:
            with pytest.raises(DataLossError, match=rf"expected .* \(0, 0, {held_here}\), found \(0, 0, {held}\)"):
                receiver.accept(frames[0])
    assert ranges == [(f.layer, f.first_token, f.token_count * LAYOUT.token_bytes) for f in frames]
    assert {frame.first_token for frame in frames} == set(range(held, TOKENS, 2))


def test_nothing_of_a_bad_frame_is_stored() -> None:
    store = Store(LAYOUT)
    receiver = HandoffReceiver(LAYOUT, TOKENS, store)
    receiver.accept(FRAMES[0])
    stored = dict(store.layers)
    for bad in (FRAMES[0], FRAMES[2], dataclasses.replace(FRAMES[1], crc32=FRAMES[1].crc32 ^ 1)):
        with pytest.raises(DataLossError):
            receiver.accept(bad)
    assert store.layers == stored


@pytest.mark.parametrize("change", [{"dtype": "fp32"}, {"layers": 4}, {"kv_heads": 128}, {"head_dim": 64}])
def test_a_layout_that_differs_in_anything_is_refused_with_both(change: dict[str, Any]) -> None:
    LAYOUT.require(dataclasses.replace(LAYOUT), "the caller")
    with pytest.raises(ModelMismatchError, match=r"this side has KvLayout\(.*the caller KvLayout\(.*deploy one pack"):
        LAYOUT.require(dataclasses.replace(LAYOUT, **change), "the caller")


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ([], "the prompt is empty"),
        ([1] * 9, "the prompt has 9 tokens, the model's context holds 8"),
        ([1, 100, 2], "token id 100 is outside the vocabulary of 100"),
        ([0, 99] * 4, None),
    ],
)
def test_a_prompt_is_refused_for_what_is_wrong_with_it(tokens: list[int], error: str | None) -> None:
    found = prompt_tokens_error(tokens, vocab_size=100, context_length=8)
    assert found is None if error is None else found is not None and found.startswith(error)


def receive_instead(frame: Frame, **changes: Any) -> None:
    """Receives all frames, one of them changed."""
    receive([dataclasses.replace(f, **changes) if f is frame else f for f in FRAMES])
