"""Calling prefill: another replica when one fails, and nothing accepted that is not exactly the handoff asked for."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from decode_service.prefill_client import ROUNDS, PrefillClient
from decode_service.replicas import SILENT_S
from headrace.v1 import prefill_pb2, prefill_pb2_grpc, status_pb2, status_pb2_grpc
from shared.config import parse_address
from shared.errors import (
    CapacityError,
    DataLossError,
    DeadlineError,
    HeadraceError,
    InvalidRequestError,
    ModelMismatchError,
    UnavailableError,
)
from shared.kv.handoff import PrefillOutcome
from shared.kv.layout import layout_of
from shared.pack.reader import Pack
from shared.wire import layout_to_wire
from tests.conftest import TinyPack
from tests.end_to_end.stack import prefill_replica, until

PROMPT = [3, 4, 5, 6, 7]
Events = list[prefill_pb2.PrefillResponse]
Stored = list[tuple[int, int, bytes, bytes]]


@pytest.fixture(scope="module")
def pack(tiny_pack: TinyPack) -> Path:
    return tiny_pack("fp32")


@asynccontextmanager
async def client_of(path: Path, *addresses: str, silent_s: float = SILENT_S) -> AsyncIterator[PrefillClient]:
    pack = Pack.open(path)
    client = PrefillClient(
        list(addresses),
        model_digest=pack.manifest.model_digest,
        layout=layout_of(pack),
        hidden_size=pack.spec.hidden_size,
        sample=lambda replicas, count: list(replicas[:count]),
        silent_s=silent_s,
    )
    try:
        yield client
    finally:
        await client.close()


async def prefilled(
    client: PrefillClient, prompt: list[int] = PROMPT, timeout_s: float = 60, **options: Any
) -> tuple[PrefillOutcome, Stored]:
    """The outcome, and what was stored since the last beginning."""
    stored: Stored = []

    def store(*frame: Any) -> None:
        if frame[:2] == (0, options.get("held_tokens", 0)):
            stored.clear()
        stored.append(frame)

    return await client.prefill("r1", prompt, store, timeout_s, **options), stored


async def dead_address(path: Path) -> str:
    """Where a replica was, and is no more."""
    async with prefill_replica(path) as gone:
        return gone.address


class Script(prefill_pb2_grpc.PrefillServiceServicer):
    """A replica that gives the recorded answers of a real one, changed by a fault."""

    def __init__(self, events: Events, fault: Callable[[Events], Events]) -> None:
        self._events = fault(events)
        self.calls = 0

    async def Prefill(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.calls += 1
        for event in self._events:
            if event is BREAK:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "killed")
            yield event


BREAK = prefill_pb2.PrefillResponse()
"""Where the replica dies."""


@asynccontextmanager
async def scripted(path: Path, fault: Callable[[Events], Events]) -> AsyncIterator[tuple[str, Script]]:
    servicer = Script(await recorded(path), fault)
    server = grpc.aio.server()
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", servicer
    finally:
        await server.stop(None)


async def recorded(path: Path) -> Events:
    """What a real replica answers."""
    pack = Pack.open(path)
    request = prefill_pb2.PrefillRequest(
        token_ids=PROMPT,
        model_digest=pack.manifest.model_digest,
        kv_layout=layout_to_wire(layout_of(pack)),
        request_id="r1",
    )
    async with prefill_replica(path) as replica, grpc.aio.insecure_channel(replica.address) as channel:
        return [event async for event in prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(request)]


async def test_a_prompt_is_stored_layer_by_layer(pack: Path) -> None:
    async with prefill_replica(pack) as replica, client_of(pack, replica.address) as client:
        outcome, stored = await prefilled(client)
    size = len(PROMPT) * layout_of(Pack.open(pack)).token_bytes
    assert [(layer, first, len(keys), len(values)) for layer, first, keys, values in stored] == [
        (layer, 0, size, size) for layer in range(4)
    ]
    assert outcome.frame_count == 4


async def test_tokens_whose_keys_and_values_are_held_are_not_sent_and_the_rest_is_the_same(pack: Path) -> None:
    async with prefill_replica(pack) as replica, client_of(pack, replica.address) as client:
        (whole, everything), (rest, part) = [await prefilled(client, held_tokens=held) for held in (0, 2)]
    held_bytes = 2 * layout_of(Pack.open(pack)).token_bytes
    assert part == [(layer, 2, keys[held_bytes:], values[held_bytes:]) for layer, _, keys, values in everything]
    assert rest.last_hidden == whole.last_hidden


async def test_replicas_that_are_down_are_passed_over(pack: Path) -> None:
    dead = await dead_address(pack)
    async with prefill_replica(pack) as replica, client_of(pack, dead, replica.address) as client:
        for _ in range(3):
            await prefilled(client)
        assert replica.telemetry.totals.passes == 3


async def test_where_all_are_down_the_error_says_so_and_names_one(pack: Path) -> None:
    dead = await dead_address(pack)
    async with client_of(pack, dead) as client:
        with pytest.raises(UnavailableError, match=f"prefill replica {dead}: "):
            await prefilled(client)


async def test_a_replica_that_comes_up_later_is_found(pack: Path) -> None:
    address = await dead_address(pack)
    async with client_of(pack, address) as client:
        with pytest.raises(UnavailableError):
            await prefilled(client)
        async with prefill_replica(pack, address=parse_address(address)):
            found = None
            while found is None:
                try:
                    found, _ = await prefilled(client)
                except UnavailableError:
                    continue
        assert found.frame_count == 4


async def test_a_replica_that_dies_halfway_costs_a_retry_from_the_beginning(pack: Path) -> None:
    async with (
        scripted(pack, lambda events: [*events[:3], BREAK]) as (dying, script),
        prefill_replica(pack) as replica,
        client_of(pack, dying, replica.address) as client,
    ):
        outcome, stored = await prefilled(client)
        assert script.calls == 1
        assert replica.telemetry.totals.passes == 1
    assert [layer for layer, *_ in stored] == [0, 1, 2, 3]
    assert outcome.frame_count == 4


async def test_replicas_share_the_work(pack: Path) -> None:
    async with (
        prefill_replica(pack, computes=False) as busy,
        prefill_replica(pack) as free,
        client_of(pack, busy.address, free.address) as client,
    ):
        waiting = asyncio.create_task(prefilled(client))
        await until(lambda: busy.scheduler.queued == 1)
        for _ in range(3):
            await prefilled(client)
        assert free.telemetry.totals.passes == 3
        waiting.cancel()
        await until(lambda: busy.scheduler.queued == 0)


async def test_another_model_is_a_mismatch_everywhere_and_nothing_is_computed(pack: Path, tiny_pack: TinyPack) -> None:
    async with prefill_replica(tiny_pack("fp32", seed=5)) as other, client_of(pack, other.address) as client:
        with pytest.raises(ModelMismatchError, match="deploy one pack to both"):
            await prefilled(client)
        assert other.telemetry.totals.passes == 0


async def test_a_mismatched_replica_is_reported_once_and_does_not_stop_a_good_one(
    pack: Path, tiny_pack: TinyPack, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        prefill_replica(tiny_pack("fp32", seed=5)) as other,
        prefill_replica(pack) as good,
        client_of(pack, other.address, good.address) as client,
    ):
        for _ in range(3):
            await prefilled(client)
        assert (other.telemetry.totals.passes, good.telemetry.totals.passes) == (0, 3)
    (report,) = [message for message in caplog.messages if "prefill replica" in message]
    assert f"{other.address} does not fit" in report
    assert "deploy one pack to both" in report


async def test_a_bad_prompt_is_not_tried_again(pack: Path) -> None:
    async with prefill_replica(pack) as replica, client_of(pack, replica.address, replica.address) as client:
        with pytest.raises(InvalidRequestError, match="token id 999 is outside"):
            await prefilled(client, [999])


async def test_a_full_queue_means_another_replica_and_is_no_failure(
    pack: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        prefill_replica(pack, queue_limit=0) as full,
        prefill_replica(pack) as free,
        client_of(pack, full.address, free.address) as client,
    ):
        caplog.clear()
        for _ in range(2):
            await prefilled(client)
        assert free.telemetry.totals.passes == 2
        assert "prefill replica" not in caplog.text


async def test_what_a_replica_has_queued_for_others_counts_too(pack: Path) -> None:
    async with (
        prefill_replica(pack, computes=False) as busy,
        prefill_replica(pack) as free,
        client_of(pack, busy.address) as other,
        client_of(pack, busy.address, free.address) as client,
    ):
        waiting = asyncio.create_task(prefilled(other))
        await until(lambda: busy.scheduler.queued == 1)
        await prefilled(client)
        assert free.telemetry.totals.passes == 1
        waiting.cancel()
        await until(lambda: busy.scheduler.queued == 0)


async def test_a_deadline_that_passes_is_no_failure_of_the_replica(
    pack: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        prefill_replica(pack, computes=False) as slow,
        prefill_replica(pack, computes=False) as other,
        client_of(pack, slow.address, other.address) as client,
    ):
        for _ in range(2):
            with pytest.raises(DeadlineError):
                await prefilled(client, timeout_s=0.1)
            await until(lambda: slow.scheduler.queued == 0)
        waiting = asyncio.create_task(prefilled(client))
        await until(lambda: slow.scheduler.queued == 1)
        waiting.cancel()
        await until(lambda: slow.scheduler.queued == 0)
        assert "prefill replica" not in caplog.text


async def test_retries_end_with_the_deadline(pack: Path) -> None:
    async with client_of(pack, await dead_address(pack)) as client:
        with pytest.raises(DeadlineError, match="the deadline passed"):
            await prefilled(client, timeout_s=0.05)


async def test_a_replica_that_is_draining_costs_the_caller_nothing(pack: Path) -> None:
    async with (
        prefill_replica(pack) as leaving,
        prefill_replica(pack) as staying,
        client_of(pack, leaving.address, staying.address) as client,
    ):
        leaving.scheduler.close()
        for _ in range(3):
            await prefilled(client)
        assert staying.telemetry.totals.passes == 3


@pytest.mark.parametrize("form", ["localhost:{port}", "dns:///localhost:{port}", "dns:localhost:{port}"])
async def test_replicas_are_found_by_name(pack: Path, form: str) -> None:
    async with prefill_replica(pack) as replica:
        async with client_of(pack, form.format(port=replica.server.address.port)) as client:
            await prefilled(client)
        assert replica.telemetry.totals.passes == 1


async def test_a_full_queue_is_reported_as_such(pack: Path) -> None:
    async with prefill_replica(pack, queue_limit=0) as replica, client_of(pack, replica.address) as client:
        with pytest.raises(CapacityError, match="0 prompts are waiting already"):
            await prefilled(client)


def replaced(index: int, **changes: Any) -> Callable[[Events], Events]:
    """The recorded answer with one frame changed."""

    def fault(events: Events) -> Events:
        changed = prefill_pb2.PrefillResponse()
        changed.CopyFrom(events[index])
        for name, value in changes.items():
            setattr(getattr(changed, changed.WhichOneof("event") or ""), name, value)
        return [*events[:index], changed, *events[index + 1 :]]

    return fault


@dataclasses.dataclass(frozen=True)
class Fault:
    """A way in which a handoff is not what was asked for."""

    apply: Callable[[Events], Events]
    error: type[HeadraceError]
    message: str


FAULTS = {
    "another request": Fault(replaced(0, request_id="r2"), DataLossError, "answers another request"),
    "another length": Fault(replaced(0, prompt_tokens=4), DataLossError, "answers another request"),
    "another model": Fault(replaced(0, model_digest="e" * 64), ModelMismatchError, "answers with model eeeeeeeeeeee"),
    "frames swapped": Fault(lambda e: [e[0], e[2], e[1], *e[3:]], DataLossError, "handoff out of order"),
    "a frame twice": Fault(lambda e: [*e[:2], e[1], *e[2:]], DataLossError, "handoff out of order"),
    "a frame lost": Fault(lambda e: [*e[:2], *e[3:]], DataLossError, "handoff out of order"),
    "the last frame lost": Fault(lambda e: [*e[:-2], e[-1]], DataLossError, "handoff ended after 3 of 4 frames"),
    "one frame too many": Fault(lambda e: [*e[:-1], e[-2], e[-1]], DataLossError, "handoff out of order"),
    "bytes changed": Fault(replaced(2, crc32=1), DataLossError, "does not match its checksum"),
    "wrong size": Fault(replaced(2, keys=b"1234"), DataLossError, "has the wrong size"),
    "no tokens": Fault(replaced(2, token_count=0), DataLossError, "has the wrong size"),
    "short features": Fault(replaced(-1, last_hidden=b"1234"), DataLossError, "4 bytes of features, not 256"),
    "no result": Fault(lambda e: e[:-1], DataLossError, "ended without a result"),
    "nothing": Fault(lambda e: [], DataLossError, "ended without a result"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_handoff_that_is_not_exactly_what_was_asked_for_is_an_error_and_is_tried_elsewhere(
    pack: Path, fault: str
) -> None:
    async with scripted(pack, FAULTS[fault].apply) as (bad, script):
        async with client_of(pack, bad) as client:
            with pytest.raises(FAULTS[fault].error, match=FAULTS[fault].message):
                await prefilled(client)
        assert script.calls == ROUNDS
        async with prefill_replica(pack) as good, client_of(pack, bad, good.address) as client:
            outcome, _ = await prefilled(client)
            assert outcome.frame_count == 4


class Hanging(prefill_pb2_grpc.PrefillServiceServicer, status_pb2_grpc.StatusServiceServicer):
    """A replica that takes a call and then says nothing, until it is let go; if it gets stuck, of its status either."""

    def __init__(self, gets_stuck: bool) -> None:
        self._gets_stuck = gets_stuck
        self._stuck = False
        self.let_go = asyncio.Event()
        self.asked = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def Prefill(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self._stuck = self._gets_stuck
        try:
            await self.let_go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        await context.abort(grpc.StatusCode.UNAVAILABLE, "let go")
        yield

    async def GetStatus(self, request: Any, context: Any) -> status_pb2.GetStatusResponse:
        self.asked.set()
        if self._stuck:
            await asyncio.Event().wait()
        return status_pb2.GetStatusResponse()


@asynccontextmanager
async def hanging(*, gets_stuck: bool) -> AsyncIterator[tuple[str, Hanging]]:
    servicer = Hanging(gets_stuck)
    server = grpc.aio.server()
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server)
    status_pb2_grpc.add_StatusServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", servicer
    finally:
        await server.stop(None)


async def test_a_replica_that_hangs_without_dying_is_left_for_another(pack: Path) -> None:
    async with (
        hanging(gets_stuck=True) as (stuck, servicer),
        prefill_replica(pack) as alive,
        client_of(pack, stuck, alive.address, silent_s=0.05) as client,
    ):
        _, stored = await prefilled(client)
        assert stored
        await asyncio.wait_for(servicer.cancelled.wait(), 60)


async def test_a_replica_that_is_silent_and_alive_is_waited_for(pack: Path) -> None:
    async with hanging(gets_stuck=False) as (slow, servicer), client_of(pack, slow, silent_s=0.05) as client:
        waiting = asyncio.create_task(prefilled(client))
        for _ in range(3):
            servicer.asked.clear()
            await asyncio.wait_for(servicer.asked.wait(), 60)
        assert not waiting.done()
        servicer.let_go.set()
        with pytest.raises(UnavailableError, match="let go"):
            await waiting
