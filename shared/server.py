"""Serving a gRPC service: health, reflection, status, metrics, and a drain that loses nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry, start_http_server

from headrace.v1 import status_pb2 as api
from headrace.v1 import status_pb2_grpc as api_grpc
from shared.calls import Calls
from shared.config import KEEPALIVE_S, Address
from shared.errors import ConfigurationError
from shared.metrics import Telemetry

_log = logging.getLogger(__name__)

_LAST_BYTES_S = 1.0
"""What finished calls get to send their last bytes, and health watchers to see the change, before connections close."""

_SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a taken port is an error, not a share of somebody else's calls
    ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Half the clients' interval, so that a ping that is early by some jitter is not a strike.
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_S * 500),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_S * 500),
)


ANY_LOOPBACK_PORT = Address("127.0.0.1", 0)


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """PEM files. With `client_ca`, clients must show a certificate that it signed."""

    certificate: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where and how to listen. Port 0 takes any free one."""

    address: Address = ANY_LOOPBACK_PORT
    metrics_address: Address | None = None
    """Where Prometheus scrapes; None turns it off."""
    tls: TlsFiles | None = None
    grace_s: float = 30.0
    """What calls in flight get to finish when the process is asked to stop."""
    health_poll_s: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Service:
    """What is served, and how it takes part in the server's life."""

    name: str
    """Full name, as in "headrace.v1.PrefillService"."""
    register: Callable[[Any], None]
    """Adds the servicer to a `grpc.aio.Server`."""
    telemetry: Telemetry
    is_healthy: Callable[[], bool] = lambda: True
    """Asked every second, on the event loop; must answer at once. False while the engine reports failure."""
    on_drain: Callable[[], None] = lambda: None
    """Called once, on the event loop, when draining begins; from then on new calls are refused here."""


async def run_server(service: Service, options: ServerOptions) -> None:
    """Serves until SIGTERM or SIGINT, then drains and returns; a second signal stops at once.

    Prints one JSON line on stdout when ready: event, service, address, metrics.

    Raises:
        ConfigurationError: an address cannot be listened on, or a TLS file cannot be used.
    """
    with _signals() as signals:
        async with serving(service, options) as server:
            _announce(service, server)
            _log.info("draining on %s; signal again to stop at once", (await signals.get()).name)
            drain, again = asyncio.ensure_future(server.drain()), asyncio.ensure_future(signals.get())
            try:
                await asyncio.wait({drain, again}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                again.cancel()
                drain.cancel()
    _log.info("stopped")


@dataclass(frozen=True)
class RunningServer:
    """A started server, for whoever started it."""

    address: Address
    metrics_address: Address | None
    drain: Callable[[], Any]
    """Awaitable: not serving, no new calls, calls in flight finish within the grace time, connections close."""


@asynccontextmanager
async def serving(service: Service, options: ServerOptions) -> AsyncIterator[RunningServer]:
    """Serves while the context is open; leaving it cancels what still runs.

    Raises:
        ConfigurationError: as for `run_server`.
    """
    calls, health = Calls(service.name, service.telemetry), HealthServicer()
    server = grpc.aio.server(interceptors=[calls], options=_SERVER_OPTIONS)
    service.register(server)
    api_grpc.add_StatusServiceServicer_to_server(_StatusServicer(service.telemetry, calls), server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    status_name = api.DESCRIPTOR.services_by_name["StatusService"].full_name
    health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
    reflection.enable_server_reflection((service.name, status_name, health_name, reflection.SERVICE_NAME), server)

    address = _bind(server, options)
    with _metrics_endpoint(service.telemetry, options.metrics_address) as metrics_address:
        await server.start()
        follower = asyncio.ensure_future(_follow_health(service, health, options.health_poll_s))

        async def drain() -> None:
            await health.enter_graceful_shutdown()
            calls.draining = True
            service.on_drain()
            await calls.wait_idle(options.grace_s)
            await server.stop(_LAST_BYTES_S)

        try:
            yield RunningServer(address, metrics_address, drain)
        finally:
            follower.cancel()
            await server.stop(None)


class _StatusServicer(api_grpc.StatusServiceServicer):
    def __init__(self, telemetry: Telemetry, calls: Calls) -> None:
        self._telemetry = telemetry
        self._calls = calls

    async def GetStatus(self, request: api.GetStatusRequest, context: Any) -> api.GetStatusResponse:
        fields = dataclasses.asdict(self._telemetry.snapshot())
        fields |= {"stage": f"STAGE_{fields['stage'].upper()}", "draining": self._calls.draining}
        return api.GetStatusResponse(**fields)


async def _follow_health(service: Service, health: Any, poll_s: float) -> None:
    """Lets health say what the engine says, until cancelled."""
    said: bool | None = None
    while True:
        healthy = _ask(service.is_healthy)
        if healthy != said:
            _log.log(logging.INFO if healthy else logging.ERROR, "health: %s", "serving" if healthy else "not serving")
            answer = health_pb2.HealthCheckResponse.SERVING if healthy else health_pb2.HealthCheckResponse.NOT_SERVING
            for name in ("", service.name):
                await health.set(name, answer)
            said = healthy
        await asyncio.sleep(poll_s)


def _ask(is_healthy: Callable[[], bool]) -> bool:
    try:
        return is_healthy()
    except Exception:
        _log.exception("the health question failed")
        return False


def _bind(server: Any, options: ServerOptions) -> Address:
    address = options.address
    try:
        if options.tls:
            port = server.add_secure_port(str(address), _credentials(options.tls))
        else:
            port = server.add_insecure_port(str(address))
    except RuntimeError:
        raise ConfigurationError(_taken(address)) from None
    if not (options.tls or address.is_loopback):
        _log.warning("listening on %s without TLS: anyone who reaches this address can use the service", address)
    return Address(address.host, port)


def _taken(address: Address) -> str:
    return (
        f"cannot listen on {address}: the port is taken or the address is not this machine's; "
        "choose another, or port 0 for any free one"
    )


def _credentials(tls: TlsFiles) -> Any:
    try:
        pair = (tls.key.read_bytes(), tls.certificate.read_bytes())
        client_ca = tls.client_ca.read_bytes() if tls.client_ca else None
    except OSError as error:
        raise ConfigurationError(f"cannot read TLS file {error.filename}: {error.strerror}") from None
    return grpc.ssl_server_credentials([pair], root_certificates=client_ca, require_client_auth=client_ca is not None)


@contextmanager
def _metrics_endpoint(telemetry: Telemetry, address: Address | None) -> Iterator[Address | None]:
    if address is None:
        yield None
        return
    registry = CollectorRegistry()
    registry.register(telemetry)
    try:
        endpoint, thread = start_http_server(address.port, address.host, registry)
    except OSError:
        raise ConfigurationError(_taken(address)) from None
    try:
        yield Address(address.host, endpoint.server_port)
    finally:
        endpoint.shutdown()
        endpoint.server_close()
        thread.join()


def _announce(service: Service, server: RunningServer) -> None:
    ready = {
        "event": "ready",
        "service": service.telemetry.identity.stage,
        "address": str(server.address),
        "metrics": str(server.metrics_address) if server.metrics_address else None,
    }
    print(json.dumps(ready), flush=True)


@contextmanager
def _signals() -> Iterator[asyncio.Queue[signal.Signals]]:
    """SIGTERM and SIGINT as they come, in place of what they usually do."""
    loop, received = asyncio.get_running_loop(), asyncio.Queue[signal.Signals]()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received.put_nowait, number)
    try:
        yield received
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        # The process is about to end well; being asked once more must not make that a bad end.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
