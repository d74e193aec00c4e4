"""Packs a checkpoint in processes that are killed somewhere, again and again, until one gets to the end.

    python -m tests.shared.pack.killed_packing CHECKPOINT FOLDER SCHEME PACKS SEED

Each process is a fork that kills itself with SIGKILL at a random event inside `shared.pack.workspace`: before or after
any call that writes, syncs or renames. Prints, for each pack in FOLDER, after how many events its processes ended.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from shared.errors import HeadraceError
from shared.pack import workspace
from shared.pack.reader import Pack
from shared.pack.sources import Source, open_source
from shared.pack.writer import write_pack
from shared.quant.kernels import load_bitsandbytes
from shared.quant.schemes import Scheme, scheme_named

KILLS = 3
"""Of each pack, at most; the next process is left alone."""


def main() -> None:
    """Packs as often as the command line says."""
    checkpoint, folder, scheme, packs, seed = sys.argv[1:]
    if scheme == "nf4":
        load_bitsandbytes()  # once, not in every fork: it takes longer than packing
    source, chosen, choice = open_source(Path(checkpoint)), scheme_named(scheme), random.Random(int(seed))
    events = pack_in_process(source, Path(folder) / "whole", chosen, None)
    for number in range(int(packs)):
        out, ends = Path(folder) / f"pack-{number}", list[int]()
        for _ in range(KILLS):
            ends.append(choice.randrange(events))
            pack_in_process(source, out, chosen, ends[-1])
            if out.exists():  # killed after it was published: then it must be whole
                Pack.open(out).verify()
                break
        else:
            pack_in_process(source, out, chosen, None)
        print(out.name, *ends)


def pack_in_process(source: Source, out: Path, scheme: Scheme, kill_at: int | None) -> int:
    """Packs in a process of its own; returns the number of its events, 0 where it was killed."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.write(writing, str(_pack(source, out, scheme, kill_at)).encode())
            os._exit(0)
        except HeadraceError as error:
            print(error, file=sys.stderr)
        finally:
            os._exit(1)
    os.close(writing)
    _, status = os.waitpid(process, 0)
    with os.fdopen(reading) as pipe:
        counted = pipe.read()
    ended = os.waitstatus_to_exitcode(status)
    if ended != (-signal.SIGKILL if not counted else 0):
        raise SystemExit(f"packing to {out} ended with {ended}")
    return int(counted or 0)


def _pack(source: Source, out: Path, scheme: Scheme, kill_at: int | None) -> int:
    events = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal events
        if frame.f_code.co_filename == workspace.__file__:
            events += 1
            if events == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)
    write_pack(source, out, scheme)
    sys.setprofile(None)
    return events


if __name__ == "__main__":
    main()
