"""How fast models are packed: parameters and bytes a second by scheme, beside the disk and bitsandbytes' own quantizer.

    python -m bench.packing [--widen K] [--json FILE]

The model is the default one in bfloat16, widened (`bench.checkpoints`), in a temporary folder. Beside
other load, processor seconds say more than seconds.
"""

from __future__ import annotations

from shared.threads import wait_passively

wait_passively()

import argparse  # noqa: E402  torch is loaded below, after the line above
import os  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from dataclasses import asdict, dataclass  # noqa: E402
from math import prod  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402

from bench.checkpoints import write_checkpoint  # noqa: E402
from bench.machine import this_machine  # noqa: E402
from bench.report import show_table, write_json  # noqa: E402
from shared.pack.sources import open_source  # noqa: E402
from shared.pack.sources.embedded import embedded_model  # noqa: E402
from shared.pack.sources.source import Source, logical_shapes  # noqa: E402
from shared.pack.writer import write_pack  # noqa: E402
from shared.quant.kernels import NF4_BLOCK, load_bitsandbytes  # noqa: E402
from shared.quant.nf4_codes import nf4_codes  # noqa: E402
from shared.quant.schemes import SCHEMES, scheme_named  # noqa: E402

PIECE_BYTES = 8 << 20


@dataclass(frozen=True)
class Packing:
    """One packing of the whole model."""

    scheme: str
    seconds: float
    processor_seconds: float
    parameters_per_s: float
    read_bytes: int
    written_bytes: int


def main() -> None:
    """Packs the model in every scheme, and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widen", type=int, default=2, metavar="K")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(
            open_source(embedded_model("smollm2-135m")), Path(folder) / "model", arguments.widen
        )
        results = list(pack_all(open_source(checkpoint), Path(folder)))
        write_bytes_per_s = _write_bytes_per_s(Path(folder) / "zeros")
    quantizers = {"nf4_codes": _per_core(ours=True), "bitsandbytes": _per_core(ours=False)}
    machine = this_machine()
    show_table(
        f"packing, {results[0].read_bytes / 1e9:.2f} GB of bfloat16",
        ("scheme", "s", "processor s", "M parameters/s", "MB/s read", "MB/s written"),
        [
            (r.scheme, f"{r.seconds:.2f}", f"{r.processor_seconds:.2f}", f"{r.parameters_per_s / 1e6:.0f}",
             f"{r.read_bytes / r.seconds / 1e6:.0f}", f"{r.written_bytes / r.seconds / 1e6:.0f}")
            for r in results
        ],
        machine,
    )  # fmt: skip
    print(f"disk: {write_bytes_per_s / 1e6:.0f} MB/s written and synced, in files of a layer's size")
    print("nf4 codes on one core: " + ", ".join(f"{name} {rate / 1e6:.0f} M/s" for name, rate in quantizers.items()))
    if arguments.json:
        write_json(
            arguments.json,
            machine,
            packings=[asdict(result) for result in results],
            write_bytes_per_s=write_bytes_per_s,
            nf4_elements_per_s_and_core=quantizers,
        )


def pack_all(source: Source, folder: Path) -> Iterator[Packing]:
    """Packs in every scheme, one after the other."""
    parameters = sum(map(prod, logical_shapes(source.spec).values()))
    for scheme in SCHEMES:
        began_s, processor_began_s = time.perf_counter(), time.process_time()
        manifest = write_pack(source, folder / scheme, scheme_named(scheme))
        seconds = time.perf_counter() - began_s
        written = sum(record.size_bytes for record in manifest.files.values())
        used_s = time.process_time() - processor_began_s
        yield Packing(scheme, seconds, used_s, parameters / seconds, 2 * parameters, written)


def _write_bytes_per_s(path: Path, files: int = 8) -> float:
    """Zeros, as packing writes: buffered, and synced at the end of each file."""
    piece, began_s = bytes(PIECE_BYTES), time.perf_counter()
    for _ in range(files):
        with path.open("wb") as file:
            for _ in range(4):
                file.write(piece)
            os.fsync(file.fileno())
    return files * 4 * PIECE_BYTES / (time.perf_counter() - began_s)


def _per_core(*, ours: bool, elements: int = 1 << 22) -> float:
    """Elements a second, the best of five, with one thread."""
    load_bitsandbytes()
    from bitsandbytes.functional import quantize_4bit

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    matrix, best_s = torch.randn(elements), float("inf")
    for _ in range(5):
        began_s = time.thread_time()
        if ours:
            nf4_codes(matrix, NF4_BLOCK)
        else:
            quantize_4bit(matrix, blocksize=NF4_BLOCK, quant_type="nf4")
        best_s = min(best_s, time.thread_time() - began_s)
    torch.set_num_threads(threads)
    return elements / best_s


if __name__ == "__main__":
    main()
