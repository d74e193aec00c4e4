"""Calls in flight: counted, refused while draining, and their errors answered as gRPC statuses."""

from __future__ import annotations

import asyncio
import inspect
import logging
import traceback
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from shared.errors import (
    CapacityError,
    ConfigurationError,
    DataLossError,
    DeadlineError,
    HeadraceError,
    InvalidRequestError,
    ModelMismatchError,
    UnavailableError,
)
from shared.metrics import Telemetry

_log = logging.getLogger(__name__)

STATUS_CODES: Mapping[type[HeadraceError], grpc.StatusCode] = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    ModelMismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    CapacityError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    DataLossError: grpc.StatusCode.DATA_LOSS,
    ConfigurationError: grpc.StatusCode.FAILED_PRECONDITION,
}
"""The one table from errors (and what derives from them) to statuses; anything else is INTERNAL."""

ERROR_DOMAIN = "headrace"
"""Domain of the `google.rpc.ErrorInfo` in every status; its reason is the error's class name."""

_MAX_MESSAGE_CHARACTERS = 1000
"""A status travels in trailers, twice, and those are limited to 8 KiB."""


class Calls(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Counts calls in flight, refuses new ones while draining, and answers errors with statuses."""

    def __init__(self, service_name: str, telemetry: Telemetry) -> None:
        self._prefix = f"/{service_name}/"
        self._telemetry = telemetry
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    async def wait_idle(self, timeout_s: float) -> None:
        """Returns when no call is in flight, or when the time is over."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            _log.warning("%d calls did not finish within %g s and are cancelled", self._in_flight, timeout_s)

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        """Wraps the handlers of our own service; health, status and reflection are left as they are."""
        handler = await continuation(details)
        if handler is None or not details.method.startswith(self._prefix):
            return handler
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(
                self._guarded(details.method, handler.unary_unary),
                _telling(handler.request_deserializer),
                handler.response_serializer,
            )
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(
                self._guarded(details.method, _writing(handler.unary_stream)),
                _telling(handler.request_deserializer),
                handler.response_serializer,
            )
        return handler

    def _guarded(self, method: str, handle: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        async def call(request: Any, context: Any) -> Any:
            self._in_flight += 1
            self._idle.clear()
            try:
                if self.draining:
                    raise UnavailableError("this replica is draining; call another one")
                if isinstance(request, HeadraceError):
                    raise request
                return await handle(request, context)
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                self._telemetry.record_failure(type(error).__name__)
                await _abort(context, method, error)
            finally:
                self._in_flight -= 1
                if not self._in_flight:
                    self._idle.set()

        return call


def _writing(stream: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """An async generator as a coroutine that writes, so that a cancelled call closes the generator then and there."""
    if not inspect.isasyncgenfunction(stream):
        return stream

    async def write_all(request: Any, context: Any) -> None:
        async with aclosing(stream(request, context)) as responses:
            async for response in responses:
                try:
                    await context.write(response)
                except grpc.aio.InternalError:
                    # The client left while this was on its way, and gRPC cancels the call in a moment: nobody failed.
                    raise asyncio.CancelledError from None

    return write_all


def _telling(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Gives an error instead of a request that cannot be read; gRPC would answer UNKNOWN, and log where it noticed."""

    def read(serialized: bytes) -> Any:
        try:
            return deserialize(serialized)
        except DecodeError:
            return InvalidRequestError("the request is no message of this method; generate the client from its protos")

    return read


async def _abort(context: Any, method: str, error: Exception) -> None:
    code = next((code for kind, code in STATUS_CODES.items() if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
    if code is grpc.StatusCode.INTERNAL:
        # The message may quote the request, which is never logged at default level; the places in the code never do.
        places = "".join(traceback.format_tb(error.__traceback__))
        _log.error("%s failed with %s\n%s", method, type(error).__name__, places)
        _log.debug("%s: %s", type(error).__name__, error)
        reason, message = "InternalError", "internal error"
    else:
        _log.info("%s answered %s (%s)", method, code.name, type(error).__name__)
        reason, message = type(error).__name__, _shortened(str(error))
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=reason, domain=ERROR_DOMAIN))
    status = status_pb2.Status(code=code.value[0], message=message, details=[detail])
    await context.abort(code, message, rpc_status.to_status(status).trailing_metadata)


def _shortened(message: str) -> str:
    return message if len(message) <= _MAX_MESSAGE_CHARACTERS else message[: _MAX_MESSAGE_CHARACTERS - 1] + "…"
