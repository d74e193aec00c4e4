"""Short measurements of what a layer takes besides its matrix products: norms, rotation, keys and values, attention.

Whole layers are timed, one after another as in a pass, and then their products alone. What lies between the two cannot
be timed by itself: its data would stay in the caches, which the weights of a pass sweep, and threads would not have to
wake up between two kinds of work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from shared.kv.paged import BLOCK_TOKENS, PagedKeyValues
from shared.kv.prompt import PromptKeyValues
from shared.model.batch import TokenBatch
from shared.model.layers import KeyValues, LayerWeights, decoder_layer
from shared.model.rotary import rotation
from shared.pack.reader import Pack
from shared.speed import PRODUCT_S, products_s, settled_layers, undisturbed_s

DECODE_ROWS = (1, 8, 32, 128)
PROMPT_TOKENS = (64, 256, 1024)
LITTLE_CONTEXT, MORE_CONTEXT = BLOCK_TOKENS, 512
"""Tokens that sequences have: their difference shows what attention to one of them takes."""
SEQUENCES = 8
"""In the passes that show it."""


@dataclass(frozen=True)
class RestSeconds:
    """What one layer does besides its products."""

    decode: dict[int, float]
    """Rows -> seconds: sequences with one new token each, and little context."""
    context_token: float
    """Seconds for attention to one more token of a sequence that decodes."""
    prompt: dict[int, float]
    """Prompt tokens -> seconds, for a prompt of that length."""


def rest_seconds(pack: Pack) -> RestSeconds:
    """Times layers that stay in memory, without the experts that they may have."""
    layers = [replace(layer, router=None) for layer in settled_layers(pack)]
    longest = pack.spec.context_length
    lengths = [length for length in PROMPT_TOKENS if length <= longest] or [longest]
    return RestSeconds(
        decode={rows: _rest_s(pack, layers, rows, _pass_s(pack, layers, rows, LITTLE_CONTEXT)) for rows in DECODE_ROWS},
        context_token=_context_token_s(pack, layers),
        prompt={length: _rest_s(pack, layers, length, _prompt_s(pack, layers, length)) for length in lengths},
    )


def _rest_s(pack: Pack, layers: Sequence[LayerWeights], rows: int, whole_s: float) -> float:
    return max(0.0, whole_s - products_s(pack, layers, (), rows))


def _context_token_s(pack: Pack, layers: Sequence[LayerWeights]) -> float:
    if pack.spec.context_length <= MORE_CONTEXT:
        return 0.0  # too short to matter
    more_s, little_s = (_pass_s(pack, layers, SEQUENCES, context) for context in (MORE_CONTEXT, LITTLE_CONTEXT))
    return max(0.0, more_s - little_s) / (SEQUENCES * (MORE_CONTEXT - LITTLE_CONTEXT))


def _pass_s(pack: Pack, layers: Sequence[LayerWeights], sequences: int, context: int) -> float:
    batch = TokenBatch.of(([0], context) for _ in range(sequences))
    blocks = -(-(context + 1) // BLOCK_TOKENS)
    # As many layers as there are weights of; which of them see only a window does not matter to what a pool takes.
    spec = replace(pack.spec, layers=len(layers), unrotated_layers=(), local_attention=None)
    pool = PagedKeyValues(spec, pack.scheme.compute_dtype, sequences * blocks)
    tables = [range(first * blocks, (first + 1) * blocks) for first in range(sequences)]
    return _whole_s(pack, layers, batch, pool.for_pass(batch.segments, tables))


def _prompt_s(pack: Pack, layers: Sequence[LayerWeights], tokens: int) -> float:
    batch = TokenBatch.of([([0] * tokens, 0)])
    return _whole_s(pack, layers, batch, PromptKeyValues(batch.segments))


def _whole_s(pack: Pack, layers: Sequence[LayerWeights], batch: TokenBatch, kv: KeyValues) -> float:
    spec, dtype = pack.spec, pack.scheme.compute_dtype
    features = torch.randn(len(batch.token_ids), spec.hidden_size).to(dtype)
    turns = {rope: rotation(rope, batch.positions, dtype) for rope in set(spec.ropes)}

    def layer_pass(layer: int, weights: LayerWeights) -> None:
        # Always the same features: what the same layer adds again and again would grow beyond what numbers hold.
        decoder_layer(spec, layer, weights, features.clone(), turns[spec.ropes[layer]], kv)

    with torch.inference_mode():
        works = [partial(layer_pass, layer, weights) for layer, weights in enumerate(layers)]
        return undisturbed_s(works, PRODUCT_S)
