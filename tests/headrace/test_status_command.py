"""`headrace status`: real services of both stages, one that drains, one that cannot work, and one that is gone."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.client_health import conditions
from shared.config import Address
from shared.metrics import Gauges, Identity, Telemetry
from shared.server import RunningServer, ServerOptions, Service, serving
from tests.conftest import TinyPack
from tests.end_to_end.stack import decode_replica, prefill_replica
from tests.headrace.processes import run, start

NAME = "headrace.v1.DecodeService"
IDENTITY = Identity(stage="decode", model_digest="d1" * 32, scheme="int8", context_length=1, layers=1, budget_bytes=1)
GAUGES = Gauges(queued=lambda: 3, kv_blocks=lambda: 9, kv_blocks_used=lambda: 2)


@dataclass
class Engine:
    """What a server asks of its engine, and a call that ends when it is told to."""

    healthy: bool = True
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    end: asyncio.Event = field(default_factory=asyncio.Event)

    async def call(self, request: bytes, context: Any) -> bytes:
        self.begun.set()
        await self.end.wait()
        return b""

    @asynccontextmanager
    async def served(self) -> AsyncIterator[RunningServer]:
        """The real server around it."""
        handlers = {"Call": grpc.unary_unary_rpc_method_handler(self.call, bytes, bytes)}
        service = Service(
            name=NAME,
            register=lambda server: server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(NAME, handlers),)
            ),
            telemetry=Telemetry(IDENTITY, GAUGES),
            is_healthy=lambda: self.healthy,
        )
        async with serving(service, ServerOptions(address=Address("127.0.0.1", 0), health_poll_s=0.02)) as server:
            yield server


async def test_it_shows_services_of_both_stages_in_one_table(tiny_pack: TinyPack) -> None:
    pack: Path = tiny_pack("fp32")
    async with prefill_replica(pack) as prefill, decode_replica(pack, prefill.address) as decode:
        await decode.client.complete(token_ids=[3, 4, 5], max_tokens=2)
        code, stdout, stderr = await run("status", f"{prefill.address},{decode.address}")
        as_json = await run("status", prefill.address, decode.address, "--json")
        digest = decode.telemetry.identity.model_digest
        (status,) = await decode.client.status()
    assert (code, stderr) == (0, "")
    heading, first, second = [line.split() for line in stdout.splitlines()]
    assert heading[:3] == ["address", "stage", "model"]
    assert first == [prefill.address, "prefill", digest[:12], "0", "0", "0", "256", "serving"]
    assert second == [decode.address, "decode", digest[:12], "0", "0", "0", f"{status.kv_blocks:,}", "serving"]
    found = json.loads(as_json[1])
    assert (as_json[0], found["serving"], found["of"]) == (0, 2, 2)
    assert [(each["stage"], each["health"], each["queued"]) for each in found["services"]] == [
        ("prefill", "serving", 0),
        ("decode", "serving", 0),
    ]
    assert found["services"][1]["generated_tokens"] == status.generated_tokens == 2


async def test_one_that_is_not_serving_or_gone_is_a_row_and_exit_code_1() -> None:
    async with Engine().served() as gone:
        pass
    async with Engine(healthy=False).served() as sick, Engine().served() as well:
        code, stdout, _ = await run("status", str(sick.address), str(gone.address), str(well.address))
    assert code == 1
    rows = {line.split()[0]: line.strip().split(maxsplit=7)[1:] for line in stdout.splitlines()[1:4]}
    assert rows[str(sick.address)][2:] == ["3", "0", "0", "7", "not serving"]
    assert rows[str(gone.address)] == ["–"] * 6 + ["unreachable"]
    assert rows[str(well.address)][-1] == "serving"
    assert str(gone.address) in stdout.splitlines()[4]


async def test_watching_it_sees_a_service_drain_and_ends_with_ctrl_c() -> None:
    engine = Engine()
    async with engine.served() as server:
        process = await start("status", str(server.address), "--watch", "--every", "10ms", "--json")
        assert process.stdout is not None

        async def seen(health: str) -> dict[str, Any]:
            assert process.stdout is not None
            while True:
                found: dict[str, Any] = json.loads(await process.stdout.readline())
                if found["services"][0]["health"] == health:
                    return found

        assert (await seen("serving"))["serving"] == 1
        engine.healthy = False
        assert (await seen("not serving"))["serving"] == 0
        process.send_signal(signal.SIGINT)
        _, stderr = await process.communicate()
    assert (process.returncode, stderr) == (1, b"")


async def test_a_service_that_drains_says_so_while_it_finishes_what_runs() -> None:
    engine = Engine()
    async with engine.served() as server, grpc.aio.insecure_channel(str(server.address)) as channel:
        call = channel.unary_unary(f"/{NAME}/Call")(b"")
        await engine.begun.wait()
        drain = asyncio.ensure_future(server.drain())
        while True:
            (found,) = await asyncio.to_thread(conditions, [str(server.address)])
            if found.health != "serving":
                break
        code, stdout, _ = await run("status", str(server.address))
        engine.end.set()
        await call
        await drain
    assert found.health == "draining"
    assert (code, stdout.split()[-1]) == (1, "draining")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("localhost",), "has no port"),
        (("127.0.0.1:1", "--every", "0s"), "longer than nothing"),
    ],
)
def test_what_cannot_work_is_told(arguments: tuple[str, ...], says: str) -> None:
    result = CliRunner().invoke(app, ["status", *arguments])
    assert result.exit_code == 2
    assert says in result.stderr
