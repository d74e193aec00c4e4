"""A small real decode servicer, served in this process or, as a program, in another one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from headrace.v1 import decode_pb2, decode_pb2_grpc
from shared.metrics import Gauges, Identity, Telemetry
from shared.process import setup_logging
from shared.server import RunningServer, ServerOptions, Service, run_server, serving

NAME = "headrace.v1.DecodeService"


class EchoServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Answers a prompt with itself, or raises `failure`; a stream waits for `proceed` between header and result."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.proceed = asyncio.Event()
        self.writing = asyncio.Event()
        """Set when the chunk is about to be written."""
        self.closed = asyncio.Event()

    async def Complete(self, request: Any, context: Any) -> Any:
        if self.failure:
            raise self.failure
        return decode_pb2.CompleteResponse(text=request.prompt.text)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            yield decode_pb2.GenerateResponse(header=decode_pb2.GenerationHeader(request_id=request.request_id))
            await self.proceed.wait()
            if self.failure:
                raise self.failure
            self.writing.set()
            yield decode_pb2.GenerateResponse(chunk=decode_pb2.GenerationChunk(text=request.prompt.text))
        finally:
            self.closed.set()


@dataclass
class Echo:
    """The servicer, what is asked about it, and a telemetry with known numbers."""

    servicer: EchoServicer = field(default_factory=EchoServicer)
    is_healthy: Callable[[], bool] = lambda: True
    drained: bool = False
    telemetry: Telemetry = field(
        default_factory=lambda: Telemetry(
            Identity(stage="decode", model_digest="ab", scheme="int8", context_length=64, layers=4, budget_bytes=10**9),
            Gauges(queued=lambda: 3),
        )
    )

    @property
    def service(self) -> Service:
        return Service(
            name=NAME,
            register=lambda server: decode_pb2_grpc.add_DecodeServiceServicer_to_server(self.servicer, server),
            telemetry=self.telemetry,
            is_healthy=lambda: self.is_healthy(),
            on_drain=lambda: setattr(self, "drained", True),
        )

    @asynccontextmanager
    async def served(self, **options: Any) -> AsyncIterator[tuple[RunningServer, grpc.aio.Channel]]:
        """The running server and an open channel to it."""
        async with (
            serving(self.service, ServerOptions(health_poll_s=0.01, **options)) as server,
            grpc.aio.insecure_channel(str(server.address)) as channel,
        ):
            yield server, channel


def request(text: str = "water") -> decode_pb2.CompleteRequest:
    """A unary request that is echoed."""
    return decode_pb2.CompleteRequest(prompt=decode_pb2.Prompt(text=text))


def stream_request(text: str = "water") -> decode_pb2.GenerateRequest:
    """The same for the stream."""
    return decode_pb2.GenerateRequest(prompt=decode_pb2.Prompt(text=text), request_id="r1")


async def _main() -> None:
    await run_server(Echo().service, ServerOptions())


if __name__ == "__main__":
    setup_logging("info")
    asyncio.run(_main())
