"""Whether services serve: what each says of its health and of itself, where one that says nothing is an answer too."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.client_channel import open_channel
from headrace.client_stream import rpc_error
from headrace.client_wire import server_status
from headrace.target import Target, name_of, replicas, single
from headrace.tls import Metadata, Tls
from headrace.types import ServerStatus
from headrace.v1 import status_pb2, status_pb2_grpc

Health = Literal["serving", "draining", "not serving", "unreachable"]
"""Draining: told to stop, it finishes what runs. Not serving: its engine cannot work; the service's log says why."""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """How one service is."""

    address: str
    health: Health
    status: ServerStatus | None = None
    """None where it does not answer."""
    problem: str = ""
    """What gRPC said where it does not answer."""


def conditions(
    targets: Iterable[Target], tls: Tls | None = None, metadata: Metadata = (), *, timeout_s: float = 10.0
) -> tuple[Condition, ...]:
    """Asks every replica of every target, of either stage, all at once.

    Args:
        timeout_s: one that has not answered by then is unreachable.

    Raises:
        InputError: a target cannot be used or resolved, or a TLS file cannot be read.
    """
    asked: list[tuple[str, Any, Any]] = []
    with ExitStack() as channels:
        for target in targets:
            named = tls.naming(name_of(target)) if tls else None
            for address in replicas(target):
                channel = channels.enter_context(open_channel(single(address), named))
                status, health = status_pb2_grpc.StatusServiceStub(channel), health_pb2_grpc.HealthStub(channel)
                settings = {"timeout": timeout_s, "metadata": metadata}
                calls = (
                    status.GetStatus.future(status_pb2.GetStatusRequest(), **settings),
                    health.Check.future(health_pb2.HealthCheckRequest(), **settings),
                )
                asked.append((address, *calls))
        return tuple(_condition(*each) for each in asked)


def _condition(address: str, status_call: Any, health_call: Any) -> Condition:
    try:
        status = server_status(status_call.result(), address)
        serves = health_call.result().status == health_pb2.HealthCheckResponse.SERVING
    except grpc.RpcError as error:
        return Condition(address=address, health="unreachable", problem=rpc_error(error).message)
    health: Health = "draining" if status.draining else "serving" if serves else "not serving"
    return Condition(address=address, health=health, status=status)
