"""The machine that a benchmark runs on, and its physical limits: disk, memory, matrix products.

python -m bench.machine FILE …      describes it, and measures its limits; FILE: something large on the disk
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from torch.nn.functional import linear

from shared.config import memory_limit_bytes
from shared.processor import NOTABLE_INSTRUCTIONS, instructions, processor_name
from shared.tensors import HUGE_PAGE, aligned_buffer, byte_view

PACKAGES = ("headrace", "torch", "bitsandbytes", "grpcio")
BLOCK_BYTES = 8 << 20

Range = tuple[int, int]
"""Start and size in a file, bytes; multiples of 4096."""


@dataclass(frozen=True)
class Machine:
    """What a result depends on, to be kept beside it."""

    processor: str
    cores: int
    instructions: list[str]
    memory_bytes: int
    devices: list[str]
    system: str
    versions: dict[str, str]
    date: str

    def __str__(self) -> str:
        devices = ", ".join(self.devices) or "no GPU"
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return (
            f"{self.cores} cores of {self.processor} ({', '.join(self.instructions)}), "
            f"{self.memory_bytes / 2**30:.0f} GiB, {devices}; {versions}; {self.date}"
        )


def this_machine() -> Machine:
    """Describes the machine that this runs on."""
    cuda = range(torch.cuda.device_count())
    return Machine(
        processor=processor_name(),
        cores=len(os.sched_getaffinity(0)),
        instructions=[name for name in NOTABLE_INSTRUCTIONS if name in instructions()],
        memory_bytes=memory_limit_bytes(),
        devices=[torch.cuda.get_device_name(index) for index in cuda],
        system=platform.platform(),
        versions={"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        date=date.today().isoformat(),
    )


@dataclass(frozen=True)
class Reading:
    """What reading with O_DIRECT took."""

    size_bytes: int
    elapsed_s: float
    processor_s: float

    @property
    def bytes_per_s(self) -> float:
        return self.size_bytes / self.elapsed_s


def read_direct(paths: Sequence[Path], ranges: Sequence[Range], threads: int, *, small_pages: bool = False) -> Reading:
    """Raw reading with O_DIRECT: each range of each file once, in order, by threads that do nothing else.

    Args:
        small_pages: read into memory that does not lie in huge pages.

    Raises:
        OSError: the filesystem refuses O_DIRECT.
    """
    descriptors = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in paths]
    jobs = ((descriptor, *part) for descriptor in descriptors for part in ranges)
    largest = -(-max(size for _, size in ranges) // HUGE_PAGE) * HUGE_PAGE  # nothing but huge pages: the best there is
    buffers = [byte_view(aligned_buffer(largest, lazily=small_pages)) for _ in range(threads)]
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))  # the first touch of memory is no part of reading
    turn = threading.Lock()

    def work(buffer: memoryview) -> None:
        while True:
            with turn:
                job = next(jobs, None)
            if job is None:
                return
            descriptor, start, size = job
            count = os.preadv(descriptor, [buffer[:size]], start)
            assert count == size, f"read {count} bytes of {size}"

    workers = [threading.Thread(target=work, args=(buffer,)) for buffer in buffers]
    started_s, processor_s = time.perf_counter(), time.process_time()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    elapsed_s, processor_s = time.perf_counter() - started_s, time.process_time() - processor_s
    for descriptor in descriptors:
        os.close(descriptor)
    return Reading(len(paths) * sum(size for _, size in ranges), elapsed_s, processor_s)


def memory_bytes_per_s() -> float:
    """Bandwidth of reading memory, with torch's threads: the sum of far more than any cache holds."""
    numbers = torch.ones(64 << 20)
    return numbers.nbytes / _fastest_s(numbers.sum)


def matrix_operations_per_s(dtype: torch.dtype) -> float:
    """Multiplications and additions per second of a large matrix product in float32, bfloat16 or int8."""
    rows, size = 512, 4096
    if dtype == torch.int8:
        x, weight = (torch.randint(-127, 127, shape, dtype=dtype) for shape in ((rows, size), (size, size)))
        elapsed_s = _fastest_s(lambda: torch._int_mm(x, weight.t()))
    else:
        x, weight = torch.randn(rows, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
        elapsed_s = _fastest_s(lambda: linear(x, weight))
    return 2 * rows * size * size / elapsed_s


def _fastest_s(work: Callable[[], object], times: int = 8) -> float:
    """Other programs only ever make it slower."""
    return min(_timed(work, times))


def _timed(work: Callable[[], object], times: int) -> Iterator[float]:
    work()
    for _ in range(times):
        started_s = time.perf_counter()
        work()
        yield time.perf_counter() - started_s


def main() -> None:
    """Prints everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    arguments = parser.parse_args()
    console = Console()
    console.print(asdict(this_machine()))
    console.print(f"memory: {memory_bytes_per_s() / 1e9:.1f} GB/s")
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        console.print(f"matrix products, {dtype}: {matrix_operations_per_s(dtype) / 1e12:.2f} T operations/s")
    for path in arguments.files:
        ranges = [(start, BLOCK_BYTES) for start in range(0, path.stat().st_size - BLOCK_BYTES + 1, BLOCK_BYTES)]
        for small_pages in (False, True):
            speeds = [read_direct([path], ranges, threads=2, small_pages=small_pages).bytes_per_s for _ in range(3)]
            pages = "small" if small_pages else "huge"
            console.print(f"{path.name}: {statistics.median(speeds) / 1e9:.2f} GB/s with O_DIRECT into {pages} pages")


if __name__ == "__main__":
    main()
