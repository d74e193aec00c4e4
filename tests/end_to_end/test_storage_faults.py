"""Layers that cannot be read: requests fail by the layer's name, health follows, and all recovers with the file."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.client_stream import AsyncGeneration
from headrace.errors import DataLoss, Unavailable
from shared.errors import DataLossError
from shared.pack.format import layer_file_name
from shared.pack.reader import Pack
from shared.streaming.plan import Residency
from tests.end_to_end.stack import Decode, decode_replica, prefill_replica, services

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
LAYER = 3
LONG = 3500
"""More tokens than are generated before anything happens to the request."""
REQUEST = {"token_ids": [3, 4, 5], "max_tokens": 8}

Damage = Callable[[Path], None]


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    with path.open("r+b") as file:
        file.write(content)


def lose(path: Path) -> None:
    """What a device leaves that is gone: no file, and descriptors that fail."""
    with path.open("r+b") as file:
        path.unlink()
        file.truncate(0)


def make_unreadable(path: Path) -> None:
    """Opens, but every read is an error of the operating system."""
    with path.open("r+b") as file:
        path.unlink()
        path.mkdir()
        file.truncate(0)


FAULTS = [
    pytest.param(cut_off, DataLoss, "layer 3 is truncated at byte", id="truncated"),
    pytest.param(flip_a_bit, DataLoss, "layer 3 does not match its digest", id="changed"),
    pytest.param(lose, Unavailable, "layer 3 cannot be opened: No such file or directory", id="gone"),
    pytest.param(make_unreadable, Unavailable, "layer 3 cannot be read: Is a directory", id="unreadable"),
]


@pytest.fixture
def damageable(endless_pack: Path, tmp_path: Path) -> Path:
    """A copy of the pack, and beside it a whole copy of the layer to come."""
    copy = shutil.copytree(endless_pack, tmp_path / "pack")
    shutil.copy2(copy / layer_file_name(LAYER), tmp_path / "whole")
    return copy


def restore(pack: Path) -> None:
    """Replaces the layer's file by the whole one, as a careful operator does: by renaming."""
    path = pack / layer_file_name(LAYER)
    if path.is_dir():
        path.rmdir()
    shutil.copy2(pack.parent / "whole", pack.parent / "restored")
    (pack.parent / "restored").rename(path)


def nothing_resident(pack: Pack) -> Residency:
    return Residency(frozenset(), slots=2)


@asynccontextmanager
async def health_of(address: str) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
    """Waits for a state of the health service, as its watchers see it."""
    async with grpc.aio.insecure_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)

        async def becomes(status: int) -> None:
            async for answer in watch:
                if answer.status == status:
                    return

        yield becomes
        watch.cancel()


async def everything_of(generation: AsyncGeneration) -> None:
    async for _ in generation:
        pass


@pytest.mark.parametrize(("damage", "error", "message"), FAULTS)
async def test_a_layer_lost_during_an_answer_ends_it_by_name_and_decode_serves_again_once_it_is_back(
    damageable: Path, endless_pack: Path, damage: Damage, error: type[Exception], message: str
) -> None:
    async with (
        prefill_replica(endless_pack) as prefill,
        decode_replica(damageable, prefill.address, residency=nothing_resident) as decode,
        health_of(decode.address) as becomes,
    ):
        expected = await decode.client.complete(**REQUEST)
        async with decode.client.generate(token_ids=[8, 9], max_tokens=LONG) as running:
            await anext(running)
            damage(damageable / layer_file_name(LAYER))
            with pytest.raises(error, match=message):
                await everything_of(running)
        await becomes(NOT_SERVING)
        await decode.idle()
        with pytest.raises(error, match=message):
            await decode.client.complete(**REQUEST)
        restore(damageable)
        await becomes(SERVING)
        assert (await decode.client.complete(**REQUEST)).token_ids == expected.token_ids
        await decode.idle()


@pytest.mark.parametrize(("damage", "error", "message"), [FAULTS[0], FAULTS[2]])
async def test_a_layer_lost_on_prefill_fails_the_prompt_by_name_and_prompts_are_computed_again_once_it_is_back(
    damageable: Path, endless_pack: Path, damage: Damage, error: type[Exception], message: str
) -> None:
    async with (
        prefill_replica(damageable, residency=nothing_resident) as prefill,
        decode_replica(endless_pack, prefill.address) as decode,
        health_of(prefill.address) as becomes,
    ):
        expected = await decode.client.complete(**REQUEST)
        damage(damageable / layer_file_name(LAYER))
        with pytest.raises(error, match=message):
            await two_prompts(decode)
        await becomes(NOT_SERVING)
        restore(damageable)
        await becomes(SERVING)
        assert (await decode.client.complete(**REQUEST)).token_ids == expected.token_ids
        await decode.idle()


async def test_a_layer_that_is_back_before_it_is_needed_again_fails_nobody(damageable: Path) -> None:
    async with services(damageable, residency=nothing_resident) as decode:
        expected = await decode.client.complete(**REQUEST)
        for damage in (cut_off, flip_a_bit, lose):
            damage(damageable / layer_file_name(LAYER))
            restore(damageable)
            assert (await decode.client.complete(**REQUEST)).token_ids == expected.token_ids


@pytest.mark.parametrize("damage", [cut_off, flip_a_bit])
async def test_a_service_does_not_start_on_a_damaged_resident_layer(damageable: Path, damage: Damage) -> None:
    damage(damageable / layer_file_name(LAYER))
    with pytest.raises(DataLossError, match=r"layer 3 does not match its digest|00003\.safetensors has"):
        async with decode_replica(damageable):
            pass


async def two_prompts(decode: Decode) -> None:
    """The first one may still find the whole layer in its slot."""
    for _ in range(2):
        await decode.client.complete(**REQUEST)
