"""Whatever goes wrong around a request: nothing it held remains, neighbours do not notice, the error says what."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace.client_stream import AsyncGeneration
from headrace.errors import DataLoss, DeadlineExceeded, FailedPrecondition, ResourceExhausted, Unavailable
from headrace.v1 import decode_pb2, decode_pb2_grpc
from shared.pack.format import layer_file_name
from shared.pack.reader import Pack
from shared.streaming.plan import Residency
from tests.conftest import TinyPack
from tests.end_to_end.stack import NARROW, Decode, decode_replica, prefill_replica, services, until

LONG = 3500
"""More tokens than are generated before anything happens to the request."""
UNREAD_LIMIT = 32


@asynccontextmanager
async def stalled_stream(decode: Decode, max_tokens: int = LONG) -> AsyncIterator[Any]:
    """A stream whose client has read one event, and now reads nothing until it is told to."""
    async with grpc.aio.insecure_channel(decode.address, options=NARROW) as channel:
        prompt = decode_pb2.Prompt(tokens=decode_pb2.TokenPrompt(ids=[3, 4, 5]))
        stopping = decode_pb2.Stopping(max_tokens=max_tokens)
        call = decode_pb2_grpc.DecodeServiceStub(channel).Generate(
            decode_pb2.GenerateRequest(prompt=prompt, stopping=stopping)
        )
        await call.read()
        yield call
        call.cancel()


async def everything_of(generation: AsyncGeneration) -> None:
    """Reads a stream to its end."""
    async for _ in generation:
        pass


async def rest_of(call: Any) -> list[int]:
    """The tokens that are still to come."""
    tokens: list[int] = []
    while (event := await call.read()) is not grpc.aio.EOF:
        tokens += event.chunk.token_ids
    return tokens


async def test_cancelling_a_stream_frees_its_blocks_and_its_neighbour_goes_on(endless_pack: Path) -> None:
    async with services(endless_pack, draft="ngram") as decode:
        undisturbed = await decode.client.complete(token_ids=[8, 9], max_tokens=200)
        async with decode.client.generate(token_ids=[3, 4, 5], max_tokens=LONG) as leaving:
            neighbour = asyncio.create_task(decode.client.complete(token_ids=[8, 9], max_tokens=200))
            async for _ in leaving:
                if decode.scheduler.running == 2:
                    break
        assert (await neighbour).token_ids == undisturbed.token_ids
        await decode.idle()
        assert decode.telemetry.totals.generated_tokens < LONG


async def test_cancelling_whole_answers_frees_their_blocks(endless_pack: Path) -> None:
    async with services(endless_pack) as decode:
        calls = [
            asyncio.create_task(decode.client.complete(token_ids=[3, number], max_tokens=LONG)) for number in range(4)
        ]
        await until(lambda: decode.telemetry.totals.passes > 0)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await decode.idle()


async def test_a_request_that_is_cancelled_while_it_waits_for_blocks_lets_the_next_one_in(endless_pack: Path) -> None:
    async with services(endless_pack, kv_blocks=232, queue_limit=2) as decode, stalled_stream(decode) as holder:
        large = asyncio.create_task(decode.client.complete(token_ids=[4], max_tokens=LONG))
        await until(lambda: decode.scheduler.queued == 1)
        small = asyncio.create_task(decode.client.complete(token_ids=[5], max_tokens=3))
        await until(lambda: decode.scheduler.queued == 2)
        with pytest.raises(ResourceExhausted, match="2 requests are waiting already"):
            await decode.client.complete(token_ids=[6], max_tokens=3)
        large.cancel()
        assert len((await small).token_ids) == 3
        assert not holder.done()
        holder.cancel()
        await decode.idle()


async def test_a_deadline_shorter_than_the_answer_ends_it_and_frees_its_blocks(endless_pack: Path) -> None:
    async with services(endless_pack) as decode:
        with pytest.raises(DeadlineExceeded):
            await decode.client.complete(token_ids=[3, 4], max_tokens=4000, timeout_s=0.3)
        await decode.idle()
        assert decode.telemetry.totals.generated_tokens < 4000


async def test_a_deadline_that_passes_during_prefill_takes_the_prompt_from_there_too(endless_pack: Path) -> None:
    async with (
        prefill_replica(endless_pack, computes=False) as prefill,
        decode_replica(endless_pack, prefill.address) as decode,
    ):
        with pytest.raises(DeadlineExceeded):
            await decode.client.complete(token_ids=[3, 4], max_tokens=5, timeout_s=0.3)
        await decode.idle()
        await until(lambda: prefill.scheduler.queued == 0)


async def test_cancelling_during_prefill_takes_the_prompt_from_there_too(endless_pack: Path) -> None:
    async with (
        prefill_replica(endless_pack, computes=False) as prefill,
        decode_replica(endless_pack, prefill.address) as decode,
    ):
        call = asyncio.create_task(decode.client.complete(token_ids=[3, 4], max_tokens=5))
        await until(lambda: prefill.scheduler.queued == 1)
        call.cancel()
        await until(lambda: prefill.scheduler.queued == 0)
        await decode.idle()


async def test_a_client_that_does_not_read_sits_out_passes_and_stalls_nobody_else(endless_pack: Path) -> None:
    async with services(endless_pack, unread_limit=UNREAD_LIMIT) as decode:
        expected = await decode.client.complete(token_ids=[3, 4, 5], max_tokens=400)
        before = decode.telemetry.totals.generated_tokens
        async with stalled_stream(decode, max_tokens=400) as stalled:
            await until(lambda: decode.telemetry.totals.generated_tokens > before + UNREAD_LIMIT)
            neighbours = [await decode.client.complete(token_ids=[8, 9], max_tokens=200) for _ in range(2)]
            assert [len(answer.token_ids) for answer in neighbours] == [200, 200]
            by_stalled = decode.telemetry.totals.generated_tokens - before - 400
            assert by_stalled <= 2 * UNREAD_LIMIT
            assert tuple(await rest_of(stalled)) == expected.token_ids
        await decode.idle()


async def test_without_any_prefill_replica_a_request_is_unavailable_long_before_its_deadline(
    endless_pack: Path,
) -> None:
    async with prefill_replica(endless_pack) as gone:
        address = gone.address
    async with decode_replica(endless_pack, address) as decode:
        for _ in range(2):
            with pytest.raises(Unavailable, match=f"prefill replica {address}"):
                await decode.client.complete(token_ids=[3], max_tokens=3, timeout_s=600)
        await decode.idle()


async def test_a_prefill_replica_with_another_pack_is_a_failed_precondition_and_nothing_is_computed(
    endless_pack: Path, tiny_pack: TinyPack
) -> None:
    async with (
        prefill_replica(tiny_pack("fp32", context=4096)) as other,
        decode_replica(endless_pack, other.address) as decode,
    ):
        with pytest.raises(FailedPrecondition, match="deploy one pack to both"):
            await decode.client.complete(token_ids=[3], max_tokens=3)
        assert other.telemetry.totals.passes == 0
        await decode.idle()


async def test_draining_finishes_the_answer_that_runs_and_refuses_new_ones(endless_pack: Path) -> None:
    async with services(endless_pack, unread_limit=UNREAD_LIMIT) as decode:
        expected = await decode.client.complete(token_ids=[3, 4, 5], max_tokens=300)
        async with stalled_stream(decode, max_tokens=300) as running:
            drained = asyncio.ensure_future(decode.server.drain())
            refused = None
            while refused is None:
                try:
                    await decode.client.complete(token_ids=[3], max_tokens=1)
                except Unavailable as error:
                    refused = error
            assert "draining" in refused.message
            assert not drained.done()
            assert tuple(await rest_of(running)) == expected.token_ids
        await drained
        # The last token is told before the engine lets go of the batch, and with it of the blocks.
        await until(lambda: decode.scheduler.blocks_used == 0)
        decode.scheduler.check_integrity()


def nothing_resident(pack: Pack) -> Residency:
    return Residency(frozenset(), slots=2)


def truncated(content: bytes) -> bytes:
    return content[: len(content) // 2]


def changed(content: bytes) -> bytes:
    return content[:-100] + bytes(byte ^ 255 for byte in content[-100:])


@pytest.mark.parametrize("damage", [truncated, changed])
@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_a_damaged_layer_is_data_loss_by_name_until_its_file_is_restored(
    endless_pack: Path, tmp_path: Path, stage: str, damage: Callable[[bytes], bytes]
) -> None:
    copy = shutil.copytree(endless_pack, tmp_path / "pack")
    layer = copy / layer_file_name(3)
    content = layer.read_bytes()
    on_prefill, on_decode = (copy, endless_pack) if stage == "prefill" else (endless_pack, copy)
    request = {"token_ids": [3, 4, 5], "max_tokens": 6}
    async with (
        prefill_replica(on_prefill, residency=nothing_resident) as prefill,
        decode_replica(on_decode, prefill.address, residency=nothing_resident) as decode,
    ):
        layer.write_bytes(damage(content))
        for _ in range(2):
            with pytest.raises(DataLoss, match="layer 3"):
                await decode.client.complete(**request)
            await decode.idle()
        layer.write_bytes(content)
        restored = await decode.client.complete(**request)
        await decode.idle()
    async with services(endless_pack) as undamaged:
        assert restored.token_ids == (await undamaged.client.complete(**request)).token_ids


async def test_a_layer_that_is_cut_off_during_an_answer_ends_it_with_its_name_and_the_next_answer_is_right(
    endless_pack: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(endless_pack, tmp_path / "pack")
    layer = copy / layer_file_name(2)
    content = layer.read_bytes()
    async with (
        prefill_replica(endless_pack) as prefill,
        decode_replica(copy, prefill.address, residency=nothing_resident) as decode,
    ):
        expected = await decode.client.complete(token_ids=[3, 4, 5], max_tokens=40)
        async with decode.client.generate(token_ids=[3, 4, 5], max_tokens=LONG) as running:
            await anext(running)
            layer.write_bytes(truncated(content))
            with pytest.raises(DataLoss, match="layer 2 is truncated"):
                await everything_of(running)
        await decode.idle()
        layer.write_bytes(content)
        assert (await decode.client.complete(token_ids=[3, 4, 5], max_tokens=40)).token_ids == expected.token_ids
        await decode.idle()
