"""Short measurements of what a pass consists of: reading layers, reading memory, matrix products of real layers.

Times that belong together are measured in rounds, one piece of each work in turn: whatever makes the machine slow for a
moment makes all of them slow, and they still fit together, also where one is taken from another.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import TypeVar

import torch
from torch import Tensor

from shared.forecast import distinct_experts
from shared.model.layers import LayerWeights
from shared.model.mlp import ROW_CHUNK, Mlp
from shared.pack.format import FUSED, bind
from shared.pack.reader import Pack
from shared.quant.packed import settle
from shared.quant.products import linear
from shared.streaming.files import DataFile
from shared.streaming.loader import READ_BYTES, READERS
from shared.tensors import aligned_buffer, byte_view

ROWS = (1, 8, 32, 128, 512)
OUTPUT_ROWS = (1, 8, 32, 128)
BEYOND_CACHES_BYTES = 256 << 20
"""Weights rotate over this much, so that they come from memory."""
MOST_OUTPUT_COPIES = 4
"""Of the output matrix, which may be large."""
DISK_S, PRODUCT_S = 1.5, 0.12
"""A measurement goes on for about this time."""
FEWEST_TRIES, PATIENCE = 5, 4
"""It has so many tries, unless that would take several times as long."""

Name = TypeVar("Name")
Work = Callable[[], object]


def disk_bytes_per_s(pack: Pack) -> float:
    """Bandwidth of the pack's own layer files, past the page cache, with the ring's block size and reader threads."""
    size = pack.layer_layout.data_bytes
    buffer = _touched(size)
    parts = [(buffer[at : at + READ_BYTES], at) for at in range(0, size, READ_BYTES)]
    files = [_open(pack, layer) for layer in range(pack.spec.layers)]
    try:
        with ThreadPoolExecutor(READERS) as readers:

            def read(file: DataFile) -> None:
                list(readers.map(lambda part: file.read(byte_view(part[0]), part[1]), parts))

            return size / typical_s([partial(read, file) for file in files], DISK_S)
    finally:
        for file in files:
            file.close()


def memory_bytes_per_s() -> float:
    """Bandwidth of summing more than the caches hold, with all compute threads."""
    data = torch.ones(BEYOND_CACHES_BYTES // 4, dtype=torch.float32)
    return BEYOND_CACHES_BYTES / undisturbed_s({"sum": [data.sum]})["sum"]


@dataclass(frozen=True)
class LayerSeconds:
    """Rows -> seconds for all matrix products of one layer."""

    streamed: dict[int, float]
    """As it is stored, which is how it streams."""
    resident: dict[int, float]
    """In the layout that a layer gets which stays (`shared.quant.packed`)."""


def layer_seconds(pack: Pack) -> LayerSeconds:
    """Times the products of real layers, in chunks as a pass has them.

    Of experts, as many as that number of rows is expected to need, with evenly many rows each.
    """
    experts: list[Mlp] = []
    if pack.spec.experts:
        file = DataFile(pack.experts_path(0), pack.experts_layout, pack.experts_digest(0), "layer 0, experts")
        buffers = _copies(file, pack.expert_bytes, pack.spec.layers * pack.experts_per_layer)
        experts = [Mlp.of(bind(buffer, pack.expert_layout), "", pack.scheme) for buffer in buffers]
    buffers = _copies(_open(pack, 0), pack.layer_layout.data_bytes, pack.spec.layers)
    streamed = [LayerWeights.of(bind(buffer, pack.layer_layout), pack.scheme) for buffer in buffers]
    times = undisturbed_s({rows: products(pack, streamed, experts, rows) for rows in ROWS})
    del streamed, buffers
    resident = settled_layers(pack)
    return LayerSeconds(times, undisturbed_s({rows: products(pack, resident, experts, rows) for rows in ROWS}))


def settled_layers(pack: Pack) -> list[LayerWeights]:
    """Layers that stay, more of them than the caches hold; the first one's weights in all of them.

    Raises:
        DataLossError, UnavailableError: it cannot be read.
    """
    buffers = _copies(_open(pack, 0), pack.layer_layout.data_bytes, pack.spec.layers)
    return list(_settled(pack, buffers))


def output_seconds(pack: Pack) -> dict[int, float]:
    """Rows -> seconds for the output matrix, and for finding the likeliest token of each row."""
    spec, dtype = pack.spec, pack.scheme.compute_dtype
    size_bytes = spec.vocab_size * spec.hidden_size * dtype.itemsize
    copies = max(1, min(MOST_OUTPUT_COPIES, BEYOND_CACHES_BYTES // size_bytes))
    shape = (spec.vocab_size, spec.hidden_size)
    weights = [_touched(size_bytes).view(dtype).view(shape).fill_(1) for _ in range(copies)]
    inputs = {rows: torch.ones(rows, spec.hidden_size, dtype=dtype) for rows in OUTPUT_ROWS}
    return undisturbed_s({rows: [partial(_likeliest, x, weight) for weight in weights] for rows, x in inputs.items()})


def _likeliest(hidden: Tensor, weight: Tensor) -> list[int]:
    return [int(row.numpy().argmax()) for row in linear(hidden, weight).float()]


def _settled(pack: Pack, buffers: list[Tensor]) -> Iterator[LayerWeights]:
    """The layers in the buffers, settled one by one; each buffer is let go, so that there is never twice the memory."""
    while buffers:
        stored = bind(buffers.pop(), pack.layer_layout)
        yield LayerWeights.of(settle(stored, FUSED, pack.scheme), pack.scheme)


def products(pack: Pack, layers: Sequence[LayerWeights], experts: Sequence[Mlp], rows: int) -> list[Work]:
    """The matrix products of each layer, and of its experts where some are given."""
    spec, dtype = pack.spec, pack.scheme.compute_dtype
    chunk = min(rows, ROW_CHUNK)
    hidden, attended, gated = (
        torch.randn(chunk, size).to(dtype) for size in (spec.hidden_size, spec.query_size, spec.intermediate_size)
    )

    rotating = cycle(experts)
    groups = _expert_rows(pack, rows) if experts else []

    def mlp_products(mlp: Mlp, its_rows: int) -> None:
        mlp.gate_up(hidden[:its_rows])
        mlp.down(gated[:its_rows])

    def of(layer: LayerWeights) -> None:
        for _ in range(-(-rows // chunk)):
            layer.qkv(hidden)
            layer.attention_output(attended)
            if layer.mlp is not None:
                mlp_products(layer.mlp, chunk)
        for its_rows in groups:
            mlp_products(next(rotating), its_rows)

    return [partial(of, layer) for layer in layers]


def _expert_rows(pack: Pack, rows: int) -> list[int]:
    """The rows of each product with an expert in one layer: none without experts."""
    experts = pack.spec.experts
    if experts is None:
        return []
    count = max(1, round(distinct_experts(experts.count, experts.chosen, rows)))
    its_rows = -(-rows * experts.chosen // count)
    chunks = [min(ROW_CHUNK, its_rows - start) for start in range(0, its_rows, ROW_CHUNK)]
    return chunks * count


def _copies(file: DataFile, size_bytes: int, most: int) -> list[Tensor]:
    """The beginning of a file's data, as often as it takes to exceed the caches."""
    buffers = [_touched(size_bytes) for _ in range(min(most, max(2, -(-BEYOND_CACHES_BYTES // size_bytes))))]
    try:
        file.read(byte_view(buffers[0]), 0)
    finally:
        file.close()
    for buffer in buffers[1:]:
        buffer.copy_(buffers[0])
    return buffers


def _touched(size_bytes: int) -> Tensor:
    """Room, every page touched: the first touch is no part of a measurement."""
    return aligned_buffer(size_bytes).fill_(0)


def _open(pack: Pack, layer: int) -> DataFile:
    return DataFile(pack.layer_path(layer), pack.layer_layout, pack.layer_digest(layer), f"layer {layer}")


def typical_s(works: Sequence[Work], limit_s: float) -> float:
    """The median time of pieces of work that are done in turn, after one that warms up, for about `limit_s`."""
    return statistics.median(_times({"": works}, limit_s)[""])


def undisturbed_s(works: Mapping[Name, Sequence[Work]]) -> dict[Name, float]:
    """The lower quartile of each work's times: for arithmetic, which other programs only ever make slower."""
    times = _times(works, PRODUCT_S * len(works))
    return {name: statistics.quantiles(found, n=4)[0] for name, found in times.items()}


def _times(works: Mapping[Name, Sequence[Work]], limit_s: float) -> dict[Name, list[float]]:
    """Does one piece of each work, then the next of each, and so on."""
    turns = {name: cycle(pieces) for name, pieces in works.items()}
    times: dict[Name, list[float]] = {name: [] for name in works}
    with torch.inference_mode():
        for pieces in works.values():
            pieces[-1]()
        started_s, rounds = time.perf_counter(), 0
        while (elapsed_s := time.perf_counter() - started_s) < limit_s or rounds < FEWEST_TRIES:
            if rounds > 1 and elapsed_s > PATIENCE * limit_s:
                break
            rounds += 1
            for name, turn in turns.items():
                piece, begun_s = next(turn), time.perf_counter()
                piece()
                times[name].append(time.perf_counter() - begun_s)
    return times
