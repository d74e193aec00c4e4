"""What checking the input of a large batch takes: time, and memory at its peak.

python -m bench.job_input [LINES]      writes that many lines of OpenAI's form to a temporary file, and reads them
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

from bench.machine import this_machine
from headrace.job_input import read_jobs


def main() -> None:
    """Prints one line."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "in.jsonl"
        with path.open("w") as file:
            file.writelines(_line(number) + "\n" for number in range(count))
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        begin_s = time.perf_counter()
        jobs = read_jobs(path)
        elapsed_s = time.perf_counter() - begin_s
        grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) / 1024
        print(
            f"{len(jobs):,} lines, {path.stat().st_size / 1e6:,.0f} MB: {elapsed_s:.1f} s, {grown_mib:.0f} MiB more "
            f"at the peak, on {this_machine()}"
        )


def _line(number: int) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 200}], "max_tokens": 60}
    return json.dumps({"custom_id": f"j{number}", "method": "POST", "url": "/v1/chat/completions", "body": body})


if __name__ == "__main__":
    main()
