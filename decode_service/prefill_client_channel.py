"""Channels to prefill replicas, encrypted or not. Used by `replicas` alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from shared.config import CHANNEL_OPTIONS
from shared.errors import ConfigurationError

REPLICA_OPTIONS = (
    *CHANNEL_OPTIONS,
    # A replica that comes back is found soon; gRPC's own pause grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A proxy set in the environment is for the world outside, not for the other stage.
    ("grpc.enable_http_proxy", 0),
)

OpenChannel = Callable[[str, str], Any]
"""Opens a channel to an address that was found for a name; the name is empty where there is none."""


@dataclass(frozen=True, kw_only=True)
class PrefillTls:
    """PEM files of encrypted channels to prefill.

    Raises:
        ConfigurationError: only one of certificate and key is given.
    """

    ca: Path | None = None
    """Authorities that replicas are trusted by; None: those of the system."""
    certificate: Path | None = None
    """Our own, where replicas ask for one; with `key`."""
    key: Path | None = None
    server_name: str | None = None
    """The name in the replicas' certificates; None: the name in the target, whose addresses are called."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigurationError("--prefill-certificate and --prefill-key go together; give both or neither")

    def opener(self) -> OpenChannel:
        """Opens encrypted channels.

        Raises:
            ConfigurationError: a file cannot be read, or is not PEM.
        """
        credentials = grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.certificate))

        def open_channel(address: str, name: str) -> Any:
            proven = self.server_name or name
            named = (("grpc.ssl_target_name_override", proven),) if proven else ()
            return grpc.aio.secure_channel(address, credentials, options=(*REPLICA_OPTIONS, *named))

        return open_channel


def open_plain(address: str, name: str) -> Any:
    """Opens a channel that is not encrypted."""
    return grpc.aio.insecure_channel(address, options=REPLICA_OPTIONS)


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"cannot read TLS file {path}: {error.strerror}") from None
    if b"-----BEGIN " not in content:  # gRPC would take it, and every call would fail
        raise ConfigurationError(f"{path} is not PEM; convert it with openssl")
    return content
