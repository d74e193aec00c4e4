"""Asking services how they are, each at its own address."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc

from headrace.client_stream import rpc_error
from headrace.client_wire import server_status
from headrace.errors import CallError, call_error
from headrace.target import single
from headrace.types import ServerStatus
from headrace.v1 import status_pb2, status_pb2_grpc

TIMEOUT_S = 10.0


async def async_statuses(addresses: Iterable[str]) -> tuple[ServerStatus, ...]:
    """Asks the service at each address, of either stage.

    Raises:
        CallError: one did not answer within 10 s; the message names it.
    """
    return tuple(await asyncio.gather(*map(_async_status, addresses)))


def statuses(addresses: Iterable[str]) -> tuple[ServerStatus, ...]:
    """Asks the service at each address, of either stage.

    Raises:
        CallError: one did not answer within 10 s; the message names it.
    """
    return tuple(map(_status, addresses))


async def _async_status(address: str) -> ServerStatus:
    endpoint = single(address)
    async with grpc.aio.insecure_channel(endpoint.name, options=endpoint.options) as channel:
        try:
            return server_status(await _ask(channel), address)
        except grpc.aio.AioRpcError as error:
            raise _naming(address, error) from None


def _status(address: str) -> ServerStatus:
    endpoint = single(address)
    with grpc.insecure_channel(endpoint.name, options=endpoint.options) as channel:
        try:
            return server_status(_ask(channel), address)
        except grpc.RpcError as error:
            raise _naming(address, error) from None


def _ask(channel: Any) -> Any:
    stub = status_pb2_grpc.StatusServiceStub(channel)
    return stub.GetStatus(status_pb2.GetStatusRequest(), timeout=TIMEOUT_S)


def _naming(address: str, error: Any) -> CallError:
    failure = rpc_error(error)
    return call_error(failure.status, f"{address}: {failure.message}")
