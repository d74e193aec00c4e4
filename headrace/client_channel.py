"""Opens gRPC channels, encrypted or not."""

from __future__ import annotations

from typing import Any

import grpc

from headrace.target import ChannelOption, Endpoint
from headrace.tls import Tls


def open_channel(endpoint: Endpoint, tls: Tls | None) -> Any:
    """A channel for synchronous calls. Raises InputError where a TLS file cannot be read."""
    if tls is None:
        return grpc.insecure_channel(endpoint.name, options=endpoint.options)
    return grpc.secure_channel(endpoint.name, _credentials(tls), options=_options(endpoint, tls))


def open_async_channel(endpoint: Endpoint, tls: Tls | None) -> Any:
    """A channel for asyncio. Raises InputError where a TLS file cannot be read."""
    if tls is None:
        return grpc.aio.insecure_channel(endpoint.name, options=endpoint.options)
    return grpc.aio.secure_channel(endpoint.name, _credentials(tls), options=_options(endpoint, tls))


def _credentials(tls: Tls) -> Any:
    return grpc.ssl_channel_credentials(*tls.read())


def _options(endpoint: Endpoint, tls: Tls) -> tuple[ChannelOption, ...]:
    named = (("grpc.ssl_target_name_override", tls.server_name),) if tls.server_name else ()
    return endpoint.options + named
