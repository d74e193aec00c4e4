"""How much memory a pass works in, besides weights and KV: an upper bound for the memory plan."""

from __future__ import annotations

import torch

from shared.model.attention import QUERY_CHUNK
from shared.model.layers import ROW_CHUNK
from shared.model.spec import ModelSpec

WIDE = 4
"""Bytes of float32, in which norms, attention scores and rescaled integer products are computed."""


def pass_workspace_bytes(spec: ModelSpec, dtype: torch.dtype, tokens: int, longest: int) -> int:
    """Most bytes that a pass allocates at one time.

    Args:
        tokens: tokens in the pass.
        longest: length of the longest sequence, with its context.
    """
    narrow, rows = dtype.itemsize, min(tokens, ROW_CHUNK)
    # hidden, queries and attended, keys and values (twice: they leave as bytes), rotation
    per_token = spec.hidden_size + 2 * spec.query_size + 4 * spec.kv_size + 2 * spec.head_dim * len(set(spec.ropes))
    kept = tokens * per_token * narrow + tokens * spec.head_dim * 3 * WIDE
    # a chunk's widest step: the fused gate and up product, its integer sums, its rescaled copy
    widest = max(2 * spec.intermediate_size, spec.query_size + 2 * spec.kv_size)
    chunk = rows * (widest * (2 * WIDE + 2 * narrow) + spec.hidden_size * 3 * WIDE)
    # a dequantized or reordered copy of the largest matrix
    matrix = widest * spec.hidden_size * narrow
    pairs = min(tokens, QUERY_CHUNK) * longest
    mask = pairs * (spec.heads // spec.kv_heads) * (1 + WIDE)
    # capped scores of all heads: as computed, wide, and their softmax
    scores = pairs * spec.heads * (2 * WIDE + 2 * narrow) if spec.attention_soft_cap else 0
    return kept + max(chunk + matrix, mask + scores)


def logits_workspace_bytes(spec: ModelSpec, dtype: torch.dtype, rows: int) -> int:
    """Most bytes that the logits of some rows take while they are computed."""
    return rows * spec.vocab_size * (dtype.itemsize + WIDE)
