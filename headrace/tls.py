"""How a client proves who a service is, and itself, where channels are encrypted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.errors import InputError

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Tls:
    """Files of an encrypted channel, all in PEM.

    Raises:
        InputError: only one of certificate and key is given.
    """

    ca: Path | str | None = None
    """Certificates of the authorities that services are trusted by; None: those of the system."""
    certificate: Path | str | None = None
    """The client's own certificate chain, where services ask for one."""
    key: Path | str | None = None
    """Its private key."""
    server_name: str | None = None
    """The name in the services' certificate, where it is not the one in the target, as with a list of addresses."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise InputError("a client certificate needs its key, and a key its certificate; give both or neither")

    def naming(self, name: str | None) -> Tls:
        """The same, with a name for what has none: replicas behind one name are called at their addresses."""
        return self if self.server_name or name is None else replace(self, server_name=name)

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Authorities, key and certificate chain.

        Raises:
            InputError: a file cannot be read, or is not PEM.
        """
        return _read(self.ca), _read(self.key), _read(self.certificate)


def metadata_of(pairs: Mapping[str, str] | None) -> Metadata:
    """What travels with every call.

    Raises:
        InputError: a name or a value cannot travel; values, which may be secrets, are not repeated.
    """
    for name, value in (pairs or {}).items():
        if not name or not set(name) <= _NAME or name.startswith("grpc-") or name.endswith("-bin"):
            raise InputError(
                f"metadata {name!r} cannot travel; a name has lower-case letters, digits, '-', '_' and '.', "
                "does not start with grpc- nor end with -bin"
            )
        if not value.isascii() or not value.isprintable():
            raise InputError(f"the value of metadata {name!r} cannot travel; it must be printable ASCII")
    return tuple((pairs or {}).items())


_PEM = b"-----BEGIN "
_NAME = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_.")


def _read(path: Path | str | None) -> bytes | None:
    if path is None:
        return None
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    if _PEM not in content:  # gRPC would take it, and fail at each call with a riddle
        raise InputError(f"{path} is not PEM: nothing in it begins with {_PEM.decode()}; convert it with openssl")
    return content
