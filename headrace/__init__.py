"""Headrace: what users import.

Names are loaded when first used, so that importing a part of the package (the generated API, say) loads nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.client import AsyncClient, Client
    from headrace.client_stream import AsyncGeneration, Generation
    from headrace.errors import (
        CallError,
        Cancelled,
        ClientError,
        DataLoss,
        DeadlineExceeded,
        FailedPrecondition,
        InputError,
        InvalidRequest,
        LocalServiceError,
        ResourceExhausted,
        ServerError,
        Unavailable,
    )
    from headrace.local import LocalPlan, LocalServices
    from headrace.retry import RetryPolicy
    from headrace.score import Score
    from headrace.tls import Tls
    from headrace.types import Chunk, Completion, Header, Result, ServerStatus, Timings, TokenLogprobs, Usage

_HOME = {
    "client": ("AsyncClient", "Client"),
    "client_stream": ("AsyncGeneration", "Generation"),
    "errors": (
        "CallError",
        "Cancelled",
        "ClientError",
        "DataLoss",
        "DeadlineExceeded",
        "FailedPrecondition",
        "InputError",
        "InvalidRequest",
        "LocalServiceError",
        "ResourceExhausted",
        "ServerError",
        "Unavailable",
    ),
    "local": ("LocalPlan", "LocalServices"),
    "retry": ("RetryPolicy",),
    "score": ("Score",),
    "tls": ("Tls",),
    "types": ("Chunk", "Completion", "Header", "Result", "ServerStatus", "Timings", "TokenLogprobs", "Usage"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "AsyncClient",
    "AsyncGeneration",
    "CallError",
    "Cancelled",
    "Chunk",
    "Client",
    "ClientError",
    "Completion",
    "DataLoss",
    "DeadlineExceeded",
    "FailedPrecondition",
    "Generation",
    "Header",
    "InputError",
    "InvalidRequest",
    "LocalPlan",
    "LocalServiceError",
    "LocalServices",
    "ResourceExhausted",
    "Result",
    "RetryPolicy",
    "Score",
    "ServerError",
    "ServerStatus",
    "Timings",
    "Tls",
    "TokenLogprobs",
    "Unavailable",
    "Usage",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
