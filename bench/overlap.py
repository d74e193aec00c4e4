"""Whether two groups of sequences should alternate, one drafting while the other's pass streams: computed, not run.

    python -m bench.overlap TARGET COPY [--batches 8 16 32] [--acceptance 0.87] [--disk 1e9 2e9 3e9]

As it is, all sequences draft, then one pass verifies them: reading goes on while they draft, but only until the slots
are full. Alternating, each half of them has a pass of its own, and while one half's layers are read the cores compute
that pass and draft for the other half. So reading is never in the way of drafting, but there are twice as many passes
for the same tokens, and drafting and verifying share the cores all the same.

Times come from the packs' calibrations on this machine; target layers are all streamed, the copy is resident. Each
schedule is given the draft length that suits it best. What alternating would cost besides is not counted. The last
column is the gain if the arithmetic of verifying cost nothing: more than any processor could make of it.
"""

from __future__ import annotations

from shared.threads import wait_passively

wait_passively()

import argparse  # noqa: E402  torch is loaded below, after the line above
from collections.abc import Iterator  # noqa: E402
from dataclasses import asdict, dataclass, replace  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402

from bench.machine import this_machine  # noqa: E402
from bench.report import show_table, write_json  # noqa: E402
from shared.calibration import calibrated  # noqa: E402
from shared.forecast import ModelSpeed, Work, expected_tokens  # noqa: E402
from shared.limits import LONGEST_DRAFT  # noqa: E402
from shared.pack.reader import Pack  # noqa: E402
from shared.prospect import model_speed  # noqa: E402
from shared.streaming.plan import MOST_SLOTS  # noqa: E402

CONTEXT_TOKENS = 256
"""Of each sequence."""


@dataclass(frozen=True)
class Result:
    """Both schedules for one batch and disk."""

    batch: int
    disk_bytes_per_s: float
    read_s: float
    """All layers, once."""
    together_length: int
    together_tokens_per_s: float
    alternating_length: int
    alternating_tokens_per_s: float
    most_gain: float
    """If verifying took no arithmetic."""

    @property
    def gain(self) -> float:
        return self.alternating_tokens_per_s / self.together_tokens_per_s


@dataclass(frozen=True)
class Setting:
    """A target that is streamed, its copy, and a disk."""

    target: ModelSpeed
    copy: ModelSpeed
    acceptance: float
    disk_bytes_per_s: float
    verifies_for_nothing: bool = False

    @property
    def read_s(self) -> float:
        return self.target.layers * self.target.layer_bytes / self.disk_bytes_per_s

    def draft_s(self, sequences: int, length: int) -> float:
        """Chains of `length` tokens for so many sequences."""
        step = Work(decode_rows=sequences, context_tokens=sequences * CONTEXT_TOKENS, scored=sequences)
        return length * self.copy.compute_s(step, self.copy.layers)

    def verify_s(self, sequences: int, length: int) -> float:
        """Arithmetic of their pass."""
        if self.verifies_for_nothing:
            return 0.0
        rows = sequences * (length + 1)
        return self.target.compute_s(Work(decode_rows=rows, context_tokens=sequences * CONTEXT_TOKENS, scored=rows), 0)

    def together(self, batch: int, length: int) -> float:
        """Tokens a second when all draft, then all are verified."""
        draft_s = self.draft_s(batch, length)
        ahead_s = min(draft_s, MOST_SLOTS * self.target.layer_bytes / self.disk_bytes_per_s)
        elapsed_s = draft_s + max(self.read_s - ahead_s, self.verify_s(batch, length))
        return batch * expected_tokens(self.acceptance, length) / elapsed_s

    def alternating(self, batch: int, length: int) -> float:
        """Tokens a second when one half drafts while the other's pass streams."""
        half = batch // 2
        elapsed_s = max(self.read_s, self.draft_s(half, length) + self.verify_s(half, length))
        return half * expected_tokens(self.acceptance, length) / elapsed_s


def main() -> None:
    """Computes what the command line asks for, and reports it."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    packs = [Pack.open(path) for path in (arguments.target, arguments.copy)]
    calibrations = [calibrated(pack, arguments.threads) for pack in packs]
    target, copy = (model_speed(pack, found) for pack, found in zip(packs, calibrations, strict=True))
    disks = arguments.disk or [calibrations[0].disk_bytes_per_s]
    settings = [Setting(target, copy, arguments.acceptance, disk) for disk in disks]
    results = [result for setting in settings for result in compared(setting, arguments.batches)]
    machine = this_machine()
    show_table(f"{packs[0].path.name} streamed, {packs[1].path.name} drafting", COLUMNS, map(row, results), machine)
    show_table("seconds", ("sequences", "draft token", "pass of 9 tokens each"), _costs(settings[0]), machine)
    if arguments.json:
        names = {"target": packs[0].path.name, "copy": packs[1].path.name, "acceptance": arguments.acceptance}
        write_json(arguments.json, machine, **names, results=[asdict(result) for result in results])


def compared(setting: Setting, batches: list[int]) -> Iterator[Result]:
    """Each schedule at its best length."""
    for batch in batches:
        (together_tokens, together), (alternating_tokens, alternating) = best(setting, batch)
        (least, _), (most, _) = best(replace(setting, verifies_for_nothing=True), batch)
        yield Result(
            batch=batch,
            disk_bytes_per_s=setting.disk_bytes_per_s,
            read_s=setting.read_s,
            together_length=together,
            together_tokens_per_s=together_tokens,
            alternating_length=alternating,
            alternating_tokens_per_s=alternating_tokens,
            most_gain=most / least,
        )


def best(setting: Setting, batch: int) -> list[tuple[float, int]]:
    """Tokens a second and draft length of both schedules."""
    lengths = range(LONGEST_DRAFT + 1)
    return [
        max((schedule(batch, length), length) for length in lengths)
        for schedule in (setting.together, setting.alternating)
    ]


COLUMNS = ("requests", "disk GB/s", "read s", "together", "length", "alternating", "length", "gain", "at most")


def row(result: Result) -> list[str]:
    """One line of the table."""
    return [
        str(result.batch),
        f"{result.disk_bytes_per_s / 1e9:.1f}",
        f"{result.read_s:.2f}",
        f"{result.together_tokens_per_s:.2f}",
        str(result.together_length),
        f"{result.alternating_tokens_per_s:.2f}",
        str(result.alternating_length),
        f"{result.gain:.2f}",
        f"{result.most_gain:.2f}",
    ]


def _costs(setting: Setting) -> list[list[str]]:
    return [
        [str(count), f"{setting.draft_s(count, 1):.3f}", f"{setting.verify_s(count, 8):.3f}"] for count in (1, 4, 8, 16)
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("target", type=Path, metavar="TARGET", help="pack of the target")
    add("copy", type=Path, metavar="COPY", help="pack of its low-bit copy")
    add("--batches", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    add("--acceptance", type=float, default=0.87)
    add("--disk", type=float, nargs="+", metavar="BYTES_PER_S", help="bandwidths to compute for (the measured one)")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--json", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
