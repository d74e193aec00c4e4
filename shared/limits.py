"""Bounds that the services keep and the memory plan counts on: whoever changes one changes both. Plain Python."""

from __future__ import annotations

PREFILL_PASS_TOKENS = 2048
"""Prompt tokens of a prefill pass, by default; a longer prompt has a pass of its own."""
LOCAL_PASS_TOKENS = 512
"""Prompt tokens that join a decode pass where prompts are computed there, by default."""
RECOMPUTE_TOKENS = 32
"""Tokens of preempted sequences that join a decode pass where prompts come from replicas, and none answers. No more
than a draft's turn may bring (`shared.kv.paged.SHORT_SEGMENT`), so that they need no workspace of prompts."""
LEAST_SPOOL_BYTES = 64 << 20
"""KV that may wait for slow callers, by default; more where a layer of the longest prompt is more."""
SCORED_ROWS = 32
"""Tokens of a text whose scores a prefill service computes at once."""
DECODE_BATCH = 16
"""Sequences that share a decode pass, by default."""
OVERCOMMIT = 1.5
"""KV that admitted sequences may still grow to ÷ what there is, by default (`docs/memory.md`)."""
LONGEST_DRAFT = 16
"""Tokens proposed for a sequence, unless the operator fixes the length."""
MOST_SCORED_ROWS = 128
"""Bounds the memory of logits; beyond so many rows a draft hardly pays."""
CATCH_UP_TOKENS = 256
"""Tokens of a sequence that a draft model takes in at once, after a prompt or a while without drafting."""
NOISE_VECTORS = 128
"""Noise vectors kept: enough for the draft's and the target's turn over 8 sequences with chains of 15."""
FEWEST_KV_TOKENS = 1024
"""A service whose KV memory holds less is of no use."""


def most_scored_rows(batch: int, draft_length: int | None) -> int:
    """Rows of a decode pass whose logits are needed, at most: each sequence's last token and its draft."""
    return min(batch * ((draft_length or LONGEST_DRAFT) + 1), max(batch, MOST_SCORED_ROWS))
