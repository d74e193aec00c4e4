"""Where decode replicas are: what users write, and the gRPC names and options made of it."""

from __future__ import annotations

import ipaddress
import itertools
import json
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.errors import InputError
from shared.config import CHANNEL_OPTIONS

Target = str | Sequence[str]
"""`host:port`, several of them (a list, or separated by commas), or any gRPC name such as `dns:///decode:50051`."""

ChannelOption = tuple[str, str | int]

_COMMON_OPTIONS: tuple[ChannelOption, ...] = (
    (
        "grpc.service_config",
        json.dumps({"loadBalancingConfig": [{"round_robin": {}}]}),
    ),
    *CHANNEL_OPTIONS,
    # A replica that comes back is found within the client's own retries.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)


@dataclass(frozen=True)
class Endpoint:
    """One gRPC name and the options of its channel."""

    name: str
    options: tuple[ChannelOption, ...]


def balanced(target: Target) -> Endpoint:
    """One name for all replicas, balanced per call by gRPC's round_robin.

    A single name is left to gRPC, which resolves it again when replicas change. Several are looked up once, here.

    Raises:
        InputError: the target is empty, lacks a port or cannot be resolved.
    """
    names = _names(target)
    if len(names) == 1:
        return _endpoint(names[0], names)
    found = [_resolve(name) for name in names]
    for scheme, family in (("ipv4", socket.AF_INET), ("ipv6", socket.AF_INET6)):
        addresses = [by_family.get(family, []) for by_family in found]
        if all(addresses):
            distinct = dict.fromkeys(itertools.chain.from_iterable(addresses))
            return _endpoint(f"{scheme}:{','.join(distinct)}", names)
    raise InputError(f"{', '.join(names)} mix IPv4 and IPv6; give all of them in one family")


def replicas(target: Target) -> tuple[str, ...]:
    """The address of every replica: each name given, and all addresses behind a `dns:`, `ipv4:` or `ipv6:` name.

    Raises:
        InputError: as for `balanced`.
    """
    names = _names(target)
    if len(names) > 1 or not _has_scheme(names[0]):
        return names
    scheme, _, rest = names[0].partition(":")
    if scheme in ("ipv4", "ipv6"):
        return tuple(rest.split(","))
    if scheme != "dns":
        return names
    by_family = _resolve(rest.rpartition("/")[2])
    return tuple(by_family.get(socket.AF_INET) or by_family[socket.AF_INET6])


def name_of(target: Target) -> str | None:
    """The name in the certificate of every replica: that of a single `dns:` target. None where each has its own.

    Raises:
        InputError: as for `balanced`.
    """
    names = _names(target)
    scheme, _, rest = names[0].partition(":")
    return _split(rest.rpartition("/")[2])[0] if _has_scheme(names[0]) and scheme == "dns" else None


def single(address: str) -> Endpoint:
    """The endpoint of one replica."""
    return _endpoint(address, (address,))


def _names(target: Target) -> tuple[str, ...]:
    parts = target.split(",") if isinstance(target, str) and not _has_scheme(target) else target
    names = tuple(part.strip() for part in ([parts] if isinstance(parts, str) else parts))
    if not names or not all(names):
        raise InputError(f"a target is host:port, several of them, or a gRPC name; found {target!r}")
    for name in names:
        if _has_scheme(name):
            if len(names) > 1:
                raise InputError(f"several targets must each be host:port; found {name!r}")
        elif not (port := name.rpartition(":")[2]).isdecimal() or not 1 <= int(port) <= 65535:
            raise InputError(f"{name!r} has no port from 1 to 65535; write host:port, as in 127.0.0.1:50051")
    return names


_SCHEME = re.compile(r"(dns|ipv4|ipv6|unix|unix-abstract|xds):(?!\d+$)")
"""The start of a gRPC name; `dns:50051` is a host of that name."""


def _has_scheme(name: str) -> bool:
    return _SCHEME.match(name) is not None


def _endpoint(name: str, hosts: Sequence[str]) -> Endpoint:
    # A proxy set in the environment is for the world outside; it cannot reach this machine's own loopback.
    direct: tuple[ChannelOption, ...] = (("grpc.enable_http_proxy", 0),) if all(map(_is_loopback, hosts)) else ()
    return Endpoint(name, _COMMON_OPTIONS + direct)


def _split(name: str) -> tuple[str, str]:
    host, _, port = name.rpartition(":")
    return host.strip("[]"), port


def _is_loopback(name: str) -> bool:
    host, _ = _split(name)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _resolve(name: str) -> dict[int, list[str]]:
    """Address family -> addresses with ports."""
    host, port = _split(name)
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot resolve {name!r}: {error}") from None
    by_family: dict[int, list[str]] = {}
    for family, _, _, _, address in found:
        text = f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"
        if text not in by_family.setdefault(family, []):
            by_family[family].append(text)
    return by_family
