"""Asking services how they are, each at its own address."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc

from headrace.client_channel import open_async_channel, open_channel
from headrace.client_stream import rpc_error
from headrace.client_wire import server_status
from headrace.errors import CallError, call_error
from headrace.target import single
from headrace.tls import Metadata, Tls
from headrace.types import ServerStatus
from headrace.v1 import status_pb2, status_pb2_grpc

TIMEOUT_S = 10.0


async def async_statuses(
    addresses: Iterable[str], tls: Tls | None = None, metadata: Metadata = ()
) -> tuple[ServerStatus, ...]:
    """Asks the service at each address, of either stage.

    Raises:
        CallError: one did not answer within 10 s; the message names it.
    """
    return tuple(await asyncio.gather(*(_async_status(address, tls, metadata) for address in addresses)))


def statuses(addresses: Iterable[str], tls: Tls | None = None, metadata: Metadata = ()) -> tuple[ServerStatus, ...]:
    """Asks the service at each address, of either stage.

    Raises:
        CallError: one did not answer within 10 s; the message names it.
    """
    return tuple(_status(address, tls, metadata) for address in addresses)


async def _async_status(address: str, tls: Tls | None, metadata: Metadata) -> ServerStatus:
    async with open_async_channel(single(address), tls) as channel:
        try:
            return server_status(await _ask(channel, metadata), address)
        except grpc.aio.AioRpcError as error:
            raise _naming(address, error) from None


def _status(address: str, tls: Tls | None, metadata: Metadata) -> ServerStatus:
    with open_channel(single(address), tls) as channel:
        try:
            return server_status(_ask(channel, metadata), address)
        except grpc.RpcError as error:
            raise _naming(address, error) from None


def _ask(channel: Any, metadata: Metadata) -> Any:
    stub = status_pb2_grpc.StatusServiceStub(channel)
    return stub.GetStatus(status_pb2.GetStatusRequest(), timeout=TIMEOUT_S, metadata=metadata)


def _naming(address: str, error: Any) -> CallError:
    failure = rpc_error(error)
    return call_error(failure.status, f"{address}: {failure.message}")
