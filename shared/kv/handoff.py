"""The handoff: a prompt's keys and values on their way from prefill to decode, frame by frame.

Plain values and bytes; `shared.wire` turns them into messages. The receiving side checks order, ranges, sizes and
checksums, so a mix-up is an error and never output.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from shared.errors import DataLossError, ModelMismatchError

FRAME_BYTES = 1 << 20
"""Most bytes of keys and values in one frame: far below gRPC's message limit of 4 MiB."""


@dataclass(frozen=True)
class KvLayout:
    """The form in which keys and values travel: [token, kv_head, head_dim], little-endian, layer by layer."""

    dtype: str
    """`bf16` or `fp32`."""
    layers: int
    kv_heads: int
    head_dim: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys (or values) in one layer."""
        return self.kv_heads * self.head_dim * {"bf16": 2, "fp32": 4}[self.dtype]

    def require(self, other: KvLayout, what: str) -> None:
        """Raises ModelMismatchError unless the other layout is the same."""
        if self != other:
            raise ModelMismatchError(
                f"KV layout differs: this side has {self}, {what} {other}; deploy one pack to both"
            )


@dataclass(frozen=True)
class Frame:
    """Keys and values of one layer for a contiguous range of tokens."""

    sequence_number: int
    layer: int
    first_token: int
    token_count: int
    keys: bytes
    values: bytes
    crc32: int

    @property
    def size_bytes(self) -> int:
        return len(self.keys) + len(self.values)

    @property
    def payload(self) -> tuple[bytes, bytes]:
        """What may wait on disk (`shared.spool`)."""
        return self.keys, self.values

    def with_payload(self, payload: Sequence[bytes]) -> Frame:
        """The same frame with other bytes."""
        keys, values = payload
        return replace(self, keys=keys, values=values)


@dataclass(frozen=True)
class PrefillOutcome:
    """What ends a handoff: what the first token is sampled from, and where the time went."""

    last_hidden: bytes
    """Output of the last layer for the last prompt token, before the final norm, in the KV dtype."""
    frame_count: int
    queue_ms: float
    compute_ms: float
    batch_prompts: int
    batch_tokens: int
    cached_tokens: int = 0
    """Leading prompt tokens that were not computed again: their KV was in the replica's prefix cache."""


def frames_of_layer(
    layout: KvLayout, layer: int, first_number: int, keys: bytes, values: bytes, first_token: int = 0
) -> Iterator[Frame]:
    """Cuts one layer's keys and values of a prompt into frames.

    Args:
        first_number: sequence number of the first frame.
        keys, values: all tokens of the prompt from `first_token` on, as the layout says.
        first_token: tokens before it are not sent; the receiver has them.
    """
    total = len(keys) // layout.token_bytes
    step = tokens_per_frame(layout)
    for number, first in enumerate(range(0, total, step), first_number):
        count = min(step, total - first)
        part = slice(first * layout.token_bytes, (first + count) * layout.token_bytes)
        yield Frame(
            number, layer, first_token + first, count, keys[part], values[part], checksum(keys[part], values[part])
        )


def tokens_per_frame(layout: KvLayout) -> int:
    """Most tokens whose keys and values fit a frame, at least one."""
    return max(1, FRAME_BYTES // (2 * layout.token_bytes))


def checksum(keys: bytes, values: bytes) -> int:
    """CRC-32 of keys followed by values."""
    return zlib.crc32(values, zlib.crc32(keys))


class HandoffReceiver:
    """Checks the frames of one prompt as they arrive and stores them. Used by one stream at a time."""

    def __init__(
        self, layout: KvLayout, tokens: int, store: Callable[[int, int, bytes, bytes], None], held_tokens: int = 0
    ) -> None:
        """Prepares to receive a prompt of `tokens` tokens.

        Args:
            store: called as store(layer, first_token, keys, values) for every good frame.
            held_tokens: leading tokens that are here already; every layer begins behind them.
        """
        self._layout = layout
        self._tokens = tokens
        self._store = store
        self._held_tokens = held_tokens
        self._frames = self._layer = 0
        self._next_token = held_tokens

    def accept(self, frame: Frame) -> None:
        """Stores a frame.

        Raises:
            DataLossError: it is not the one that comes next, its size is wrong, or its checksum does not match.
        """
        expected = (self._frames, self._layer, self._next_token)
        found = (frame.sequence_number, frame.layer, frame.first_token)
        if found != expected or self._layer >= self._layout.layers:
            raise DataLossError(f"handoff out of order: expected (number, layer, token) {expected}, found {found}")
        size = frame.token_count * self._layout.token_bytes
        last_token = frame.first_token + frame.token_count
        if not (frame.token_count and last_token <= self._tokens and len(frame.keys) == len(frame.values) == size):
            raise DataLossError(
                f"handoff frame {frame.sequence_number} has the wrong size for {frame.token_count} tokens"
            )
        if checksum(frame.keys, frame.values) != frame.crc32:
            raise DataLossError(f"handoff frame {frame.sequence_number} does not match its checksum")
        self._store(frame.layer, frame.first_token, frame.keys, frame.values)
        self._frames += 1
        self._next_token = last_token
        if last_token == self._tokens:
            self._layer, self._next_token = self._layer + 1, self._held_tokens

    def finish(self, outcome: PrefillOutcome, hidden_size: int) -> None:
        """Confirms that everything has arrived.

        Raises:
            DataLossError: frames are missing, or the final features have the wrong size.
        """
        if (self._layer, self._frames) != (self._layout.layers, outcome.frame_count):
            raise DataLossError(
                f"handoff ended after {self._frames} of {outcome.frame_count} frames, in layer {self._layer}"
            )
        element = self._layout.token_bytes // (self._layout.kv_heads * self._layout.head_dim)
        if len(outcome.last_hidden) != hidden_size * element:
            raise DataLossError(
                f"handoff ended with {len(outcome.last_hidden)} bytes of features, not {hidden_size * element}"
            )


def prompt_tokens_error(token_ids: Sequence[int], vocab_size: int, context_length: int) -> str | None:
    """Why a prompt cannot be computed, or None. Both stages ask this before any work."""
    if not token_ids:
        return "the prompt is empty; give at least one token"
    if len(token_ids) > context_length:
        return f"the prompt has {len(token_ids)} tokens, the model's context holds {context_length}; shorten the prompt"
    if (largest := max(token_ids)) >= vocab_size:
        return f"token id {largest} is outside the vocabulary of {vocab_size}"
    return None
