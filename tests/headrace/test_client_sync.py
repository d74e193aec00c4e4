"""The synchronous client; it runs in a thread beside the loop that serves the scripted decode service."""

from __future__ import annotations

import asyncio
import threading

import grpc
import pytest

from headrace import Cancelled, Client, DeadlineExceeded, InvalidRequest, RetryPolicy, Unavailable
from tests.headrace.fake_decode import FakeDecode, chunk, failing, hanging, header, served

AT_ONCE = RetryPolicy(attempts=3, first_delay_s=0.0)


async def test_streams_and_completes_as_the_asynchronous_client_does() -> None:
    def use(address: str) -> None:
        with Client(address) as client:
            with client.generate("Water", request_id="r1") as stream:
                assert [chunk.text for chunk in stream] == ["Wa", "ter"]
            assert stream.header is not None
            assert stream.header.request_id == "r1"
            assert stream.result is not None
            assert stream.result.usage.completion_tokens == 4
            assert client.complete("Water").text == "Water"
            assert [status.address for status in client.status()] == [address]

    async with served(FakeDecode()) as address:
        await asyncio.to_thread(use, address)


async def test_errors_are_mapped_and_unavailable_is_tried_again() -> None:
    codes = [grpc.StatusCode.UNAVAILABLE] * 4 + [grpc.StatusCode.INVALID_ARGUMENT] * 2
    fake = FakeDecode(failing(*codes, after=lambda request: [header(request)]))

    def use(address: str) -> None:
        with Client(address, retry=AT_ONCE) as client:
            with pytest.raises(Unavailable):
                client.complete("Water")
            for _ in range(2):
                with pytest.raises(InvalidRequest, match="as scripted"):
                    next(client.generate("Water"))
            assert client.complete("Water").text == "Water"

    async with served(fake) as address:
        await asyncio.to_thread(use, address)
    assert len(fake.requests) == 7


async def test_after_the_first_chunk_nothing_is_tried_again() -> None:
    fake = FakeDecode(failing(grpc.StatusCode.UNAVAILABLE, after=lambda request: [header(request), chunk("Wa", 1)]))

    def use(address: str) -> None:
        with Client(address, retry=AT_ONCE) as client:
            stream = client.generate("Water")
            next(stream)
            with pytest.raises(Unavailable):
                next(stream)

    async with served(fake) as address:
        await asyncio.to_thread(use, address)
    assert len(fake.requests) == 1


async def test_leaving_a_stream_cancels_its_call() -> None:
    fake = FakeDecode(hanging)

    def use(address: str, client: Client) -> None:
        with client.generate("Water") as stream:
            assert next(stream).text == "Wat"

    async with served(fake) as address:
        with Client(address) as client:
            await asyncio.to_thread(use, address, client)
            await fake.cancelled.wait()


async def test_closing_from_another_thread_ends_a_waiting_reader_with_cancelled() -> None:
    def use(address: str) -> None:
        with Client(address) as client:
            stream = client.generate("Water")
            next(stream)
            closing = threading.Thread(target=stream.close)
            closing.start()
            with pytest.raises((Cancelled, StopIteration)):
                next(stream)
            closing.join()

    async with served(FakeDecode(hanging)) as address:
        await asyncio.to_thread(use, address)


async def test_the_deadline_ends_calls_that_hang() -> None:
    def use(address: str) -> None:
        with Client(address, timeout_s=0.2) as client:
            with pytest.raises(DeadlineExceeded):
                list(client.generate("Water"))
            with pytest.raises(DeadlineExceeded):
                client.complete("Water")

    async with served(FakeDecode(hanging)) as address:
        await asyncio.to_thread(use, address)
