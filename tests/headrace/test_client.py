"""The asynchronous client against a scripted decode service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from headrace import (
    AsyncClient,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidRequest,
    ResourceExhausted,
    RetryPolicy,
    ServerError,
    TokenLogprobs,
    Unavailable,
)
from tests.headrace.fake_decode import DIGEST, FakeDecode, chunk, echo, failing, hanging, header, served

AT_ONCE = RetryPolicy(attempts=3, first_delay_s=0.0)
Code = grpc.StatusCode


async def test_a_stream_delivers_chunks_then_tells_header_and_result() -> None:
    async with served(FakeDecode()) as address, AsyncClient(address) as client:
        stream = client.generate("Water", seed=7, request_id="r1")
        chunks = [(chunk.text, chunk.token_ids) async for chunk in stream]
    assert chunks == [("Wa", (1, 2)), ("ter", (3, 4))]
    assert stream.header is not None
    assert (stream.header.request_id, stream.header.model_digest, stream.header.seed) == ("r1", DIGEST, 7)
    assert stream.result is not None
    assert (stream.result.finish_reason, stream.result.usage.accepted_tokens) == ("stop", 2)


async def test_complete_returns_the_whole_answer() -> None:
    async with served(FakeDecode()) as address, AsyncClient(address) as client:
        answer = await client.complete("Water")
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("Water", (1, 2, 3, 4), "stop")
    assert (answer.request_id, answer.model_digest, answer.timings.decode_ms) == ("made-up", DIGEST, 4.0)


async def test_log_probabilities_come_with_their_tokens_where_they_were_asked_for() -> None:
    place = TokenLogprobs(-0.5, ((9, -0.25),))
    async with served(FakeDecode()) as address, AsyncClient(address) as client:
        stream = client.generate("Water", logprobs=True, top_logprobs=1)
        assert [chunk.logprobs async for chunk in stream] == [(place, place)] * 2
        assert (await client.complete("Water", logprobs=True, top_logprobs=1)).logprobs == (place,) * 4
        assert (await client.complete("Water", logprobs=True)).logprobs == (TokenLogprobs(-0.5, ()),) * 4
        assert (await client.complete("Water")).logprobs == ()


async def test_a_request_too_large_to_travel_is_refused_before_it_is_sent() -> None:
    fake = FakeDecode()
    async with served(fake) as address, AsyncClient(address) as client:
        with pytest.raises(InvalidRequest, match=r"5,000,0\d\d bytes, at most 4,194,304"):
            await client.complete("x" * 5_000_000)
    assert fake.requests == []


async def test_every_option_travels() -> None:
    fake = FakeDecode()
    async with served(fake) as address, AsyncClient(address) as client:
        await client.complete(
            messages=[{"role": "user", "content": "Hi"}],
            max_tokens=5,
            temperature=0.5,
            top_k=3,
            top_p=0.25,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=-0.5,
            frequency_penalty=0.75,
            logit_bias={8: -100, 9: 2.5},
            bad_token_ids=[3, 4],
            seed=2**64 - 1,
            stop="end",
            stop_token_ids=[9],
            ignore_eos=True,
            min_tokens=2,
            request_id="r2",
        )
        await client.complete(token_ids=[4, 5])
    first, second = fake.requests
    assert [(turn.role, turn.content) for turn in first.prompt.chat.messages] == [("user", "Hi")]
    assert (first.sampling.temperature, first.sampling.top_k, first.sampling.top_p) == (0.5, 3, 0.25)
    assert (first.sampling.seed, first.stopping.max_tokens) == (2**64 - 1, 5)
    assert (list(first.stopping.strings), list(first.stopping.token_ids), first.request_id) == (["end"], [9], "r2")
    shaping = first.sampling
    assert (shaping.min_p, shaping.repetition_penalty) == (0.125, 1.5)
    assert (shaping.presence_penalty, shaping.frequency_penalty) == (-0.5, 0.75)
    assert (dict(shaping.logit_bias), list(shaping.bad_token_ids)) == ({8: -100, 9: 2.5}, [3, 4])
    assert (first.stopping.ignore_eos, first.stopping.min_tokens) == (True, 2)
    assert list(second.prompt.tokens.ids) == [4, 5]
    assert not second.sampling.HasField("repetition_penalty")
    assert not second.sampling.HasField("seed")
    assert not second.stopping.HasField("max_tokens")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (Code.INVALID_ARGUMENT, InvalidRequest),
        (Code.FAILED_PRECONDITION, FailedPrecondition),
        (Code.RESOURCE_EXHAUSTED, ResourceExhausted),
        (Code.UNAVAILABLE, Unavailable),
        (Code.DEADLINE_EXCEEDED, DeadlineExceeded),
        (Code.CANCELLED, Cancelled),
        (Code.DATA_LOSS, DataLoss),
        (Code.INTERNAL, ServerError),
        (Code.UNIMPLEMENTED, ServerError),
    ],
)
async def test_a_status_code_becomes_its_exception(code: Any, kind: type[Exception]) -> None:
    fake = FakeDecode(failing(*[code] * 6))
    async with served(fake) as address, AsyncClient(address, retry=AT_ONCE) as client:
        with pytest.raises(kind, match="as scripted") as whole:
            await client.complete("Water")
        with pytest.raises(kind, match="as scripted"):
            await anext(client.generate("Water"))
    assert whole.value.status == code.name  # type: ignore[attr-defined]
    assert len(fake.requests) == (6 if code is Code.UNAVAILABLE else 2)


async def test_unavailable_is_tried_again_until_a_chunk_was_delivered() -> None:
    fake = FakeDecode(failing(Code.UNAVAILABLE, Code.UNAVAILABLE, after=lambda request: [header(request)]))
    async with served(fake) as address, AsyncClient(address, retry=AT_ONCE) as client:
        assert [chunk.text async for chunk in client.generate("Water")] == ["Wa", "ter"]
    assert len(fake.requests) == 3


async def test_after_the_first_chunk_nothing_is_tried_again() -> None:
    fake = FakeDecode(failing(Code.UNAVAILABLE, after=lambda request: [header(request), chunk("Wa", 1)]))
    async with served(fake) as address, AsyncClient(address, retry=AT_ONCE) as client:
        stream = client.generate("Water")
        assert (await anext(stream)).text == "Wa"
        with pytest.raises(Unavailable):
            await anext(stream)
    assert len(fake.requests) == 1


async def test_no_replica_at_all_is_unavailable() -> None:
    async with served(FakeDecode()) as address:
        pass
    async with AsyncClient(address, retry=AT_ONCE) as client:
        with pytest.raises(Unavailable):
            await client.complete("Water")


async def test_the_deadline_ends_a_call_that_hangs() -> None:
    async with served(FakeDecode(hanging)) as address, AsyncClient(address) as client:
        stream = client.generate("Water", timeout_s=0.2)
        with pytest.raises(DeadlineExceeded):
            async for _ in stream:
                pass


async def test_leaving_a_stream_cancels_its_call() -> None:
    fake = FakeDecode(hanging)
    async with served(fake) as address, AsyncClient(address) as client:
        async with client.generate("Water") as stream:
            await anext(stream)
        await fake.cancelled.wait()
        assert [chunk async for chunk in stream] == []


async def test_cancelling_the_task_cancels_its_call() -> None:
    fake = FakeDecode(hanging)
    async with served(fake) as address, AsyncClient(address) as client:
        stream = client.generate("Water")
        await anext(stream)
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await fake.cancelled.wait()


async def test_closing_from_elsewhere_ends_a_waiting_reader_with_cancelled() -> None:
    fake = FakeDecode(hanging)
    async with served(fake) as address, AsyncClient(address) as client:
        stream = client.generate("Water")
        await anext(stream)
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        await stream.aclose()
        with pytest.raises(Cancelled):
            await reading


async def test_a_stream_without_a_result_is_an_error_not_an_answer() -> None:
    async def cut_short(request: Any, context: Any) -> AsyncIterator[Any]:
        yield header(request)
        yield chunk("Wa", 1)

    async with served(FakeDecode(cut_short)) as address, AsyncClient(address) as client:
        with pytest.raises(ServerError, match="without a result"):
            async for _ in client.generate("Water"):
                pass


async def test_calls_are_spread_over_all_addresses() -> None:
    first, second = FakeDecode(), FakeDecode()
    async with served(first) as one, served(second) as two, AsyncClient([one, two]) as client:
        while not (first.requests and second.requests):
            await client.complete("Water")
        before = len(first.requests), len(second.requests)
        for _ in range(6):
            await client.complete("Water")
    assert (len(first.requests) - before[0], len(second.requests) - before[1]) == (3, 3)


async def test_a_dead_address_leaves_the_work_to_the_others() -> None:
    async with served(FakeDecode()) as dead:
        pass
    fake = FakeDecode()
    async with served(fake) as alive, AsyncClient([dead, alive]) as client:
        for _ in range(4):
            assert (await client.complete("Water")).text == "Water"
    assert len(fake.requests) == 4


async def test_a_replica_that_dies_midway_leaves_the_next_calls_to_the_others() -> None:
    fake = FakeDecode()
    async with served(fake) as alive:
        async with served(FakeDecode(echo)) as dying:
            client = AsyncClient([dying, alive])
            await client.complete("Water")
        for _ in range(4):
            assert (await client.complete("Water")).text == "Water"
        await client.close()


async def test_status_is_asked_of_every_address() -> None:
    async with served(FakeDecode()) as one, served(FakeDecode(digest="aa")) as two, AsyncClient([one, two]) as client:
        statuses = await client.status()
    assert [(status.address, status.stage) for status in statuses] == [(one, "decode"), (two, "decode")]
    assert [status.model_digest for status in statuses] == [DIGEST, "aa"]


async def test_status_names_the_address_that_does_not_answer() -> None:
    async with served(FakeDecode()) as dead:
        pass
    async with AsyncClient(dead) as client:
        with pytest.raises(Unavailable, match=dead):
            await client.status()
