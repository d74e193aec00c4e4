"""The serving base, over real connections."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status

from decode_service.prefill_client_channel import REPLICA_OPTIONS
from headrace.target import balanced
from headrace.v1 import decode_pb2_grpc, status_pb2, status_pb2_grpc
from shared.config import CHANNEL_OPTIONS, Address
from shared.errors import (
    BudgetError,
    CapacityError,
    ConfigurationError,
    DataLossError,
    InvalidRequestError,
    ModelMismatchError,
    UnavailableError,
)
from shared.server import _SERVER_OPTIONS, ServerOptions, TlsFiles, run_server, serving
from tests.end_to_end.stack import NARROW
from tests.shared.serving import NAME, Echo, request, stream_request

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
ENDED = (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
"""What a client sees of a call that the server ended; which one depends on how fast the connection goes."""


async def _failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    return failure.value


def _details(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo:
    status = rpc_status.from_call(_Trailers(error))
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return info


class _Trailers:
    """An asynchronous error, in the shape that `rpc_status.from_call` reads."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code, self.details = error.code, error.details
        self.trailing_metadata = lambda: tuple(error.trailing_metadata())


async def test_health_follows_the_engine_and_recovers() -> None:
    echo = Echo()
    async with echo.served() as (_, channel):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=NAME))

        async def becomes(status: int) -> None:
            while (await watch.read()).status != status:
                pass

        await becomes(SERVING)
        echo.is_healthy = lambda: False
        await becomes(NOT_SERVING)
        echo.is_healthy = lambda: True
        await becomes(SERVING)
        watch.cancel()


async def test_a_health_question_that_fails_means_not_serving() -> None:
    echo = Echo()
    echo.is_healthy = lambda: 1 / 0 > 0
    async with echo.served() as (_, channel):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        while (await watch.read()).status != NOT_SERVING:
            pass
        watch.cancel()


async def test_reflection_lists_all_services_and_describes_ours() -> None:
    async with Echo().served() as (server, _):

        def look() -> tuple[set[str], str]:
            with grpc.insecure_channel(str(server.address)) as channel:
                database = ProtoReflectionDescriptorDatabase(channel)
                return set(database.get_services()), database.FindFileContainingSymbol(NAME).name

        services, file_name = await asyncio.to_thread(look)
    assert services == {
        NAME,
        "headrace.v1.StatusService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert file_name == "headrace/v1/decode.proto"


async def test_status_reports_what_telemetry_counts() -> None:
    echo = Echo()
    echo.telemetry.record_pass(0.1, requests=2, generated_tokens=5)
    async with echo.served() as (_, channel):
        status = await status_pb2_grpc.StatusServiceStub(channel).GetStatus(status_pb2.GetStatusRequest())
    assert (status.stage, status.scheme, status.layers) == (status_pb2.STAGE_DECODE, "int8", 4)
    assert (status.queued, status.passes, status.batched_requests, status.generated_tokens) == (3, 1, 2, 5)
    assert status.peak_rss_bytes > 0


async def test_prometheus_shows_the_same_numbers() -> None:
    echo = Echo()
    echo.telemetry.add(streamed_bytes=4096)
    async with echo.served(metrics_address=Address("127.0.0.1", 0)) as (server, _):
        url = f"http://{server.metrics_address}/metrics"
        text = (await asyncio.to_thread(lambda: urllib.request.urlopen(url).read())).decode()
    assert 'headrace_streamed_bytes_total{stage="decode"} 4096.0' in text
    assert 'headrace_queued_requests{stage="decode"} 3.0' in text


ERROR_TABLE = [
    (InvalidRequestError("top_p is 2"), grpc.StatusCode.INVALID_ARGUMENT),
    (ModelMismatchError("digest ab, here cd"), grpc.StatusCode.FAILED_PRECONDITION),
    (CapacityError("queue is full"), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (UnavailableError("layer 3 cannot be read"), grpc.StatusCode.UNAVAILABLE),
    (DataLossError("layer 3 is damaged"), grpc.StatusCode.DATA_LOSS),
    (ConfigurationError("no draft"), grpc.StatusCode.FAILED_PRECONDITION),
    (BudgetError("needs 2 GiB"), grpc.StatusCode.FAILED_PRECONDITION),
]


@pytest.mark.parametrize("streamed", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize(("error", "code"), ERROR_TABLE, ids=lambda value: type(value).__name__)
async def test_each_error_has_its_status_its_message_and_its_reason(
    error: Exception, code: grpc.StatusCode, streamed: bool
) -> None:
    echo = Echo()
    echo.servicer.failure = error
    echo.servicer.proceed.set()
    async with echo.served() as (_, channel):
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        call = _rest(stub.Generate(stream_request())) if streamed else stub.Complete(request())
        answer = await _failure(call)
    assert (answer.code(), answer.details()) == (code, str(error))
    assert (_details(answer).reason, _details(answer).domain) == (type(error).__name__, "headrace")


async def _rest(call: Any) -> list[Any]:
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


async def test_an_unknown_error_is_internal_and_quotes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    echo = Echo()
    echo.servicer.failure = KeyError("the patient's name")
    with caplog.at_level(logging.INFO):
        async with echo.served() as (_, channel):
            answer = await _failure(decode_pb2_grpc.DecodeServiceStub(channel).Complete(request()))
    assert (answer.code(), answer.details()) == (grpc.StatusCode.INTERNAL, "internal error")
    assert _details(answer).reason == "InternalError"
    assert "KeyError" in caplog.text
    assert "raise self.failure" in caplog.text
    assert "patient" not in caplog.text


async def test_a_long_or_foreign_message_still_arrives() -> None:
    echo = Echo()
    echo.servicer.failure = InvalidRequestError("Ä" * 5000)
    async with echo.served() as (_, channel):
        answer = await _failure(decode_pb2_grpc.DecodeServiceStub(channel).Complete(request()))
    assert answer.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert answer.details().startswith("ÄÄÄ")


async def test_failures_are_counted_by_class() -> None:
    echo = Echo()
    echo.servicer.failure = CapacityError("full")
    async with echo.served() as (_, channel):
        await _failure(decode_pb2_grpc.DecodeServiceStub(channel).Complete(request()))
    assert failures_of(echo) == [("CapacityError", 1)]


def failures_of(echo: Echo) -> list[tuple[str, float]]:
    """Calls that failed, by class of error."""
    failures = next(family for family in echo.telemetry.collect() if family.name == "headrace_failures")
    return [(sample.labels["kind"], sample.value) for sample in failures.samples]


def test_no_client_of_ours_asks_more_often_than_servers_allow() -> None:
    allowed = dict(_SERVER_OPTIONS)
    for options in (dict(CHANNEL_OPTIONS), dict(REPLICA_OPTIONS), dict(balanced("127.0.0.1:1").options)):
        asks_ms = options["grpc.keepalive_time_ms"]
        assert asks_ms >= 2 * allowed["grpc.http2.min_recv_ping_interval_without_data_ms"]
        assert options["grpc.keepalive_timeout_ms"] < asks_ms
        assert (options["grpc.keepalive_permit_without_calls"], options["grpc.http2.max_pings_without_data"]) == (0, 0)


async def test_a_cancelled_stream_closes_its_generator() -> None:
    echo = Echo()
    async with echo.served() as (_, channel):
        call = decode_pb2_grpc.DecodeServiceStub(channel).Generate(stream_request())
        assert (await call.read()).header.request_id == "r1"
        call.cancel()
        await echo.servicer.closed.wait()


async def test_a_client_that_leaves_in_the_middle_of_a_message_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    echo = Echo()
    async with echo.served() as (server, _), grpc.aio.insecure_channel(str(server.address), options=NARROW) as channel:
        call = decode_pb2_grpc.DecodeServiceStub(channel).Generate(stream_request("x" * 2_000_000))
        await call.read()
        echo.servicer.proceed.set()
        await echo.servicer.writing.wait()
        call.cancel()
        await echo.servicer.closed.wait()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert failures_of(echo) == []


@pytest.mark.parametrize("streamed", [False, True], ids=["unary", "stream"])
async def test_bytes_that_are_no_request_are_an_invalid_argument(
    streamed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    echo = Echo()
    async with echo.served() as (_, channel):
        call = (
            channel.unary_stream(f"/{NAME}/Generate")(b"\xff\xff\xff").read()
            if streamed
            else channel.unary_unary(f"/{NAME}/Complete")(b"\xff\xff\xff")
        )
        answer = await _failure(call)
    assert (answer.code(), _details(answer).reason) == (grpc.StatusCode.INVALID_ARGUMENT, "InvalidRequestError")
    assert "no message of this method" in str(answer.details())
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert failures_of(echo) == [("InvalidRequestError", 1)]


async def test_draining_finishes_what_runs_and_refuses_what_comes() -> None:
    echo = Echo()
    async with echo.served() as (server, channel):
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        call = stub.Generate(stream_request("a long report"))
        await call.read()

        drain = asyncio.ensure_future(server.drain())
        assert (await watch.read()).status == NOT_SERVING
        refusal = await _failure(stub.Complete(request()))
        assert (refusal.code(), echo.drained) == (grpc.StatusCode.UNAVAILABLE, True)
        assert "draining" in refusal.details()
        assert not drain.done()

        echo.servicer.proceed.set()
        assert [response.chunk.text for response in await _rest(call)] == ["a long report"]
        assert await call.code() is grpc.StatusCode.OK
        await drain


async def test_draining_ends_what_outlasts_the_grace_time() -> None:
    echo = Echo()
    async with echo.served(grace_s=0.01) as (server, channel):
        call = decode_pb2_grpc.DecodeServiceStub(channel).Generate(stream_request())
        await call.read()
        await server.drain()
        await echo.servicer.closed.wait()
        assert (await _failure(_rest(call))).code() in ENDED


@pytest.mark.parametrize("setting", ["address", "metrics_address"])
async def test_a_taken_port_is_refused_with_the_address(setting: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        address = Address("127.0.0.1", holder.getsockname()[1])
        with pytest.raises(ConfigurationError, match=f"cannot listen on {address}.*choose another"):
            await run_server(Echo().service, ServerOptions(**{setting: address}))


async def test_tls_serves_clients_with_a_certificate_and_nobody_else(tmp_path: Path) -> None:
    if not shutil.which("openssl"):
        pytest.skip("making certificates needs the openssl program")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    await asyncio.to_thread(
        subprocess.run,
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost "
        f"-addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}",
        shell=True,
        check=True,
        capture_output=True,
    )
    tls = TlsFiles(certificate=certificate, key=key, client_ca=certificate)
    async with serving(Echo().service, ServerOptions(tls=tls)) as server:
        known = grpc.ssl_channel_credentials(certificate.read_bytes(), key.read_bytes(), certificate.read_bytes())
        async with grpc.aio.secure_channel(str(server.address), known) as channel:
            assert (await decode_pb2_grpc.DecodeServiceStub(channel).Complete(request())).text == "water"
        stranger = grpc.ssl_channel_credentials(certificate.read_bytes())
        async with grpc.aio.secure_channel(str(server.address), stranger) as channel:
            failure = await _failure(decode_pb2_grpc.DecodeServiceStub(channel).Complete(request()))
            assert failure.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_missing_tls_file_is_named(tmp_path: Path) -> None:
    tls = TlsFiles(certificate=tmp_path / "c.pem", key=tmp_path / "k.pem")
    with pytest.raises(ConfigurationError, match=r"cannot read TLS file .*k\.pem"):
        await run_server(Echo().service, ServerOptions(tls=tls))


@asynccontextmanager
async def _child() -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A served process, and its address from the ready line."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.shared.serving", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout
        ready = json.loads(await process.stdout.readline())
        assert (ready["event"], ready["service"], ready["metrics"]) == ("ready", "decode", None)
        yield process, ready["address"]
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
async def test_a_signal_drains_a_real_process_which_exits_0(number: signal.Signals) -> None:
    async with _child() as (process, address), grpc.aio.insecure_channel(address) as channel:
        assert (await decode_pb2_grpc.DecodeServiceStub(channel).Complete(request())).text == "water"
        process.send_signal(number)
        more_output, log = await process.communicate()
    assert (process.returncode, more_output) == (0, b"")
    assert f"draining on {number.name}" in log.decode()


async def test_a_second_signal_stops_at_once() -> None:
    async with _child() as (process, address), grpc.aio.insecure_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        call = decode_pb2_grpc.DecodeServiceStub(channel).Generate(stream_request())
        await call.read()
        process.send_signal(signal.SIGTERM)
        while (await watch.read()).status != NOT_SERVING:
            pass
        process.send_signal(signal.SIGTERM)
        assert (await _failure(_rest(call))).code() in ENDED
        await process.communicate()
    assert process.returncode == 0
