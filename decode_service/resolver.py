"""Where prefill replicas are: gRPC targets, and the addresses that names stand for. No gRPC here."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from shared.errors import ConfigurationError

_HOST_AND_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[^\s\[\]:/,]+):(?P<port>\d{1,5})")
_DNS = re.compile(r"dns:(///)?(?P<rest>[^/]+)")
_AS_IT_IS = ("unix:", "unix-abstract:", "ipv4:", "ipv6:", "vsock:")


@dataclass(frozen=True)
class Target:
    """One target, as in "host:50051", "dns:///prefill.fleet:50051" or "unix:/run/prefill.sock"."""

    text: str
    host: str = ""
    """A name or an address; empty where the text is an address for gRPC as it is."""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Target:
        """Raises ConfigurationError for what is no target."""
        if text.startswith(_AS_IT_IS):
            return cls(text)
        dns = _DNS.fullmatch(text)
        match = _HOST_AND_PORT.fullmatch(dns["rest"] if dns else text)
        if not match or not 0 < int(match["port"]) <= 65535:
            raise ConfigurationError(
                f"{text!r} is not a prefill target; write host:port, dns:///name:port or unix:/path, or several with "
                "commas between: 127.0.0.1:50051, dns:///prefill.fleet:50051"
            )
        return cls(text, match["host"].strip("[]"), int(match["port"]))

    @property
    def name(self) -> str:
        """The name in the certificates of its replicas; empty where the target is an address."""
        return "" if _is_literal(self.host) else self.host

    async def addresses(self) -> list[str]:
        """What gRPC connects to, one address for each replica.

        Raises:
            OSError: the name cannot be resolved.
        """
        if not self.host:
            return [self.text]
        if _is_literal(self.host):
            return [_written(self.host, self.port)]
        found = await asyncio.get_running_loop().getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(_written(entry[4][0], self.port) for entry in found))


async def resolve(targets: Sequence[Target]) -> tuple[dict[str, str], list[str]]:
    """The addresses of all targets, each with the name that it was found for, and what could not be resolved.

    The name is what a certificate must show, and empty where the target has none.
    """
    addresses: dict[str, str] = {}
    problems = []
    for target in targets:
        try:
            for address in await target.addresses():
                addresses.setdefault(address, target.name)
        except OSError as error:
            problems.append(f"{target.text} cannot be resolved: {error.strerror or error}")
    return addresses, problems


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _written(host: object, port: int) -> str:
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
