"""The Prefill call over gRPC: what is refused before any work, what comes back, and that nothing outlives the call."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from headrace.v1 import kv_cache_pb2, prefill_pb2, prefill_pb2_grpc
from shared.kv.handoff import HandoffReceiver
from shared.kv.layout import layout_of
from shared.kv.paged import PagedKeyValues
from shared.model.batch import TokenBatch
from shared.model.model import Model
from shared.pack.reader import Pack
from shared.spool_file import SpoolFolder
from shared.tensors import from_bytes
from shared.wire import frame_from_wire, layout_to_wire, outcome_from_wire
from tests.conftest import TinyPack
from tests.end_to_end.stack import NARROW, PATIENCE_S, Prefill, everything, prefill_replica, until

CONTEXT = 512


@pytest.fixture(scope="module")
def pack(tiny_pack: TinyPack) -> Path:
    return tiny_pack("fp32")


def request_for(path: Path, token_ids: list[int], **changes: Any) -> prefill_pb2.PrefillRequest:
    pack = Pack.open(path)
    fields = {
        "token_ids": token_ids,
        "model_digest": pack.manifest.model_digest,
        "kv_layout": layout_to_wire(layout_of(pack)),
        "request_id": "r1",
    }
    return prefill_pb2.PrefillRequest(**fields | changes)


@asynccontextmanager
async def replica(
    path: Path, channel_options: list[tuple[str, int]] | None = None, **options: Any
) -> AsyncIterator[tuple[Prefill, Any]]:
    """A replica and a stub for it."""
    async with (
        prefill_replica(path, **options) as prefill,
        grpc.aio.insecure_channel(prefill.address, options=channel_options) as channel,
    ):
        yield prefill, prefill_pb2_grpc.PrefillServiceStub(channel)


async def everything_of(call: Any) -> list[prefill_pb2.PrefillResponse]:
    """What is still to come of a stream."""
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


async def test_a_handoff_puts_the_same_keys_and_values_into_blocks_as_computing_the_prompt_there(pack: Path) -> None:
    prompt = [3 + number * 7 % 310 for number in range(100)]
    opened = Pack.open(pack)
    layout, model = layout_of(opened), Model(opened, everything(opened))
    blocks = list(range(7))
    computed, received = (PagedKeyValues(opened.spec, model.dtype, 7) for _ in range(2))
    receiver = HandoffReceiver(layout, len(prompt), lambda *arguments: received.write(blocks, *arguments))
    async with replica(pack) as (_, stub):
        header, *frames, result = await everything_of(stub.Prefill(request_for(pack, prompt)))
    for response in frames:
        receiver.accept(frame_from_wire(response.frame))
    outcome = outcome_from_wire(result.result)
    receiver.finish(outcome, opened.spec.hidden_size)
    assert (header.header.request_id, header.header.prompt_tokens) == ("r1", 100)
    assert header.header.model_digest == opened.manifest.model_digest

    with torch.inference_mode():
        batch = TokenBatch.of([(prompt, 0)])
        hidden = model.forward(batch, computed.for_pass(batch.segments, [blocks]))
    torch.testing.assert_close(received.keys, computed.keys, rtol=0, atol=1e-5)
    torch.testing.assert_close(received.values, computed.values, rtol=0, atol=1e-5)
    torch.testing.assert_close(from_bytes(outcome.last_hidden, model.dtype), hidden[-1], rtol=0, atol=1e-4)


INVALID, MISMATCH = "INVALID_ARGUMENT", "FAILED_PRECONDITION"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"token_ids": []}, INVALID, "the prompt is empty"),
    ({"token_ids": [1, 320]}, INVALID, "token id 320 is outside the vocabulary of 320"),
    ({"token_ids": [2] * (CONTEXT + 1)}, INVALID, "has 513 tokens, the model's context holds 512"),
    ({"request_id": "x" * 129}, INVALID, "request_id has 129 characters; at most 128"),
    ({"cache_salt": "x" * 129}, INVALID, "cache_salt has 129 characters; at most 128"),
    ({"priority": 101}, INVALID, "priority is 101; it must be from -100 to 100"),
    ({"priority": -101}, INVALID, "priority is -101; it must be from -100 to 100"),
    ({"held_tokens": 2}, INVALID, "held_tokens is 2, but the prompt has 2 tokens"),
    ({"model_digest": "f" * 64}, MISMATCH, "the caller expects ffffffffffff"),
    ({"model_digest": ""}, MISMATCH, "the caller expects none"),
    ({"kv_layout": kv_cache_pb2.KvLayout()}, MISMATCH, "KV layout has dtype 0"),
]


async def test_whatever_can_never_be_computed_is_refused_by_name_before_any_work(pack: Path) -> None:
    others = []
    for field, value in (("layers", 5), ("kv_heads", 4), ("head_dim", 8), ("dtype", kv_cache_pb2.KV_DTYPE_BF16)):
        other = layout_to_wire(layout_of(Pack.open(pack)))
        setattr(other, field, value)
        others.append(({"kv_layout": other}, MISMATCH, "KV layout differs"))
    async with replica(pack) as (prefill, stub):
        for changes, status, message in [*REFUSED, *others]:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Prefill(request_for(pack, **{"token_ids": [1, 2]} | changes)).read()
            assert (refused.value.code().name, message in str(refused.value.details())) == (status, True), changes
        assert prefill.telemetry.totals.passes == 0
        assert prefill.scheduler.queued == 0


async def test_a_call_that_is_cancelled_while_it_waits_leaves_nothing_behind(pack: Path) -> None:
    async with replica(pack, computes=False) as (prefill, stub):
        call = stub.Prefill(request_for(pack, [1, 2, 3]))
        await until(lambda: prefill.scheduler.queued == 1)
        call.cancel()
        await until(lambda: prefill.scheduler.queued == 0)


async def test_a_deadline_that_passes_while_a_prompt_waits_leaves_nothing_behind(pack: Path) -> None:
    async with replica(pack, computes=False) as (prefill, stub):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await everything_of(stub.Prefill(request_for(pack, [1, 2, 3]), timeout=0.2))
        assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: prefill.scheduler.queued == 0)


async def test_a_stalled_caller_is_told_so_and_its_neighbour_is_served(tiny_pack: TinyPack) -> None:
    path = tiny_pack("fp32", context=4096)
    layer_bytes = 3000 * 2 * layout_of(Pack.open(path)).token_bytes
    async with replica(path, NARROW, pass_tokens=4096, spool_bytes=2 * layer_bytes) as (prefill, stub):
        stalled = stub.Prefill(request_for(path, [5] * 3000))
        await stalled.read()
        neighbour = await everything_of(stub.Prefill(request_for(path, [6] * 20)))
        assert neighbour[-1].WhichOneof("event") == "result"
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await everything_of(stalled)
        assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "a caller that reads too slowly" in str(failed.value.details())
        await until(lambda: prefill.scheduler.running == 0)
        await until(lambda: prefill.spool.memory_bytes == 0)


async def test_with_a_spool_on_disk_a_stalled_caller_finds_its_handoff_when_it_goes_on_and_nothing_stays(
    tiny_pack: TinyPack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The disk of a busy machine may take longer for a file than a service would wait.
    monkeypatch.setattr("shared.spool.PATIENCE_S", PATIENCE_S)
    path = tiny_pack("fp32", context=4096)
    layout = layout_of(Pack.open(path))
    layer_bytes = 3000 * 2 * layout.token_bytes
    folder = SpoolFolder(tmp_path, 1 << 30)
    options: dict[str, Any] = {"pass_tokens": 4096, "spool_bytes": 3 * layer_bytes, "spool_folder": folder}
    async with replica(path, NARROW, **options) as (prefill, stub):
        stalled = stub.Prefill(request_for(path, [5] * 3000))
        await stalled.read()
        neighbour = await everything_of(stub.Prefill(request_for(path, [6] * 20)))
        assert neighbour[-1].WhichOneof("event") == "result"
        await until(lambda: prefill.spool.disk_bytes > layer_bytes)
        assert prefill.spool.memory_bytes <= 3 * layer_bytes
        receiver = HandoffReceiver(layout, 3000, lambda *_: None)
        *frames, result = await everything_of(stalled)
        for response in frames:
            receiver.accept(frame_from_wire(response.frame))
        receiver.finish(outcome_from_wire(result.result), Pack.open(path).spec.hidden_size)
        await until(lambda: prefill.spool.memory_bytes == prefill.spool.disk_bytes == 0)
        leaving = stub.Prefill(request_for(path, [5] * 3000))
        await leaving.read()
        await until(lambda: prefill.spool.disk_bytes > 0)
        leaving.cancel()
        await until(lambda: prefill.spool.memory_bytes == prefill.spool.disk_bytes == 0)


async def test_a_full_queue_is_answered_as_such(pack: Path) -> None:
    async with replica(pack, computes=False, queue_limit=1) as (prefill, stub):
        waiting = stub.Prefill(request_for(pack, [1]))
        await until(lambda: prefill.scheduler.queued == 1)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Prefill(request_for(pack, [1])).read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        waiting.cancel()


async def test_a_draining_replica_finishes_what_it_has_and_refuses_the_rest(pack: Path) -> None:
    async with replica(pack) as (prefill, stub):
        running = stub.Prefill(request_for(pack, [2] * 400))
        await running.read()
        prefill.scheduler.close()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Prefill(request_for(pack, [1])).read()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "draining" in str(refused.value.details())
        *_, last = await everything_of(running)
        assert last.WhichOneof("event") == "result"
