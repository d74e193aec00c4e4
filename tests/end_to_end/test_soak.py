"""Many handoffs over two and two services, some of them cut short: right answers, and nothing left of any."""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from headrace.client import AsyncClient
from headrace.errors import CallError
from shared.spool_file import SpoolFolder
from tests.conftest import TinyPack
from tests.end_to_end.stack import ONE_TRY, decode_replica, prefill_replica, until

REQUESTS = 100
PROMPTS = [[3 + (number * 7 + place) % 300 for place in range(1 + number * 13 % 200)] for number in range(REQUESTS)]


def our_threads() -> set[str]:
    """Threads that are neither asyncio's nor gRPC's."""
    return {thread.name for thread in threading.enumerate() if not thread.name.startswith(("asyncio", "Thread-"))}


def open_files() -> int:
    """Files and sockets; gRPC keeps a few pollers, which are neither, for later."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sum(not link.startswith("anon_inode") for link in links)


async def answer(client: AsyncClient, number: int) -> tuple[int, ...] | None:
    """One request; every fifth has a deadline that hardly any answer meets, every seventh is cancelled on its way."""
    if number % 5 == 4:
        try:
            return (await client.complete(token_ids=PROMPTS[number], max_tokens=4, timeout_s=0.002)).token_ids
        except CallError:
            return None
    call = asyncio.create_task(client.complete(token_ids=PROMPTS[number], max_tokens=4))
    if number % 7 == 6:
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        return None
    return (await call).token_ids


@pytest.mark.slow
async def test_a_hundred_handoffs_over_two_and_two_services_leave_nothing_behind(
    tiny_pack: TinyPack, tmp_path: Path
) -> None:
    pack = tiny_pack("fp32")
    async with decode_replica(pack) as alone:  # computes prompts itself: no handoff
        expected = [(await alone.client.complete(token_ids=prompt, max_tokens=4)).token_ids for prompt in PROMPTS]
    files, threads = open_files(), our_threads()
    folder = SpoolFolder(tmp_path, 1 << 30)
    async with (
        prefill_replica(pack, spool_bytes=4 << 20, spool_folder=folder) as first,
        prefill_replica(pack, spool_bytes=4 << 20, spool_folder=folder) as second,
        decode_replica(pack, first.address, second.address, shares_prefixes=False) as one,
        decode_replica(pack, first.address, second.address, shares_prefixes=False) as other,
        AsyncClient(f"{one.address},{other.address}", retry=ONE_TRY) as client,
    ):
        found = await asyncio.gather(*(answer(client, number) for number in range(REQUESTS)))
        for number, token_ids in enumerate(found):
            assert token_ids in (None, expected[number])
        assert sum(token_ids is not None for token_ids in found) > REQUESTS / 2
        assert min(first.telemetry.totals.passes, second.telemetry.totals.passes) > 0
        for decode in (one, other):
            await decode.idle()
        for prefill in (first, second):
            await until(lambda prefill=prefill: prefill.scheduler.queued_tokens == 0)  # type: ignore[misc]
            assert (prefill.spool.memory_bytes, prefill.spool.disk_bytes) == (0, 0)
            prefill.engine.check_integrity()
        assert os.listdir(tmp_path) == []
    assert our_threads() == threads
    # gRPC closes its sockets a little later.
    await until(lambda: open_files() <= files)
