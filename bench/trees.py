"""Whether trees pay: what alternatives beside a chain's tokens would gain one request, at the costs of this machine.

    python -m bench.trees TARGET COPY ACCEPTANCE [--temperature 0] [--disk 1e9 2e9 3e9]

ACCEPTANCE is what `bench.acceptance --json` wrote. A tree here is a chain with the draft's next best tokens as leaves
beside each of its tokens: they are known from the same logits, so that it costs no further pass of the draft, but a row
of verification for each leaf. Costs come from the packs' calibrations; the target is streamed, the copy is resident.
"""

from __future__ import annotations

from shared.threads import wait_passively

wait_passively()

import argparse  # noqa: E402  torch is loaded below, after the line above
from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402

from bench.acceptance import BRANCHES  # noqa: E402
from bench.machine import this_machine  # noqa: E402
from bench.overlap import Setting  # noqa: E402
from bench.report import read_json, show_table  # noqa: E402
from shared.calibration import calibrated  # noqa: E402
from shared.forecast import Work  # noqa: E402
from shared.pack.reader import Pack  # noqa: E402
from shared.prospect import model_speed  # noqa: E402
from shared.streaming.plan import MOST_SLOTS  # noqa: E402


def main() -> None:
    """Computes what the command line asks for, and reports it."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    packs = [Pack.open(path) for path in (arguments.target, arguments.copy)]
    calibrations = [calibrated(pack, arguments.threads) for pack in packs]
    target, copy = (model_speed(pack, found) for pack, found in zip(packs, calibrations, strict=True))
    found = next(
        result["tokens_a_pass"]
        for result in read_json(arguments.acceptance)["results"]
        if (result["draft"], result["temperature"]) == (arguments.draft, arguments.temperature)
    )
    settings = [Setting(target, copy, 0.0, disk) for disk in arguments.disk or [calibrations[0].disk_bytes_per_s]]
    rows = [row for setting in settings for row in table_rows(setting, found)]
    show_table("tokens a second of one request, by branches", COLUMNS, rows, this_machine())


COLUMNS = ("disk GB/s, chain", *map(str, BRANCHES))


def table_rows(setting: Setting, found: dict[str, list[float]]) -> Iterator[list[str]]:
    """A line for each length of the chain, and one for the best of each column beside the best chain."""
    disk = f"{setting.disk_bytes_per_s / 1e9:.1f}"
    rates = {
        length: [tokens / elapsed_s(setting, int(length), branches) for branches, tokens in enumerate(yields, 1)]
        for length, yields in found.items()
    }
    for length, columns in rates.items():
        yield [f"{disk}, {length}", *(f"{rate:.2f}" for rate in columns)]
    best = [max(column) for column in zip(*rates.values(), strict=True)]
    yield [f"{disk}, best ÷ best chain", *(f"{rate / best[0]:.3f}" for rate in best)]


def elapsed_s(setting: Setting, length: int, branches: int) -> float:
    """Drafting a chain, and a pass that verifies it with its leaves; reading is ahead by the slots at most."""
    rows = 1 + length * branches
    draft_s = setting.draft_s(1, length)
    ahead_s = min(draft_s, MOST_SLOTS * setting.target.layer_bytes / setting.disk_bytes_per_s)
    compute_s = setting.target.compute_s(Work(decode_rows=rows, scored=rows), 0)
    return draft_s + max(setting.read_s - ahead_s, compute_s)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("target", type=Path, metavar="TARGET", help="pack of the target")
    add("copy", type=Path, metavar="COPY", help="pack of its low-bit copy")
    add("acceptance", type=Path, metavar="ACCEPTANCE", help="JSON of bench.acceptance")
    add("--draft", default="nf4", help="which draft of it (%(default)s)")
    add("--temperature", type=float, default=0.0)
    add("--disk", type=float, nargs="+", metavar="BYTES_PER_S", help="bandwidths to compute for (the measured one)")
    add("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


if __name__ == "__main__":
    main()
