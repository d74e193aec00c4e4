"""A service process without a model: keeps the launcher's contract, or breaks it as it is told.

    python fake_service.py JOURNAL MODE PACK --listen … (the rest as the real services take it)

JOURNAL gets one line for each event: "STAGE started ARGUMENTS", "STAGE stopped".
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path


def main() -> None:
    journal, mode, *arguments = sys.argv[1:]
    stage = "decode" if "--draft" in arguments else "prefill"

    def note(event: str) -> None:
        with Path(journal).open("a") as file:
            file.write(f"{stage} {event}\n")

    note(f"started {os.getpid()} {' '.join(arguments)}")
    # Told to stop, it does so in the order of things, whenever that is.
    stops = {signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    print(f"{stage} is loading", file=sys.stderr, flush=True)
    if mode == "refuse":
        print("error: the budget is too small", file=sys.stderr)
        sys.exit(2)
    if mode == "fail":
        sys.exit("no such layer file")
    if mode != "silent":
        print("a library's idle chatter", flush=True)
        ready = {"event": "ready", "service": stage, "address": f"127.0.0.1:{os.getpid()}", "metrics": "127.0.0.1:2"}
        print(json.dumps(ready), flush=True)
    if mode == "crash":
        sys.exit("out of luck")
    signal.sigwait(stops)
    if mode == "stubborn":
        signal.pause()
    note("stopped")
    sys.exit(3 if mode == "sour" else 0)


if __name__ == "__main__":
    main()
