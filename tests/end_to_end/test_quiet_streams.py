"""A stream on which nothing happens for minutes stays open, with the options that services and clients really have."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from headrace.v1 import prefill_pb2, prefill_pb2_grpc
from shared.config import CHANNEL_OPTIONS, KEEPALIVE_S
from shared.kv.layout import layout_of
from shared.pack.reader import Pack
from shared.wire import layout_to_wire
from tests.conftest import TinyPack
from tests.end_to_end.stack import decode_replica, prefill_replica

PINGS = 3
"""A server closes a connection at the third ping that it takes for one too many."""
QUIET_S = (PINGS + 0.5) * KEEPALIVE_S
PROMPT = list(range(2, 40))


@pytest.mark.slow
@pytest.mark.timeout(QUIET_S + 300)
async def test_prompts_that_wait_for_minutes_are_answered_on_the_connections_that_asked(tiny_pack: TinyPack) -> None:
    path = tiny_pack("fp32")
    pack = Pack.open(path)
    request = prefill_pb2.PrefillRequest(
        token_ids=PROMPT, model_digest=pack.manifest.model_digest, kv_layout=layout_to_wire(layout_of(pack))
    )
    async with (
        prefill_replica(path, computes=False) as prefill,
        decode_replica(path, prefill.address) as decode,
        grpc.aio.insecure_channel(prefill.address, options=CHANNEL_OPTIONS) as channel,
    ):
        handoff = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(request)
        assert (await handoff.read()).WhichOneof("event") == "header"
        first_frame = asyncio.ensure_future(handoff.read())
        answer = asyncio.ensure_future(decode.client.complete(token_ids=PROMPT, max_tokens=4, ignore_eos=True))

        done, _ = await asyncio.wait((first_frame, answer), timeout=QUIET_S, return_when=asyncio.FIRST_COMPLETED)
        assert not done, "nothing comes, neither an answer nor a failure, while nothing is computed"
        assert prefill.scheduler.queued == 2, "neither call was given up or made again"

        prefill.engine.start()
        try:
            assert (await first_frame).WhichOneof("event") == "frame"
            assert len((await answer).token_ids) == 4
        finally:
            prefill.scheduler.close()
            await asyncio.to_thread(prefill.engine.join)
