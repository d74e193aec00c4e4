"""What a prefill and a decode process need, from their packs and settings: the input of the memory plan."""

from __future__ import annotations

from dataclasses import dataclass

from shared.draft_pack import DraftPack
from shared.errors import ConfigurationError
from shared.kv.handoff import FRAME_BYTES
from shared.kv.paged import BLOCK_TOKENS, PagedKeyValues
from shared.limits import (
    CATCH_UP_TOKENS,
    FEWEST_KV_TOKENS,
    LEAST_SPOOL_BYTES,
    NOISE_VECTORS,
    RECOMPUTE_TOKENS,
    SCORED_ROWS,
    most_scored_rows,
)
from shared.model.spec import ModelSpec
from shared.model.workspace import WIDE, logits_workspace_bytes, pass_workspace_bytes, prompt_workspace_bytes
from shared.pack.reader import Pack
from shared.streaming.plan import Demand

FRAMES_IN_FLIGHT = 3
"""Copies of a handoff's frame on the receiving side: in gRPC's buffer, as a message, as bytes being checked."""
HISTORY_BYTES_PER_TOKEN = 1024
"""Of a running sequence outside the pool: its tokens, and the n-grams that were seen in it (measured)."""
PREFIX_CACHE_SHARE = 1 / 8
"""Of what is left over in prefill: what its prefix cache takes before layers do, unless its size is given."""
PREFIX_CACHE_PROMPTS = 16
"""More prompts of full length than this are not kept, unless the cache's size is given."""
PREFIX_ENTRY_BYTES = 1024
"""What knowing a block takes besides its contents: its tokens and its key (measured)."""
SAMPLING_VECTORS = 8
"""Vectors of float64 over the vocabulary that are alive while one token is sampled."""
SORTING_VECTORS = 6
"""Vectors of float32 over the vocabulary that are alive while the scores of one token are found."""


@dataclass(frozen=True, kw_only=True)
class PrefillSettings:
    """What a prefill process is asked to do."""

    context_length: int
    pass_tokens: int
    spool_bytes: int
    prefix_cache_bytes: int | None = None
    """None: a share of what is left over."""


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """What a decode process is asked to do."""

    context_length: int
    batch: int
    draft_length: int | None
    """None: up to `LONGEST_DRAFT`."""
    receives: bool
    """Prompts come from prefill replicas."""
    prompt_tokens: int
    """Prompt tokens computed here in a pass; 0 where all come from prefill replicas."""

    @property
    def scored_rows(self) -> int:
        """Most rows of a pass whose logits are needed."""
        return most_scored_rows(self.batch, self.draft_length)

    @property
    def missing_tokens(self) -> int:
        """Most tokens whose keys and values one pass adds besides those: of prompts, or of preempted sequences."""
        return self.prompt_tokens or RECOMPUTE_TOKENS


def spool_bytes(pack: Pack, pass_tokens: int, asked_bytes: int | None = None) -> int:
    """What may wait for slow callers: what was asked for, or enough for one layer of the largest pass.

    Raises:
        ConfigurationError: less was asked for; even callers that read at once could lose their answers.
    """
    layer_bytes = 2 * pack.spec.kv_size * pack.scheme.compute_dtype.itemsize * pass_tokens
    if asked_bytes is None:
        return max(LEAST_SPOOL_BYTES, layer_bytes)
    if asked_bytes < layer_bytes:
        raise ConfigurationError(
            f"a spool of {asked_bytes:,} bytes cannot hold one layer of a pass of {pass_tokens} tokens; give at least "
            f"--spool {layer_bytes}, or a smaller --context-length and --pass-tokens"
        )
    return asked_bytes


def prefill_demand(pack: Pack, settings: PrefillSettings, runtime_bytes: int) -> Demand:
    """What a prefill process needs: weights, one pass, what waits for slow callers, and its prefix cache.

    Args:
        runtime_bytes: what the process takes without any weights (`shared.budget`).

    Raises:
        ConfigurationError: the prefix cache that was asked for cannot hold a block.
    """
    tokens = max(settings.context_length, settings.pass_tokens)  # the longest prompt is a pass of its own
    contents_bytes = PagedKeyValues.block_bytes(pack.spec, pack.scheme.compute_dtype)
    # A layer of what is read is copied before what is computed: of the first prompt of a pass, and of one more.
    block_bytes = contents_bytes + 2 * contents_bytes // pack.spec.layers + PREFIX_ENTRY_BYTES
    asked_bytes = settings.prefix_cache_bytes
    if asked_bytes and asked_bytes < block_bytes:
        raise ConfigurationError(
            f"a prefix cache of {asked_bytes:,} bytes cannot hold one block of {BLOCK_TOKENS} tokens; give at least "
            f"--prefix-cache {block_bytes}, or 0 for none"
        )
    asked_blocks = None if asked_bytes is None else asked_bytes // block_bytes
    prompt_blocks = -(-settings.context_length // BLOCK_TOKENS)
    return Demand(
        runtime_bytes=runtime_bytes,
        outer_bytes=pack.outer_bytes,
        workspace_bytes=max(
            prompt_workspace_bytes(pack.spec, pack.scheme, tokens, settings.context_length, settings.pass_tokens),
            _scores_bytes(pack, tokens),
        ),
        transfer_bytes=settings.spool_bytes,
        layers=pack.spec.layers,
        layer_bytes=pack.layer_layout.data_bytes,
        experts=pack.spec.layers * pack.experts_per_layer,
        expert_bytes=pack.expert_bytes,
        kv_block_bytes=block_bytes,
        fewest_kv_blocks=asked_blocks or 0,
        most_kv_blocks=PREFIX_CACHE_PROMPTS * prompt_blocks if asked_blocks is None else asked_blocks,
        kv_share=PREFIX_CACHE_SHARE,
        kv_name="prefix cache blocks",
    )


def decode_demand(pack: Pack, draft: DraftPack | None, settings: DecodeSettings, runtime_bytes: int) -> Demand:
    """What a decode process needs: weights, its draft, a pass of either, KV, and handoffs on their way in.

    Args:
        draft: the pack of a draft that is a model.
        runtime_bytes: what the process takes without any weights (`shared.budget`).
    """
    spec, dtype = pack.spec, pack.scheme.compute_dtype
    sequence_blocks = -(-settings.context_length // BLOCK_TOKENS)
    return Demand(
        runtime_bytes=runtime_bytes,
        outer_bytes=pack.outer_bytes,
        draft_bytes=draft.weight_bytes if draft else 0,
        workspace_bytes=max(_target_pass_bytes(pack, settings), _draft_pass_bytes(draft, settings))
        + logits_workspace_bytes(spec, dtype, settings.scored_rows)
        + sampling_bytes(spec),
        transfer_bytes=settings.batch * FRAMES_IN_FLIGHT * FRAME_BYTES if settings.receives else 0,
        layers=spec.layers,
        layer_bytes=pack.layer_layout.data_bytes,
        experts=pack.spec.layers * pack.experts_per_layer,
        expert_bytes=pack.expert_bytes,
        kv_block_bytes=kv_block_bytes(pack, draft),
        fewest_kv_blocks=min(sequence_blocks, FEWEST_KV_TOKENS // BLOCK_TOKENS),
        most_kv_blocks=settings.batch * sequence_blocks,
    )


def kv_block_bytes(pack: Pack, draft: DraftPack | None) -> int:
    """What each block costs: its keys and values, the draft's, and what grows with the tokens in use.

    Attention gathers one layer's keys and values of the sequences in a pass, padded to at most twice their size.
    """
    in_pool = PagedKeyValues.block_bytes(pack.spec, pack.scheme.compute_dtype)
    of_draft = draft.block_bytes if draft else 0
    return in_pool + 2 * in_pool // pack.spec.layers + of_draft + BLOCK_TOKENS * HISTORY_BYTES_PER_TOKEN


def sampling_bytes(spec: ModelSpec) -> int:
    """What choosing tokens takes: the noise that is kept, and the vectors of one choice."""
    return spec.vocab_size * (NOISE_VECTORS * WIDE + SAMPLING_VECTORS * 8)


def _scores_bytes(pack: Pack, tokens: int) -> int:
    """What scoring a text takes after its pass: all features, and the logits of some rows, one of which is sorted."""
    spec, dtype = pack.spec, pack.scheme.compute_dtype
    logits_bytes = logits_workspace_bytes(spec, dtype, min(tokens, SCORED_ROWS))
    return tokens * spec.hidden_size * dtype.itemsize + logits_bytes + SORTING_VECTORS * spec.vocab_size * WIDE


def _target_pass_bytes(pack: Pack, settings: DecodeSettings) -> int:
    rows = settings.scored_rows + settings.missing_tokens
    longest = settings.context_length if settings.prompt_tokens else 0
    return pass_workspace_bytes(pack.spec, pack.scheme, rows, longest)


def _draft_pass_bytes(draft: DraftPack | None, settings: DecodeSettings) -> int:
    if draft is None:
        return 0
    if draft.shares_kv:  # it never has more to take in than each sequence's last token
        return pass_workspace_bytes(draft.pack.spec, draft.pack.scheme, settings.batch, 0)
    rows = settings.batch * CATCH_UP_TOKENS
    return pass_workspace_bytes(draft.pack.spec, draft.pack.scheme, rows, settings.context_length)
