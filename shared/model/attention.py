"""Causal attention over grouped key/value heads."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

QUERY_CHUNK = 256
"""Queries of one sequence attended at once: bounds the mask, and skips keys that come after the whole chunk."""


def grouped_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of several equally shaped sequences; a group of query heads shares each key/value head.

    Args:
        queries: [sequences, new, heads, head_dim].
        keys, values: [sequences, context, kv_heads, head_dim].
        mask: bool [sequences, new, context], true where a query sees a key; None when all see all.

    Returns:
        [sequences, new, heads, head_dim].
    """
    sequences, new, heads, head_dim = queries.shape
    kv_heads = keys.shape[2]
    group = heads // kv_heads
    # The query heads of a group become more rows of the same head: no key or value is ever repeated.
    folded = queries.view(sequences, new, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(sequences, kv_heads, group * new, head_dim)
    if mask is not None:
        mask = mask[:, None].repeat(1, 1, group, 1)
    attended = scaled_dot_product_attention(folded, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask)
    attended = attended.view(sequences, kv_heads, group, new, head_dim).permute(0, 3, 1, 2, 4)
    return attended.reshape(sequences, new, heads, head_dim)


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor, context: int) -> Tensor:
    """Attention of one sequence's new tokens, in chunks of queries.

    Args:
        queries: [new, heads, head_dim], at positions `context` onwards.
        keys, values: [context + new, kv_heads, head_dim].

    Returns:
        [new, heads, head_dim].
    """
    attended = torch.empty_like(queries)
    for start in range(0, len(queries), QUERY_CHUNK):
        chunk = queries[start : start + QUERY_CHUNK]
        seen = context + start + len(chunk)
        last_seen = torch.arange(context + start, seen)
        mask = torch.arange(seen)[None, :] <= last_seen[:, None]
        attended[start : start + len(chunk)] = grouped_attention(
            chunk[None], keys[None, :seen], values[None, :seen], None if len(chunk) == 1 else mask[None]
        )[0]
    return attended
