"""What the stages need: each part of a setting has its price."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest

from shared.blocks import BlockPool
from shared.demand import DecodeSettings, PrefillSettings, decode_demand, prefill_demand, sampling_bytes, spool_bytes
from shared.draft_pack import DraftPack
from shared.errors import ConfigurationError
from shared.kv.paged import PagedKeyValues
from shared.limits import NOISE_VECTORS
from shared.pack.reader import Pack
from shared.prefix_cache import PrefixCache
from shared.streaming.plan import plan_memory
from tests.conftest import TinyPack

RUNTIME = 1000
DECODE = DecodeSettings(context_length=512, batch=4, draft_length=None, receives=True, prompt_tokens=0)


@pytest.fixture
def pack(tiny_pack: TinyPack) -> Pack:
    return Pack.open(tiny_pack("bf16"))


def test_prefill_needs_no_kv_blocks_and_room_for_the_longest_prompt(pack: Pack) -> None:
    short = PrefillSettings(context_length=64, pass_tokens=128, spool_bytes=500)
    demand = prefill_demand(pack, short, RUNTIME)
    assert (demand.runtime_bytes, demand.transfer_bytes, demand.fewest_kv_blocks) == (RUNTIME, 500, 0)
    longer = prefill_demand(pack, replace(short, context_length=512), RUNTIME)
    assert longer.workspace_bytes > demand.workspace_bytes


def test_a_prefix_cache_takes_what_is_left_over_or_exactly_what_was_asked_for(pack: Pack) -> None:
    settings = PrefillSettings(context_length=512, pass_tokens=512, spool_bytes=500)
    left_over = prefill_demand(pack, settings, RUNTIME)
    none = prefill_demand(pack, replace(settings, prefix_cache_bytes=0), RUNTIME)
    assert left_over.smallest_budget_bytes == none.smallest_budget_bytes
    assert (none.most_kv_blocks, left_over.most_kv_blocks) == (0, 16 * 512 // 16)
    assert 0 < left_over.kv_share < 0.5, "layers that stay are worth more"
    asked = prefill_demand(pack, replace(settings, prefix_cache_bytes=1 << 20), RUNTIME)
    assert asked.fewest_kv_blocks == asked.most_kv_blocks == (1 << 20) // asked.kv_block_bytes > 0
    assert plan_memory(asked.least_bytes, asked).kv_blocks == asked.most_kv_blocks
    with pytest.raises(ConfigurationError, match=f"--prefix-cache {asked.kv_block_bytes}, or 0"):
        prefill_demand(pack, replace(settings, prefix_cache_bytes=100), RUNTIME)


def test_a_block_that_is_kept_pays_for_its_contents_and_for_being_known(pack: Pack) -> None:
    settings = PrefillSettings(context_length=512, pass_tokens=512, spool_bytes=500)
    block_bytes = prefill_demand(pack, settings, RUNTIME).kv_block_bytes
    blocks = 2000
    pool = BlockPool(blocks)
    cache = PrefixCache(pool, pack.manifest.model_digest)
    tracemalloc.start()
    try:
        cache.insert(list(range(300, 300 + 16 * blocks)), "", pool.allocate(blocks))
        known_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    contents_bytes = PagedKeyValues.block_bytes(pack.spec, pack.scheme.compute_dtype)
    contents_bytes += 2 * contents_bytes // pack.spec.layers  # copies of one layer of it while prompts read it
    assert contents_bytes + known_bytes / blocks < block_bytes < contents_bytes + 3 * known_bytes / blocks


def test_decode_pays_for_handoffs_or_for_prompts_of_its_own(pack: Pack) -> None:
    receiving = decode_demand(pack, None, DECODE, RUNTIME)
    computing = decode_demand(pack, None, replace(DECODE, receives=False, prompt_tokens=256), RUNTIME)
    assert receiving.transfer_bytes > computing.transfer_bytes == 0
    assert computing.workspace_bytes > receiving.workspace_bytes


def test_blocks_suffice_for_the_whole_batch_and_no_more(pack: Pack) -> None:
    demand = decode_demand(pack, None, DECODE, RUNTIME)
    assert demand.most_kv_blocks == 4 * 512 // 16
    assert demand.fewest_kv_blocks == 512 // 16


def test_a_copy_of_the_target_adds_weights_and_a_stranger_adds_keys_and_values_too(
    pack: Pack, tiny_pack: TinyPack
) -> None:
    plain = decode_demand(pack, None, DECODE, RUNTIME)
    copy = decode_demand(pack, DraftPack.open("self", tiny_pack("int8"), pack), DECODE, RUNTIME)
    stranger = decode_demand(pack, DraftPack.open("model", tiny_pack("bf16", seed=1), pack), DECODE, RUNTIME)
    assert plain.draft_bytes == 0 < copy.draft_bytes < stranger.draft_bytes
    assert plain.kv_block_bytes == copy.kv_block_bytes < stranger.kv_block_bytes


def test_the_noise_that_sampling_keeps_is_paid_for(pack: Pack) -> None:
    from decode_service.sampling import gumbel_noise

    noise = gumbel_noise(1, 1, pack.spec.vocab_size)
    assert sampling_bytes(pack.spec) >= NOISE_VECTORS * noise.nbytes


def test_the_spool_holds_a_layer_of_the_longest_prompt_or_is_refused(pack: Pack) -> None:
    layer_bytes = 2 * pack.spec.kv_size * 2 * 1_000_000
    assert spool_bytes(pack, 512) == 64 << 20
    assert spool_bytes(pack, 1_000_000) == layer_bytes > 64 << 20
    assert spool_bytes(pack, 512, 1 << 20) == 1 << 20
    with pytest.raises(ConfigurationError, match=f"--spool {layer_bytes}"):
        spool_bytes(pack, 1_000_000, layer_bytes - 1)
