"""From what users write as a target to gRPC's names."""

from __future__ import annotations

import pytest

from headrace.errors import InputError
from headrace.target import Target, balanced, replicas


@pytest.mark.parametrize(
    ("target", "name", "addresses"),
    [
        ("127.0.0.1:1", "127.0.0.1:1", ("127.0.0.1:1",)),
        ("decode:50051", "decode:50051", ("decode:50051",)),
        ("dns:50051", "dns:50051", ("dns:50051",)),
        (["127.0.0.1:1"], "127.0.0.1:1", ("127.0.0.1:1",)),
        ("127.0.0.1:1, 127.0.0.1:2", "ipv4:127.0.0.1:1,127.0.0.1:2", ("127.0.0.1:1", "127.0.0.1:2")),
        (["127.0.0.1:1", "127.0.0.2:1"], "ipv4:127.0.0.1:1,127.0.0.2:1", ("127.0.0.1:1", "127.0.0.2:1")),
        (["[::1]:1", "[::1]:2"], "ipv6:[::1]:1,[::1]:2", ("[::1]:1", "[::1]:2")),
        ("ipv4:127.0.0.1:1,127.0.0.1:2", "ipv4:127.0.0.1:1,127.0.0.1:2", ("127.0.0.1:1", "127.0.0.1:2")),
        ("dns:///127.0.0.1:1", "dns:///127.0.0.1:1", ("127.0.0.1:1",)),
        ("unix:/run/decode.sock", "unix:/run/decode.sock", ("unix:/run/decode.sock",)),
    ],
)
def test_a_target_gives_one_balanced_name_and_every_address(
    target: Target, name: str, addresses: tuple[str, ...]
) -> None:
    assert balanced(target).name == name
    assert replicas(target) == addresses


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("", "a target is"),
        ([], "a target is"),
        ("127.0.0.1:1,", "a target is"),
        ("localhost", "has no port"),
        (["127.0.0.1:1", "dns:///a:1"], "must each be host:port"),
        (["127.0.0.1:1", "[::1]:1"], "mix IPv4 and IPv6"),
        ("127.0.0.1:65536", "has no port from 1 to 65535"),
        (["127.0.0.1:1", "no-such-host.invalid:1"], "cannot resolve"),
    ],
)
def test_a_target_that_cannot_work_says_why(target: Target, says: str) -> None:
    with pytest.raises(InputError, match=says):
        balanced(target)


def test_a_proxy_from_the_environment_is_bypassed_for_loopback_alone() -> None:
    assert ("grpc.enable_http_proxy", 0) in balanced(["127.0.0.1:1", "127.0.0.1:2"]).options
    assert ("grpc.enable_http_proxy", 0) not in balanced("decode:50051").options
