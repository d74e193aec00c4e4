"""Short measurements of what a layer takes besides its matrix products: norms, rotation, keys and values, attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from shared.kv.paged import BLOCK_TOKENS, PagedKeyValues
from shared.kv.prompt import PromptKeyValues
from shared.model.batch import TokenBatch
from shared.model.layers import KeyValues, LayerWeights, decoder_layer
from shared.model.rotary import rotation
from shared.model.spec import ModelSpec
from shared.pack.format import bind
from shared.pack.reader import Pack
from shared.speed import PRODUCT_S, typical_s
from shared.tensors import aligned_buffer

DECODE_ROWS = (1, 8, 32, 128)
PROMPT_TOKENS = (64, 256, 1024)
LITTLE_CONTEXT, MORE_CONTEXT = BLOCK_TOKENS, 512
"""Tokens that sequences have: their difference shows what attention to one of them takes."""
SEQUENCES = 8
"""In the passes that show it."""


def decode_rest_s(pack: Pack) -> dict[int, float]:
    """Rows -> seconds for one layer without its products: sequences with one new token each, and little context."""
    return {rows: _pass_s(pack, rows, LITTLE_CONTEXT) for rows in DECODE_ROWS}


def context_token_s(pack: Pack) -> float:
    """Seconds for one layer's attention to one more token of a sequence that decodes."""
    if pack.spec.context_length <= MORE_CONTEXT:
        return 0.0  # too short to matter
    more_s, little_s = (_pass_s(pack, SEQUENCES, context) for context in (MORE_CONTEXT, LITTLE_CONTEXT))
    return max(0.0, more_s - little_s) / (SEQUENCES * (MORE_CONTEXT - LITTLE_CONTEXT))


def prompt_rest_s(pack: Pack) -> dict[int, float]:
    """Prompt tokens -> seconds for one layer of a prompt of that length, without its products."""
    lengths = [length for length in PROMPT_TOKENS if length <= pack.spec.context_length] or [pack.spec.context_length]
    return {length: _prompt_s(pack, length) for length in lengths}


def _pass_s(pack: Pack, sequences: int, context: int) -> float:
    batch = TokenBatch.of(([0], context) for _ in range(sequences))
    blocks = -(-(context + 1) // BLOCK_TOKENS)
    pool = PagedKeyValues(_one_layer(pack.spec), pack.scheme.compute_dtype, sequences * blocks)
    tables = [range(first * blocks, (first + 1) * blocks) for first in range(sequences)]
    return _rest_s(pack, batch, pool.for_pass(batch.segments, tables))


def _prompt_s(pack: Pack, tokens: int) -> float:
    batch = TokenBatch.of([([0] * tokens, 0)])
    return _rest_s(pack, batch, PromptKeyValues(batch.segments))


def _rest_s(pack: Pack, batch: TokenBatch, kv: KeyValues) -> float:
    spec, dtype = pack.spec, pack.scheme.compute_dtype
    weights = _weights_of_no_cost(pack)
    hidden = torch.ones(len(batch.token_ids), spec.hidden_size, dtype=dtype)
    turn = rotation(spec.ropes[0], batch.positions, dtype)
    with torch.inference_mode():
        return typical_s([partial(decoder_layer, spec, 0, weights, hidden, turn, kv)], PRODUCT_S)


def _one_layer(spec: ModelSpec) -> ModelSpec:
    """What a pool for a single layer is made for."""
    return replace(spec, layers=1, unrotated_layers=(), local_attention=None)


def _weights_of_no_cost(pack: Pack) -> LayerWeights:
    """A layer whose products only make room for their results, and without experts."""
    scheme = replace(pack.scheme, product=_nothing)
    buffer = aligned_buffer(pack.layer_layout.data_bytes).fill_(0)
    layer = LayerWeights.of(bind(buffer, pack.layer_layout), scheme)
    return replace(layer, router=None)


def _nothing(x: Tensor, weight: Mapping[str, Tensor]) -> Tensor:
    return x.new_zeros(len(x), len(weight["weight"]))
