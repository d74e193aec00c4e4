"""The measurements behind the ring's constants: what a read costs, and what lies between the disk and a pass.

    python -m bench.ring PACK [--rounds N] [--json FILE]

Request sizes and numbers of threads are compared by raw bandwidth and by processor time, which a busy machine disturbs
less; readers and slots by the bandwidth of a walk ÷ raw bandwidth of the same requests and threads, measured in turns.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import torch

from bench.machine import Machine, Reading, read_direct, this_machine
from bench.report import show_table, write_json
from shared.pack.reader import Pack
from shared.streaming.files import DataFile
from shared.streaming.loader import READ_BYTES, split
from shared.streaming.plan import Residency
from shared.streaming.ring import Ring, Slot
from shared.streaming.stream import LayerStream
from shared.tensors import aligned_buffer

MIB = 1 << 20
REQUESTS = (1 * MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB)
THREADS = (1, 2, 4)
SLOTS = (2, 3, 4)


class NothingToRead(DataFile):
    """A layer's file whose reads cost nothing: what remains is the ring's own work."""

    def read(self, into: memoryview, offset: int) -> int:
        return len(into)

    def verify(self, data: memoryview) -> None:
        pass


def main() -> None:
    """Measures everything for one pack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    pack, machine = Pack.open(arguments.pack), this_machine()
    requests = request_costs(pack, arguments.rounds)
    walks = walks_over_raw(pack, arguments.rounds)
    others = {
        "ring, processor time per request, µs": ring_us_per_request(pack),
        "SHA-256, GB/s": digest_bytes_per_s() / 1e9,
        "full garbage collection, ms": collection_s() * 1e3,
    }
    _show(requests, walks, others, machine)
    if arguments.json:
        write_json(arguments.json, machine, requests=requests, walks=walks, others=others)


def request_costs(pack: Pack, rounds: int) -> list[dict[str, float]]:
    """Raw bandwidth and processor time per byte, by request size and threads."""
    cases = [(size, threads) for size in REQUESTS for threads in THREADS]
    samples: dict[tuple[int, int], list[Reading]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            samples[case].append(read_raw(pack, *case))
    return [
        {
            "request_bytes": size,
            "threads": threads,
            "gb_per_s": statistics.median(reading.bytes_per_s for reading in samples[size, threads]) / 1e9,
            "processor_ms_per_gb": statistics.median(
                reading.processor_s / reading.size_bytes for reading in samples[size, threads]
            )
            * 1e12,
        }
        for size, threads in cases
    ]


def walks_over_raw(pack: Pack, rounds: int) -> list[dict[str, float]]:
    """How much of the raw bandwidth a walk without arithmetic reaches, by readers and slots."""
    results = []
    for readers in THREADS:
        for slots in SLOTS:
            with closing(LayerStream(pack, Residency(frozenset(), slots), readers)) as stream:
                ratios = [_walk_over_raw(pack, stream, readers) for _ in range(rounds + 1)]
                results.append({"readers": readers, "slots": slots, "walk_over_raw": statistics.median(ratios[1:])})
    return results


def read_raw(pack: Pack, request_bytes: int, threads: int) -> Reading:
    """All layers with O_DIRECT, in requests of that size."""
    layout = pack.layer_layout
    starts = range(0, layout.data_bytes, request_bytes)
    ranges = [(layout.data_start + start, min(request_bytes, layout.data_bytes - start)) for start in starts]
    return read_direct([pack.layer_path(layer) for layer in range(pack.spec.layers)], ranges, threads)


def ring_us_per_request(pack: Pack) -> float:
    """Processor time of everything but reading and arithmetic: the least of several passes."""
    layout, layers = pack.layer_layout, range(pack.spec.layers)
    files = [NothingToRead(pack.layer_path(i), layout, pack.layer_digest(i), f"layer {i}") for i in layers]
    slots = [Slot(aligned_buffer(layout.data_bytes), weights=None) for _ in range(2)]  # type: ignore[arg-type]
    requests = len(layers) * len(split(slots[0].buffer, 2))
    with closing(Ring(files, slots, 2)) as ring:

        def walk() -> None:
            for _ in layers:
                ring.give_back(ring.take())

        return min(_processor_s(walk) for _ in range(10)) / requests * 1e6


def digest_bytes_per_s() -> float:
    """On one core."""
    data = bytes(64 * MIB)
    return len(data) / min(_processor_s(lambda: hashlib.sha256(data).digest()) for _ in range(5))


def collection_s() -> float:
    """A full collection over what importing torch leaves behind, which `gc.freeze` takes out."""
    torch.empty(0)
    gc.collect()
    return min(_processor_s(gc.collect) for _ in range(3))


def _walk_over_raw(pack: Pack, stream: LayerStream, readers: int) -> float:
    ranges = [
        (pack.layer_layout.data_start + start, len(view))
        for view, start in split(aligned_buffer(pack.layer_layout.data_bytes), readers)
    ]
    paths = [pack.layer_path(layer) for layer in range(pack.spec.layers)]
    for _ in range(2):  # the second one counts, after one of its kind
        raw = read_direct(paths, ranges, readers)
    for _ in range(2):  # the second one uses nothing that was read before it began
        before, started_s = stream.streamed_bytes, time.perf_counter()
        for _ in stream.walk():
            pass
        speed = (stream.streamed_bytes - before) / (time.perf_counter() - started_s)
    return speed / raw.bytes_per_s


def _processor_s(work: Callable[[], object]) -> float:
    before_s = time.process_time()
    work()
    return time.process_time() - before_s


def _show(
    requests: Sequence[dict[str, float]],
    walks: Sequence[dict[str, float]],
    others: dict[str, float],
    machine: Machine,
) -> None:
    rows = [
        (
            f"{case['request_bytes'] / MIB:.0f} MiB",
            f"{case['threads']}",
            f"{case['gb_per_s']:.2f}",
            f"{case['processor_ms_per_gb']:.0f}",
        )
        for case in requests
    ]
    show_table("raw O_DIRECT", ("request", "threads", "GB/s", "processor ms/GB"), rows, machine)
    rows_of_walks = [(f"{case['readers']}", f"{case['slots']}", f"{case['walk_over_raw']:.2f}") for case in walks]
    show_table(f"walks, {READ_BYTES // MIB} MiB", ("readers", "slots", "÷ raw"), rows_of_walks, machine)
    show_table("other costs", ("what", "value"), [(name, f"{value:.1f}") for name, value in others.items()], machine)


if __name__ == "__main__":
    main()
