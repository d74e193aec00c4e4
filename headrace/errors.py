# ruff: noqa: N818  (the names mirror gRPC's status codes)
"""Everything that the client side raises on purpose, and the one table from gRPC status codes to it.

ClientError
├── CallError                 a call failed; `status` names the gRPC status code
│   ├── InvalidRequest        INVALID_ARGUMENT: the request can never be served; change it
│   ├── FailedPrecondition    FAILED_PRECONDITION: model, dtype or layout do not match
│   ├── ResourceExhausted     RESOURCE_EXHAUSTED: the queue is full, or memory is short; try later
│   ├── Unavailable           UNAVAILABLE: no replica answers; retried by the client
│   ├── DeadlineExceeded      DEADLINE_EXCEEDED: not finished within timeout_s
│   ├── Cancelled             CANCELLED: the call was closed
│   ├── DataLoss              DATA_LOSS: the service's model files are damaged
│   └── ServerError           every other status: a fault of the service
├── InputError                a batch file, an answer file, a target or a plan of services cannot be used
└── LocalServiceError         a service started on this machine failed
"""

from __future__ import annotations

from collections.abc import Mapping


class ClientError(Exception):
    """Base of everything that the client side raises on purpose."""


class CallError(ClientError):
    """A call failed.

    Attributes:
        status: name of the gRPC status code, as in "UNAVAILABLE".
        message: what the service, or gRPC, said.
    """

    status = "UNKNOWN"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(CallError):
    """The request can never be served as it is."""

    status = "INVALID_ARGUMENT"


class FailedPrecondition(CallError):
    """Model, dtype or layout do not match."""

    status = "FAILED_PRECONDITION"


class ResourceExhausted(CallError):
    """There is no room now: the queue is full, or memory is short."""

    status = "RESOURCE_EXHAUSTED"


class Unavailable(CallError):
    """No replica answers."""

    status = "UNAVAILABLE"


class DeadlineExceeded(CallError):
    """The call did not finish in time."""

    status = "DEADLINE_EXCEEDED"


class Cancelled(CallError):
    """The call was closed before it ended."""

    status = "CANCELLED"


class DataLoss(CallError):
    """The service's model files are damaged."""

    status = "DATA_LOSS"


class ServerError(CallError):
    """A fault of the service: any status without a class of its own."""

    def __init__(self, message: str, status: str = "UNKNOWN") -> None:
        super().__init__(message)
        self.status = status


class InputError(ClientError):
    """A batch file, an answer file, a target or a plan of local services cannot be used."""


class LocalServiceError(ClientError):
    """A service started on this machine failed to start, to run or to stop."""


_BY_STATUS: Mapping[str, type[CallError]] = {
    kind.status: kind
    for kind in (
        InvalidRequest,
        FailedPrecondition,
        ResourceExhausted,
        Unavailable,
        DeadlineExceeded,
        Cancelled,
        DataLoss,
    )
}


def call_error(status: str, message: str) -> CallError:
    """The exception for a gRPC status code, by its name."""
    kind = _BY_STATUS.get(status)
    return kind(message) if kind else ServerError(f"{status}: {message}", status)
