"""Short measurements of what a pass takes besides its matrix products: norms, rotation, keys and values, attention.

Whole layers are timed, one after another as in a pass, and in the same rounds their products alone. What lies between
the two cannot be timed by itself: its data would stay in the caches, which the weights of a pass sweep, and threads
would not have to wake up between two kinds of work. In the same way, a layer with all that a new pass has to lay out
first (positions, rotations, addresses of blocks, masks) is timed beside that layer alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from shared.kv.paged import BLOCK_TOKENS, PagedKeyValues
from shared.kv.prompt import PromptKeyValues
from shared.model.batch import TokenBatch
from shared.model.layers import KeyValues, LayerWeights, decoder_layer
from shared.model.rotary import RotationOfRows, rotation
from shared.model.spec import Rope
from shared.pack.reader import Pack
from shared.speed import Work, products, settled_layers, undisturbed_s

DECODE_ROWS = (1, 8, 32, 128)
PROMPT_TOKENS = (64, 256, 1024)
BEGINNING_SEQUENCES = (1, 8, 32)
LITTLE_CONTEXT, MORE_CONTEXT = BLOCK_TOKENS, 512
"""Tokens that sequences have: their difference shows what attention to one of them takes."""
SEQUENCES = 8
"""In the passes that show it."""


@dataclass(frozen=True)
class RestSeconds:
    """What one layer does besides its products, and a pass besides its layers."""

    decode: dict[int, float]
    """Rows -> seconds of a layer: sequences with one new token each, and little context."""
    context_token: float
    """Seconds of a layer for attention to one more token of a sequence that decodes."""
    prompt: dict[int, float]
    """Prompt tokens -> seconds of a layer, for a prompt of that length."""
    beginning: dict[int, float]
    """Sequences -> seconds to lay out a pass over them: positions, rotations, addresses of blocks, masks."""


def rest_seconds(pack: Pack) -> RestSeconds:
    """Times layers that stay in memory, without the experts that they may have."""
    layers = [replace(layer, router=None) for layer in settled_layers(pack)]
    longest = pack.spec.context_length
    lengths = [length for length in PROMPT_TOKENS if length <= longest] or [longest]
    context = min(MORE_CONTEXT, longest - 1)
    return RestSeconds(
        decode={
            rows: _difference(_decode(pack, layers, rows), products(pack, layers, (), rows)) for rows in DECODE_ROWS
        },
        context_token=_difference(_decode(pack, layers, SEQUENCES, context), _decode(pack, layers, SEQUENCES))
        / (SEQUENCES * max(1, context - LITTLE_CONTEXT)),
        prompt={
            length: _difference(_prompt(pack, layers, length), products(pack, layers, (), length)) for length in lengths
        },
        beginning={
            count: _difference(
                _decode(pack, layers[:1], count, context, begin=True), _decode(pack, layers[:1], count, context)
            )
            for count in BEGINNING_SEQUENCES
        },
    )


def _difference(whole: Sequence[Work], part: Sequence[Work]) -> float:
    """What the whole takes longer than a part of it, both measured at the same time."""
    times = undisturbed_s({"whole": whole, "part": part})
    return max(0.0, times["whole"] - times["part"])


def _decode(
    pack: Pack, layers: Sequence[LayerWeights], sequences: int, context: int = LITTLE_CONTEXT, *, begin: bool = False
) -> list[Work]:
    """Each layer of a pass over sequences with one new token; laid out once, or again for each layer."""
    blocks = -(-(context + 1) // BLOCK_TOKENS)
    # As many layers as there are weights of; which of them see only a window does not matter to what a pool takes.
    spec = replace(pack.spec, layers=len(layers), unrotated_layers=(), local_attention=None)
    pool = PagedKeyValues(spec, pack.scheme.compute_dtype, sequences * blocks)
    tables = [range(first * blocks, (first + 1) * blocks) for first in range(sequences)]

    def laid_out() -> tuple[TokenBatch, KeyValues]:
        batch = TokenBatch.of(([0], context) for _ in range(sequences))
        return batch, pool.for_pass(batch.segments, tables)

    return _layers(pack, layers, laid_out, begin=begin)


def _prompt(pack: Pack, layers: Sequence[LayerWeights], tokens: int) -> list[Work]:
    def laid_out() -> tuple[TokenBatch, KeyValues]:
        batch = TokenBatch.of([([0] * tokens, 0)])
        return batch, PromptKeyValues(batch.segments)

    return _layers(pack, layers, laid_out)


def _layers(
    pack: Pack,
    layers: Sequence[LayerWeights],
    laid_out: Callable[[], tuple[TokenBatch, KeyValues]],
    *,
    begin: bool = False,
) -> list[Work]:
    spec, dtype = pack.spec, pack.scheme.compute_dtype

    def made() -> tuple[KeyValues, dict[Rope | None, RotationOfRows]]:
        batch, kv = laid_out()
        return kv, {rope: rotation(rope, batch.positions, dtype) for rope in set(spec.ropes)}

    features = torch.randn(len(laid_out()[0].token_ids), spec.hidden_size).to(dtype)
    once = made()

    def layer_pass(layer: int, weights: LayerWeights) -> None:
        kv, turns = made() if begin else once
        # Always the same features: what the same layer adds again and again would grow beyond what numbers hold.
        decoder_layer(spec, layer, weights, features.clone(), turns[spec.ropes[layer]], kv)

    return [partial(layer_pass, layer, weights) for layer, weights in enumerate(layers)]
