"""A prompt of 32k tokens takes the memory of one of 2k, its features, one layer's keys and values, and a mask."""

from __future__ import annotations

import json
import subprocess
import sys

import grpc
import pytest

from bench.budget import MEBIBYTE, smallest_budget_bytes
from bench.services import service
from headrace.client_status import statuses
from headrace.v1 import prefill_pb2, prefill_pb2_grpc
from shared.demand import PrefillSettings, prefill_demand
from shared.kv.layout import layout_of
from shared.pack.reader import Pack
from shared.wire import layout_to_wire
from tests.conftest import TinyPack

SHORT, LONG = 2048, 32768
MODEL = {"hidden": 256, "heads": 8, "kv_heads": 2, "layers": 2, "intermediate": 512, "context": LONG, "scale": 0.05}
MASKS_BYTES = 16 << 20
"""Of one chunk of 64 tokens that see 32k others, kept for the pass, and what making it takes."""
GAPS_BYTES = 8 << 20
"""The plan's allowance for gaps between buffers, by which it grows with what is kept: a quarter of that."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_prompt_of_32k_tokens_fits_the_budget_of_one_of_2k_and_its_features(tiny_pack: TinyPack) -> None:
    path = tiny_pack("bf16", **MODEL)
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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_service_with_that_budget_takes_the_prompt_and_stays_within_it(tiny_pack: TinyPack) -> None:
    path = tiny_pack("bf16", **MODEL)
    pack = Pack.open(path)
    element, spec = pack.scheme.compute_dtype.itemsize, pack.spec
    command = [sys.executable, "-m", "prefill_service", str(path), "--context-length", str(SHORT)]
    budget_bytes = smallest_budget_bytes(command) + LONG * spec.hidden_size * element
    # What grows besides: a layer's keys and values, a mask, and gaps.
    budget_bytes += 2 * LONG * spec.kv_size * element + MASKS_BYTES + GAPS_BYTES

    request = prefill_pb2.PrefillRequest(
        token_ids=[2 + number * 7 % 300 for number in range(LONG)],
        model_digest=pack.manifest.model_digest,
        kv_layout=layout_to_wire(layout_of(pack)),
    )
    memory, context = f"{budget_bytes // MEBIBYTE}MiB", ["--context-length", str(LONG)]
    with (
        service("prefill_service", str(path), memory, context) as started,
        grpc.insecure_channel(started.address) as channel,
    ):
        *_, last = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(request)
        assert last.WhichOneof("event") == "result"
        (status,) = statuses([started.address])
    assert status.peak_rss_bytes <= status.budget_bytes
