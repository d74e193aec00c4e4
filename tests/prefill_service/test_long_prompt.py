"""A prompt of 32k tokens takes the memory of one of 2k, its features, and one layer's keys and values."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from shared.demand import PrefillSettings, prefill_demand
from shared.pack.reader import Pack
from tests.conftest import TinyPack

SHORT, LONG = 2048, 32768
MASKS_BYTES = 20 << 20
"""Of one chunk of 64 tokens that see 32k others: the one part of an attention call that grows with them."""


@pytest.mark.slow
def test_a_prompt_of_32k_tokens_fits_the_budget_of_one_of_2k_and_its_features(tiny_pack: TinyPack) -> None:
    path = tiny_pack("bf16", hidden=256, heads=8, kv_heads=2, layers=2, intermediate=512, context=LONG, scale=0.05)
    program = [sys.executable, "-m", "tests.prefill_service.long_prompt", str(path), str(SHORT), str(LONG)]
    run = subprocess.run(program, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    runtime_bytes, short_peak, long_peak = json.loads(run.stdout)

    pack = Pack.open(path)
    element = pack.scheme.compute_dtype.itemsize
    features_bytes, layer_bytes = LONG * pack.spec.hidden_size * element, 2 * LONG * pack.spec.kv_size * element
    # A layer's keys and values are there once, and once more as frames on their way.
    assert long_peak - short_peak <= features_bytes + 2 * layer_bytes + MASKS_BYTES

    settings = PrefillSettings(context_length=SHORT, pass_tokens=SHORT, spool_bytes=64 << 20, prefix_cache_bytes=0)
    demand = prefill_demand(pack, settings, runtime_bytes)
    assert long_peak <= demand.fixed_bytes + demand.layers * demand.layer_bytes + features_bytes
