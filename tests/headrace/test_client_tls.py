"""Encrypted channels, and metadata that travels with every call."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace import AsyncClient, Client, InputError, RetryPolicy, Tls, Unavailable
from tests.certificates import Pair, self_signed
from tests.headrace.fake_decode import FakeDecode, served

ONE_TRY = RetryPolicy(attempts=1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return self_signed(tmp_path_factory.mktemp("tls"))


async def test_both_clients_talk_over_tls_to_a_service_that_asks_for_their_certificate(pair: Pair) -> None:
    tls = Tls(ca=pair.certificate, certificate=pair.certificate, key=pair.key, server_name="headrace.test")

    def use(address: str) -> str:
        with Client(address, tls=tls) as client:
            client.status()
            return client.complete("Water").text

    async with served(FakeDecode(), pair.credentials()) as address:
        async with AsyncClient(address, tls=tls) as client:
            assert (await client.complete("Water")).text == "Water"
            assert [status.address for status in await client.status()] == [address]
        assert await asyncio.to_thread(use, address) == "Water"


@pytest.mark.parametrize("lacks", ["any", "certificate", "name"])
async def test_who_cannot_prove_itself_or_the_service_gets_no_answer(pair: Pair, lacks: str) -> None:
    own = {"certificate": pair.certificate, "key": pair.key}
    tls = {
        "any": None,
        "certificate": Tls(ca=pair.certificate, server_name="headrace.test"),
        "name": Tls(ca=pair.certificate, **own),
    }[lacks]
    fake = FakeDecode()
    async with served(fake, pair.credentials()) as address, AsyncClient(address, tls=tls, retry=ONE_TRY) as client:
        with pytest.raises(Unavailable):
            await client.complete("Water")
    assert fake.requests == []


def test_files_of_tls_that_cannot_be_used_are_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="both or neither"):
        Tls(certificate="c.pem")
    client = Client("127.0.0.1:1", tls=Tls(ca=tmp_path / "absent.pem"))
    with pytest.raises(InputError, match=r"cannot read .*absent\.pem: No such file"):
        client.complete("Water")
    (tmp_path / "key.der").write_bytes(b"\x30\x77")
    with pytest.raises(InputError, match=r"key\.der is not PEM"):
        Client("127.0.0.1:1", tls=Tls(ca=tmp_path / "key.der")).complete("Water")


async def test_replicas_behind_one_name_are_asked_at_their_addresses_and_prove_the_name(tmp_path: Path) -> None:
    pair = self_signed(tmp_path, "localhost")
    own = {"certificate": pair.certificate, "key": pair.key}
    async with served(FakeDecode(), pair.credentials()) as address:
        target = f"dns:///localhost:{address.rpartition(':')[2]}"
        async with AsyncClient(target, tls=Tls(ca=pair.certificate, **own), retry=ONE_TRY) as client:
            assert (await client.complete("Water")).text == "Water"
            assert [status.address for status in await client.status()] == [address]


async def test_metadata_travels_with_every_call() -> None:
    fake, metadata = FakeDecode(), {"authorization": "Bearer abc"}

    def use(address: str) -> None:
        with Client(address, metadata=metadata) as client:
            client.complete("Water")
            list(client.generate("Water"))
            client.status()

    async with served(fake) as address:
        async with AsyncClient(address, metadata=metadata) as client:
            await client.complete("Water")
            assert [chunk.text async for chunk in client.generate("Water")] == ["Wa", "ter"]
            await client.status()
        await asyncio.to_thread(use, address)
    assert [sent.get("authorization") for sent in fake.metadata] == ["Bearer abc"] * 6


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"Authorization": "x"}, "lower-case"),
        ({"": "x"}, "cannot travel"),
        ({"grpc-timeout": "x"}, "does not start with grpc-"),
        ({"a-bin": "x"}, "cannot travel"),
        ({"a": "sécret"}, "the value of metadata 'a'"),
        ({"a": "secret\n"}, "must be printable"),
    ],
)
def test_metadata_that_cannot_travel_is_refused_without_repeating_its_value(
    metadata: dict[str, str], says: str
) -> None:
    with pytest.raises(InputError, match=says) as error:
        Client("127.0.0.1:1", metadata=metadata)
    assert "cret" not in str(error.value)
