"""Causal attention over grouped key/value heads."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from shared.model.spec import AttentionRule

QUERY_CHUNK = 256
"""Queries of one sequence attended at once: bounds the mask, and skips keys that come after the whole chunk."""
PART_TOKENS = 2048
"""Of a longer pass, so many tokens have queries and attention at once; the others only features, keys and values."""
LONG_CONTEXT = 4096
"""Where a chunk of a prompt sees more keys than this, its mask is kept small."""
ALIGNED_CHUNK = 64
"""Positions of a prompt attended at once: few enough that filling them up costs a short prompt little."""


def attention(rule: AttentionRule, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of several equally shaped sequences.

    Args:
        queries: [sequences, kv_heads, rows, head_dim]: the query heads of a group are more rows of the key/value head
            that they share, so that no key or value is ever repeated.
        keys, values: [sequences, kv_heads, context, head_dim].
        mask: of `additive_mask`; None when all queries see all keys.

    Returns:
        [sequences, kv_heads, rows, head_dim].
    """
    if rule.soft_cap is None:
        return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=rule.scale)
    return _capped_attention(queries, keys, values, mask, rule.scale, rule.soft_cap)


def grouped_attention(
    rule: AttentionRule, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
) -> Tensor:
    """`attention` for queries, keys and values that lie token by token.

    Args:
        queries: [sequences, new, heads, head_dim].
        keys, values: [sequences, context, kv_heads, head_dim].
        mask: of `additive_mask`; None when all queries see all keys.

    Returns:
        [sequences, new, heads, head_dim].
    """
    sequences, new, heads, head_dim = queries.shape
    kv_heads = keys.shape[2]
    group = heads // kv_heads
    folded = queries.view(sequences, new, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(sequences, kv_heads, group * new, head_dim)
    attended = attention(rule, folded, keys.transpose(1, 2), values.transpose(1, 2), mask)
    real: Tensor = attended.unflatten(2, (group, new)).permute(0, 3, 1, 2, 4)
    return real.reshape(sequences, new, heads, head_dim)


def causal_attention(rule: AttentionRule, queries: Tensor, keys: Tensor, values: Tensor, context: int) -> Tensor:
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
        seen = slice(first_seen(rule, context + start), context + start + len(chunk))
        seen_by = visible_in(rule, slice(context + start, seen.stop), seen, queries.device)
        mask = None if len(chunk) == 1 else additive_mask(seen_by[None], chunk.shape[1] // keys.shape[1], chunk.dtype)
        attended[start : start + len(chunk)] = grouped_attention(
            rule, chunk[None], keys[None, seen], values[None, seen], mask
        )[0]
    return attended


def aligned_attention(
    rule: AttentionRule,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    context: int,
    attended: Tensor,
    masks: ChunkMasks,
) -> None:
    """Attention of one sequence's new tokens, whose rounding depends on a token's position alone.

    Queries go in chunks between multiples of `ALIGNED_CHUNK`, filled up where some are missing, against keys up to the
    chunk's end. So a token is always computed in a call of the same shape and at the same place in it, however long its
    sequence is, and however much of that is context.

    Args:
        queries: [new, heads, head_dim], at positions `context` onwards.
        keys, values: [context + new, filled up to a multiple of `ALIGNED_CHUNK`, kv_heads, head_dim]; all finite.
        attended: receives the result, [new, heads, head_dim].
        masks: for sequences as long as this one at least.
    """
    end = context + len(queries)
    for first in range(context - context % ALIGNED_CHUNK, end, ALIGNED_CHUNK):
        last = first + ALIGNED_CHUNK
        start, stop = max(first, context), min(last, end)
        new = slice(start - context, stop - context)
        chunk = (
            pad(queries[new], (0, 0, 0, 0, start - first, last - stop))
            if stop - start < ALIGNED_CHUNK
            else queries[new]
        )
        seen = slice(first_seen(rule, first), last)
        group = chunk.shape[1] // keys.shape[1]
        # Where many keys are seen, the query heads of a group take turns: together their mask would be large.
        turns = group if last - seen.start > LONG_CONTEXT else 1
        mask = masks.of(rule, last - seen.start, group // turns, chunk)
        for turn in range(turns):
            heads = slice(turn, None, turns)
            found = grouped_attention(rule, chunk[None, :, heads], keys[None, seen], values[None, seen], mask)[0]
            attended[new, heads] = found[start - first : stop - first]


class ChunkMasks:
    """The masks of `aligned_attention`, made once for all chunks, prompts and layers of a pass.

    Counted back from the end of a chunk, which keys its queries see depends on the rule alone. So every chunk's mask is
    the end of the longest one's.
    """

    def __init__(self, longest: int) -> None:
        """Makes none yet.

        Args:
            longest: tokens of the longest sequence.
        """
        self._longest = longest + -longest % ALIGNED_CHUNK
        self._made: dict[tuple[AttentionRule, int], Tensor] = {}

    def of(self, rule: AttentionRule, keys: int, heads_per_kv: int, queries: Tensor) -> Tensor:
        """The mask of a chunk that sees so many keys, for queries of this dtype and device: see `additive_mask`."""
        if (rule, heads_per_kv) not in self._made:
            most = self._longest if heads_per_kv == 1 else min(self._longest, LONG_CONTEXT)
            last_chunk = slice(most - ALIGNED_CHUNK, most)
            seen = slice(first_seen(rule, last_chunk.start), most)
            seen_by = visible_in(rule, last_chunk, seen, queries.device)
            self._made[rule, heads_per_kv] = additive_mask(seen_by[None], heads_per_kv, queries.dtype)
        mask = self._made[rule, heads_per_kv]
        return mask[..., mask.shape[-1] - keys :]


def additive_mask(visible: Tensor, heads_per_kv: int, dtype: torch.dtype, rows_multiple: int = 1) -> Tensor:
    """What is added to scores so that only visible keys count: 0 or -inf.

    Args:
        visible: bool [sequences, new, context], true where a query sees a key.
        rows_multiple: rows of zeros follow up to a multiple of this.

    Returns:
        [sequences, 1, heads_per_kv × new, context]: every query head of a group sees the same.
    """
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
    mask = mask[:, None].repeat(1, 1, heads_per_kv, 1)
    return pad(mask, (0, 0, 0, -mask.shape[2] % rows_multiple))


def first_seen(rule: AttentionRule, position: int) -> int:
    """The first position that a token sees."""
    return 0 if rule.window is None else max(0, position - rule.window + 1)


def visible(rule: AttentionRule, query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """Which queries see which keys: bool, of the shape that the two broadcast to."""
    seen = key_positions <= query_positions
    return seen if rule.window is None else seen & (key_positions > query_positions - rule.window)


def visible_in(rule: AttentionRule, queries: slice, keys: slice, device: torch.device) -> Tensor:
    """The same for ranges of positions: bool [queries, keys]."""
    query_positions, key_positions = (
        torch.arange(positions.start, positions.stop, device=device) for positions in (queries, keys)
    )
    return visible(rule, query_positions[:, None], key_positions)


def _capped_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, soft_cap: float
) -> Tensor:
    """Attention with soft-capped scores, which no fused kernel has. All are [sequences, kv_heads, …, head_dim]."""
    scores = (queries @ keys.transpose(-1, -2)).float()
    scores.mul_(scale / soft_cap).tanh_().mul_(soft_cap)
    if mask is not None:
        scores += mask
    return scores.softmax(dim=-1).to(values.dtype) @ values
