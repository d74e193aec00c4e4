"""Calling prefill over TLS: replicas that ask for a certificate, by name and by address, and what is refused."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from decode_service.prefill_client import PrefillClient
from decode_service.prefill_client_channel import PrefillTls
from shared.errors import UnavailableError
from shared.kv.layout import layout_of
from shared.pack.reader import Pack
from shared.server import TlsFiles
from tests.certificates import Pair, self_signed
from tests.conftest import TinyPack
from tests.end_to_end.stack import Prefill, prefill_replica

PROMPT = [3, 4, 5, 6, 7]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return self_signed(tmp_path_factory.mktemp("tls"), "localhost")


@pytest.fixture
async def replica(tiny_pack: TinyPack, pair: Pair) -> AsyncIterator[Prefill]:
    files = TlsFiles(certificate=pair.certificate, key=pair.key, client_ca=pair.certificate)
    async with prefill_replica(tiny_pack("fp32"), tls=files) as replica:
        yield replica


async def prefilled(path: Path, target: str, tls: PrefillTls) -> int:
    """How many keys and values came."""
    pack, stored = Pack.open(path), []
    client = PrefillClient(
        [target],
        model_digest=pack.manifest.model_digest,
        layout=layout_of(pack),
        hidden_size=pack.spec.hidden_size,
        open_channel=tls.opener(),
    )
    try:
        await client.prefill("r1", PROMPT, lambda *frame: stored.append(frame), 60)
    finally:
        await client.close()
    return len(stored)


@pytest.mark.parametrize("named", ["by the target", "by an option"])
async def test_replicas_are_called_at_addresses_and_prove_their_name(
    replica: Prefill, tiny_pack: TinyPack, pair: Pair, named: str
) -> None:
    by_target = named == "by the target"
    target = f"dns:///localhost:{replica.server.address.port}" if by_target else replica.address
    name = None if by_target else "localhost"
    tls = PrefillTls(ca=pair.certificate, certificate=pair.certificate, key=pair.key, server_name=name)
    assert await prefilled(tiny_pack("fp32"), target, tls) >= Pack.open(tiny_pack("fp32")).spec.layers


@pytest.mark.parametrize("lacks", ["certificate", "authority", "name"])
async def test_without_proof_no_prompt_is_sent(
    replica: Prefill, tiny_pack: TinyPack, pair: Pair, tmp_path: Path, lacks: str
) -> None:
    own = {"certificate": pair.certificate, "key": pair.key}
    tls = {
        "certificate": PrefillTls(ca=pair.certificate, server_name="localhost"),
        "authority": PrefillTls(ca=self_signed(tmp_path).certificate, server_name="localhost", **own),
        "name": PrefillTls(ca=pair.certificate, **own),
    }[lacks]
    with pytest.raises(UnavailableError):
        await prefilled(tiny_pack("fp32"), replica.address, tls)
    assert replica.telemetry.snapshot().prompt_tokens == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--prefill-tls",), "need --prefill, which says where it is"),
        (("--prefill", "127.0.0.1:1", "--prefill-key", "k.pem"), "go together"),
        (("--prefill", "127.0.0.1:1", "--prefill-ca-file", "absent.pem"), "cannot read TLS file absent.pem"),
        (("--prefill", "127.0.0.1:1", "--prefill-ca-file", __file__), "is not PEM"),
    ],
)
async def test_options_that_cannot_work_are_refused_before_anything_is_loaded(
    arguments: tuple[str, ...], says: str
) -> None:
    command = [sys.executable, "-m", "decode_service", "no-pack", *arguments]
    process = await asyncio.create_subprocess_exec(*command, stderr=PIPE)
    _, stderr = await process.communicate()
    assert process.returncode == 2
    assert stderr.startswith(b"error: ")
    assert (says in stderr.decode(), stderr.count(b"\n")) == (True, 1)
