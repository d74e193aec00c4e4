"""Settings as operators write them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.config import (
    BYTE_UNITS,
    Address,
    memory_limit_bytes,
    parse_address,
    parse_bytes,
    parse_duration,
)
from shared.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("800000000", 800_000_000),
        ("12B", 12),
        ("3kB", 3000),
        ("3KB", 3000),
        ("3KiB", 3072),
        ("1.5GB", 1_500_000_000),
        ("1.5 GiB", 3 * 2**29),
        (" 2TiB ", 2**41),
    ],
)
def test_sizes_are_read_in_decimal_and_binary_units(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@given(st.integers(0, 2**60), st.sampled_from(sorted(BYTE_UNITS)))
def test_whole_sizes_are_exact(number: int, unit: str) -> None:
    assert parse_bytes(f"{number}{unit}") == number * BYTE_UNITS[unit]


def test_a_percentage_is_of_the_machine() -> None:
    assert parse_bytes("50%", machine_bytes=lambda: 1000) == 500
    assert 0 < parse_bytes("12.5%") < memory_limit_bytes()


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2gigs", "2 G", "1e9", "nan", "%", "1.GiB", "2GiB 3"])
def test_what_is_not_a_size_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a size") as refusal:
        parse_bytes(text)
    assert repr(text) in str(refusal.value)
    assert "2GiB" in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("45", 45), ("250ms", 0.25), ("8h", 28800), ("1h30m", 5400), ("1.5 d", 129600), ("2m 3s", 123)],
)
def test_durations_are_read_in_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "h", "-8h", "8 hours", "1h30"])
def test_what_is_not_a_duration_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a duration.*1h30m"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "address", "loopback"),
    [
        ("127.0.0.1:50051", Address("127.0.0.1", 50051), True),
        ("localhost:0", Address("localhost", 0), True),
        ("[::1]:50051", Address("::1", 50051), True),
        ("0.0.0.0:65535", Address("0.0.0.0", 65535), False),
        ("prefill.example.org:80", Address("prefill.example.org", 80), False),
    ],
)
def test_addresses_are_read_and_written_alike(text: str, address: Address, loopback: bool) -> None:
    assert parse_address(text) == address
    assert str(address) == text
    assert address.is_loopback is loopback


@pytest.mark.parametrize(
    "text", ["", "50051", ":50051", "localhost", "::1:50051", "host:65536", "http://host:80", "host:x"]
)
def test_what_is_not_an_address_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is not an address.*127.0.0.1:50051"):
        parse_address(text)


def _machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal:       1000 kB\nMemFree: 1 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, 1_024_000, id="no control group"),
        pytest.param(
            {"proc/self/cgroup": "0::/pod/box\n", "sys/fs/cgroup/pod/box/memory.max": "max\n"},
            1_024_000,
            id="v2 no limit",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/pod/box\n", "sys/fs/cgroup/pod/box/memory.max": "5000\n"}, 5000, id="v2 own limit"
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/pod/box\n",
                "sys/fs/cgroup/pod/box/memory.max": "5000\n",
                "sys/fs/cgroup/pod/memory.max": "4000\n",
            },
            4000,
            id="v2 enclosing limit",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "3000\n"}, 3000, id="v2 in a container"
        ),
        pytest.param(
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/a\n",
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "2000\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            2000,
            id="v1",
        ),
    ],
)
def test_the_smallest_of_machine_and_control_group_counts(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert memory_limit_bytes(_machine(tmp_path, files)) == expected
