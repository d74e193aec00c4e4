"""Short measurements of what a pass consists of: reading layers, reading memory, matrix products of real layers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from shared.model.layers import ROW_CHUNK, LayerWeights
from shared.pack.format import bind
from shared.pack.reader import Pack
from shared.quant.products import linear
from shared.streaming.files import DataFile
from shared.streaming.ring import READ_BYTES, READERS
from shared.tensors import aligned_buffer, byte_view

ROWS = (1, 8, 32, 128, 512)
OUTPUT_ROWS = (1, 8, 32, 128)
BEYOND_CACHES_BYTES = 256 << 20
"""Weights rotate over this much, so that they come from memory."""
DISK_S, PRODUCT_S = 1.5, 0.25
"""A measurement goes on for about this time."""
FEWEST_TRIES = 3


def disk_bytes_per_s(pack: Pack) -> float:
    """Bandwidth of the pack's own layer files, past the page cache, with the ring's block size and reader threads."""
    buffer, size = _layer_buffer(pack), pack.layer_layout.data_bytes
    parts = [(buffer[at : at + READ_BYTES], at) for at in range(0, size, READ_BYTES)]
    files = [_open(pack, layer) for layer in range(pack.spec.layers)]
    try:
        with ThreadPoolExecutor(READERS) as readers:

            def read(file: DataFile) -> None:
                list(readers.map(lambda part: file.read(byte_view(part[0]), part[1]), parts))

            return size / _typical_s([partial(read, file) for file in files], DISK_S)
    finally:
        for file in files:
            file.close()


def memory_bytes_per_s() -> float:
    """Bandwidth of summing more than the caches hold, with all compute threads."""
    data = torch.ones(BEYOND_CACHES_BYTES // 4, dtype=torch.float32)
    return BEYOND_CACHES_BYTES / _typical_s([data.sum], PRODUCT_S)


def layer_seconds(pack: Pack) -> dict[int, float]:
    """Rows -> seconds for all matrix products of one layer, in chunks as a pass has them."""
    buffers = [_layer_buffer(pack) for _ in range(_copies(pack))]
    file = _open(pack, 0)
    try:
        file.read(byte_view(buffers[0]), 0)
    finally:
        file.close()
    for buffer in buffers[1:]:
        buffer.copy_(buffers[0])
    layers = [LayerWeights.of(bind(buffer, pack.layer_layout), pack.scheme) for buffer in buffers]
    return {rows: _layer_s(pack, layers, rows) for rows in ROWS}


def output_seconds(pack: Pack) -> dict[int, float]:
    """Rows -> seconds for the output matrix."""
    spec, dtype = pack.spec, pack.scheme.compute_dtype
    weight = torch.ones(spec.vocab_size, spec.hidden_size, dtype=dtype)
    with torch.inference_mode():
        inputs = {rows: torch.ones(rows, spec.hidden_size, dtype=dtype) for rows in OUTPUT_ROWS}
        return {rows: _typical_s([partial(linear, x, weight)], PRODUCT_S) for rows, x in inputs.items()}


def _layer_s(pack: Pack, layers: Sequence[LayerWeights], rows: int) -> float:
    spec, dtype = pack.spec, pack.scheme.compute_dtype
    chunk = min(rows, ROW_CHUNK)
    hidden, attended, gated = (
        torch.randn(chunk, size).to(dtype) for size in (spec.hidden_size, spec.query_size, spec.intermediate_size)
    )

    def products(layer: LayerWeights) -> None:
        for _ in range(-(-rows // chunk)):
            layer.qkv(hidden)
            layer.attention_output(attended)
            layer.gate_up(hidden)
            layer.down(gated)

    with torch.inference_mode():
        return _typical_s([partial(products, layer) for layer in layers], PRODUCT_S)


def _copies(pack: Pack) -> int:
    return min(pack.spec.layers, max(2, -(-BEYOND_CACHES_BYTES // pack.layer_layout.data_bytes)))


def _layer_buffer(pack: Pack) -> Tensor:
    """Room for a layer, every page touched: the first touch is no part of a measurement."""
    return aligned_buffer(pack.layer_layout.data_bytes).fill_(0)


def _open(pack: Pack, layer: int) -> DataFile:
    return DataFile(pack.layer_path(layer), pack.layer_layout, pack.layer_digest(layer), f"layer {layer}")


def _typical_s(works: Sequence[Callable[[], object]], limit_s: float) -> float:
    """The median time of pieces of work that are done in turn, after one that warms up, for about `limit_s`."""
    works[-1]()
    times: list[float] = []
    for work in cycle(works):
        started_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - started_s)
        if len(times) >= FEWEST_TRIES and sum(times) > limit_s:
            return statistics.median(times)
    raise AssertionError("a cycle has no end")
