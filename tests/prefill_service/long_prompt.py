"""A program of its own: how much memory a long prompt takes beyond a short one. Arguments: a pack, and both lengths."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from shared.allocator import share_one_heap
from shared.threads import wait_passively

share_one_heap()
wait_passively()

from prefill_service.engine import PrefillEngine  # noqa: E402
from prefill_service.scheduler import PromptJob, PromptScheduler  # noqa: E402
from shared.budget import measured_runtime_bytes  # noqa: E402
from shared.kv.layout import layout_of  # noqa: E402
from shared.metrics import Identity, Telemetry, peak_rss_bytes  # noqa: E402
from shared.model.model import Model  # noqa: E402
from shared.pack.reader import Pack  # noqa: E402
from shared.spool import Spool, SpooledOutlet  # noqa: E402
from shared.streaming.plan import Residency  # noqa: E402


async def peaks(path: Path, lengths: list[int]) -> list[int]:
    """The runtime's resident set, and the highest so far after each prompt."""
    pack = Pack.open(path)
    runtime_bytes = measured_runtime_bytes([pack.scheme])
    scheduler = PromptScheduler(2048, 10)
    identity = Identity(stage="prefill", model_digest="", scheme="", context_length=1, layers=1, budget_bytes=1)
    model = Model(pack, Residency(frozenset(range(pack.spec.layers)), slots=0))
    engine = PrefillEngine(model, layout_of(pack), scheduler, Telemetry(identity))
    spool, found = Spool(64 << 20), []
    engine.start()
    for length in lengths:
        outlet = SpooledOutlet[object](spool)
        scheduler.submit(PromptJob("", [2 + number * 7 % 300 for number in range(length)], outlet))
        layers = [getattr(item, "layer", None) async for item in outlet]
        assert layers[-1] is None, "the last item is the outcome"
        assert layers[-2] == pack.spec.layers - 1
        outlet.drop(RuntimeError())
        found.append(peak_rss_bytes())
    scheduler.close()
    await asyncio.to_thread(engine.join)
    return [runtime_bytes, *found]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(peaks(Path(sys.argv[1]), [int(length) for length in sys.argv[2:]]))))
