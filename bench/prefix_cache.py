"""What the prefix cache of prefill saves: prompts that share a system prompt, with and without it.

    python -m bench.prefix_cache PACK … [--shared 1024] [--own 64] [--prompts 16] [--json FILE]

One engine without gRPC, all layers in memory, passes of 2,048 tokens. `none` computes every prompt as a whole; `cold`
finds nothing at first; `warm` finds the shared beginning. The keys and values that were sent are compared to the bit.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from shared.allocator import share_one_heap
from shared.threads import wait_passively

share_one_heap()
wait_passively()

import torch  # noqa: E402  after the lines above

from bench.machine import this_machine  # noqa: E402
from bench.report import show_table, write_json  # noqa: E402
from prefill_service.engine import PrefillEngine  # noqa: E402
from prefill_service.prompt_cache import PromptCache  # noqa: E402
from prefill_service.scheduler import PromptJob, PromptScheduler  # noqa: E402
from shared.blocks import BlockPool  # noqa: E402
from shared.kv.handoff import Frame  # noqa: E402
from shared.kv.layout import layout_of  # noqa: E402
from shared.kv.paged import BLOCK_TOKENS  # noqa: E402
from shared.limits import PREFILL_PASS_TOKENS  # noqa: E402
from shared.metrics import Identity, Telemetry  # noqa: E402
from shared.model.model import Model  # noqa: E402
from shared.outlet import Outlet  # noqa: E402
from shared.pack.reader import Pack  # noqa: E402
from shared.streaming.plan import Residency  # noqa: E402


@dataclass(frozen=True)
class Case:
    """One load on one engine."""

    scheme: str
    cache: str
    seconds: float
    passes: int
    computed_tokens: int
    cached_tokens: int
    same_bits: bool
    """All keys, values and final features are those of `none`."""


def main() -> None:
    """Runs all cases and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packs", nargs="+", type=Path)
    parser.add_argument("--shared", type=int, default=1024, help="tokens that all prompts begin with")
    parser.add_argument("--own", type=int, default=64, help="tokens of each prompt behind them")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    chosen = random.Random(0)
    shared = [chosen.randrange(100, 2000) for _ in range(arguments.shared)]
    prompts = [shared + [chosen.randrange(100, 2000) for _ in range(arguments.own)] for _ in range(arguments.prompts)]
    cases = [case for path in arguments.packs for case in asyncio.run(measure(Pack.open(path), prompts))]
    rows = []
    for case in cases:
        numbers = (case.passes, case.computed_tokens, case.cached_tokens)
        counts = [f"{number:,}" for number in numbers]
        rows.append([case.scheme, case.cache, f"{case.seconds:.2f}", *counts, "yes" if case.same_bits else "NO"])
    title = f"{arguments.prompts} prompts of {arguments.shared} shared and {arguments.own} own tokens"
    columns = ("scheme", "cache", "seconds", "passes", "computed", "cached", "same bits")
    show_table(title, columns, rows, this_machine())
    if arguments.json:
        settings = {name: getattr(arguments, name) for name in ("shared", "own", "prompts")}
        write_json(arguments.json, this_machine(), **settings, cases=[asdict(case) for case in cases])


async def measure(pack: Pack, prompts: list[list[int]]) -> list[Case]:
    """The same prompts without a cache, with an empty one, and again with what that has learned."""
    model = Model(pack, Residency(frozenset(range(pack.spec.layers)), slots=0))
    cases: list[Case] = []
    expected = ""
    for blocks, names in ((0, ("none",)), (sum(map(len, prompts)) // BLOCK_TOKENS, ("cold", "warm"))):
        scheduler = PromptScheduler(PREFILL_PASS_TOKENS, queue_limit=len(prompts))
        telemetry = Telemetry(
            Identity(stage="prefill", model_digest="", scheme="", context_length=0, layers=0, budget_bytes=0)
        )
        cache = PromptCache(BlockPool(blocks, BLOCK_TOKENS), pack.manifest.model_digest)
        engine = PrefillEngine(model, layout_of(pack), scheduler, telemetry, cache)
        engine.start()
        await answered(scheduler, [[5] * len(prompts[0])])
        for name in names:
            before, started_s = telemetry.totals, time.monotonic()
            digest = await answered(scheduler, prompts)
            seconds, after = time.monotonic() - started_s, telemetry.totals
            expected = expected or digest
            cases.append(
                Case(
                    scheme=pack.scheme.name,
                    cache=name,
                    seconds=seconds,
                    passes=after.passes - before.passes,
                    computed_tokens=after.prompt_tokens - before.prompt_tokens,
                    cached_tokens=after.cached_tokens - before.cached_tokens,
                    same_bits=digest == expected,
                )
            )
        scheduler.close()
        await asyncio.to_thread(engine.join)
    return cases


async def answered(scheduler: PromptScheduler, prompts: list[list[int]]) -> str:
    """Asks for all prompts at once; a digest of everything that came."""
    jobs = [PromptJob("", prompt, Outlet()) for prompt in prompts]
    for job in jobs:
        scheduler.submit(job)
    digest = hashlib.sha256()
    for job in jobs:
        async for item in job.outlet:
            parts = (item.keys, item.values) if isinstance(item, Frame) else (item.last_hidden,)
            for part in parts:
                digest.update(part)
    return digest.hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    main()
