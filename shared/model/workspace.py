"""How much memory a pass works in, besides weights and KV: an upper bound for the memory plan.

Sums of what is alive at the widest moment, held against measured peaks by `bench/workspace.py` and the tests.
"""

from __future__ import annotations

import torch

from shared.model.attention import ALIGNED_CHUNK, LONG_CONTEXT, PART_TOKENS, QUERY_CHUNK
from shared.model.experts import HELD_TOKENS, ROW_COUNTS
from shared.model.mlp import ROW_CHUNK
from shared.model.spec import ModelSpec
from shared.quant.schemes import Scheme
from shared.quant.widened import tile_bytes

WIDE = 4
"""Bytes of float32, in which norms, attention scores and rescaled integer products are computed."""
GAPS = 1.6
"""A heap of buffers that come and go in many sizes has gaps: what it takes ÷ what is alive (`docs/memory.md`)."""
MOST_KEPT_GAPS_BYTES = 16 << 20
"""Buffers that stay for a layer have fewer gaps between them, and large ones none: they are mapped one by one."""
KERNEL_BYTES = 600 << 10
"""What oneDNN keeps for a dense product of another shape (measured: 0.55 MiB)."""


def pass_workspace_bytes(spec: ModelSpec, scheme: Scheme, tokens: int, longest: int) -> int:
    """Most bytes that a pass takes at one time.

    Args:
        tokens: tokens in the pass.
        longest: length of the longest sequence whose prompt is computed, with its context.
    """
    narrow, rows = scheme.compute_dtype.itemsize, min(tokens, ROW_CHUNK)
    # hidden, keys and values (twice: they leave as bytes), rotation
    per_token = spec.hidden_size + 4 * spec.kv_size + 2 * spec.head_dim * len(set(spec.ropes))
    # queries and attended; when they are gone, what experts work in
    in_turn = max(tokens * 2 * spec.query_size * narrow, _mixture_bytes(spec, scheme, tokens))
    kept = tokens * per_token * narrow + in_turn + min(tokens, longest) * spec.query_size * narrow
    rotation = tokens * spec.head_dim * 3 * WIDE
    chunk = _chunk_bytes(spec, scheme, rows)
    queries = min(tokens, QUERY_CHUNK)
    pairs = queries * longest
    mask = pairs * (spec.heads // spec.kv_heads + 1) * (1 + narrow) + 4 * queries * spec.query_size * narrow
    # capped scores of all heads: as computed, wide, and their softmax
    scores = pairs * spec.heads * (2 * WIDE + 2 * narrow) if spec.attention_soft_cap else 0
    return kept + min(kept // 4, MOST_KEPT_GAPS_BYTES) + int(GAPS * max(rotation, chunk, mask + scores))


def prompt_workspace_bytes(spec: ModelSpec, scheme: Scheme, tokens: int, longest: int, shared: int) -> int:
    """Most bytes that a pass of prompts takes at one time where they attend in parts (`shared.kv.prompt`).

    Args:
        tokens: tokens in the pass.
        longest: length of the longest prompt.
        shared: tokens in a pass of several prompts. What these compute is there twice while they attend: behind what
            they read.
    """
    narrow, part = scheme.compute_dtype.itemsize, min(tokens, PART_TOKENS)
    kept = (tokens * (spec.hidden_size + 2 * spec.kv_size) + min(tokens, shared) * 2 * spec.kv_size) * narrow
    of_part = part * (2 * spec.query_size + 2 * spec.kv_size + 2 * spec.head_dim * len(set(spec.ropes))) * narrow
    kept += max(of_part, _mixture_bytes(spec, scheme, tokens)) + _masks_bytes(spec, narrow, longest)
    rotation = part * spec.head_dim * 3 * WIDE
    working = max(
        rotation, _chunk_bytes(spec, scheme, min(tokens, ROW_CHUNK)), _aligned_chunk_bytes(spec, narrow, longest)
    )
    return kept + min(kept // 4, MOST_KEPT_GAPS_BYTES) + int(GAPS * working)


def _masks_bytes(spec: ModelSpec, narrow: int, longest: int) -> int:
    """`ChunkMasks`: for each rule one of a group's heads, and one of a single head where many keys are seen."""
    group, keys = spec.heads // spec.kv_heads, longest + -longest % ALIGNED_CHUNK
    rows = ALIGNED_CHUNK * (min(keys, LONG_CONTEXT) * group + (keys if keys > LONG_CONTEXT else 0))
    return len(set(spec.attention_rules)) * rows * narrow


def _aligned_chunk_bytes(spec: ModelSpec, narrow: int, longest: int) -> int:
    """What one call of `aligned_attention` takes: its mask, where it is made; its queries; scores that are capped."""
    group, short = spec.heads // spec.kv_heads, min(longest, LONG_CONTEXT)
    pairs = ALIGNED_CHUNK * max(short * group, longest)  # of queries that share a head's keys, and keys
    making = ALIGNED_CHUNK * longest * (2 + narrow)
    # scores of those heads: as computed, wide, and their softmax
    scores = pairs * spec.kv_heads * (2 * WIDE + 2 * narrow) if spec.attention_soft_cap else 0
    return max(making, scores) + 4 * ALIGNED_CHUNK * spec.query_size * narrow


def _chunk_bytes(spec: ModelSpec, scheme: Scheme, rows: int) -> int:
    """What the widest product of some rows takes."""
    return max(
        _product_bytes(scheme, rows, columns, out) + rows * columns * 2 * WIDE
        for out, columns in (
            (spec.query_size + 2 * spec.kv_size, spec.hidden_size),
            (spec.hidden_size, spec.query_size),
            (2 * spec.intermediate_size, spec.hidden_size),
            (spec.hidden_size, spec.intermediate_size),
        )
    )


def _mixture_bytes(spec: ModelSpec, scheme: Scheme, tokens: int) -> int:
    """What stays for as long as a layer's experts are computed: 0 for a model without experts."""
    experts, narrow = spec.experts, scheme.compute_dtype.itemsize
    if experts is None:
        return 0
    kernels = 2 * len(ROW_COUNTS) * KERNEL_BYTES if scheme.dense else 0  # of both matrices
    routed = tokens * experts.chosen * (3 * torch.int64.itemsize + 2 * WIDE)  # choices, their groups, weights
    summed = tokens * spec.hidden_size * (narrow + WIDE)  # inputs, and the sum of outputs
    held = min(tokens, HELD_TOKENS) * experts.chosen * spec.hidden_size * narrow
    few = min(tokens, HELD_TOKENS) * spec.hidden_size * (narrow + WIDE) + held
    return routed + max(summed, few) + kernels


def logits_workspace_bytes(spec: ModelSpec, dtype: torch.dtype, rows: int) -> int:
    """Most bytes that the logits of some rows take while they are computed."""
    widened = tile_bytes("bf16", spec.hidden_size) if dtype == torch.bfloat16 else 0
    return rows * spec.vocab_size * (dtype.itemsize + WIDE) + widened


def _product_bytes(scheme: Scheme, rows: int, columns: int, out: int) -> int:
    """What a product takes besides its input: results in the compute dtype, wider sums, a dequantized matrix.

    Whichever candidate is chosen (`shared.quant.candidates`): one multiplies in float32, all others as they may.
    """
    results = 2 * rows * out * scheme.compute_dtype.itemsize
    widened = rows * (out + columns) * WIDE + tile_bytes(scheme.name, columns)
    if scheme.name == "int8":  # two codes a row, each with sums as int32 and as float32, and the sum of both
        return results + max(widened, rows * (5 * out * WIDE + columns * (2 * WIDE + 2)))
    if scheme.name == "nf4":
        return results + max(widened, out * columns * scheme.compute_dtype.itemsize)
    return results + (widened if scheme.name == "bf16" else 0)
