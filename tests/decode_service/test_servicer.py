"""Generate and Complete over gRPC: what they refuse, what they report, and that nothing outlives a call."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace.v1 import decode_pb2
from shared.pack.reader import Pack
from tests.conftest import TinyPack
from tests.end_to_end.stack import decode_replica, prefill_replica, services

VOCABULARY, CONTEXT = 320, 512
TEXT = {"text": "water in cellar 7"}


@pytest.fixture(scope="module")
def pack(tiny_pack: TinyPack) -> Path:
    return tiny_pack("fp32")


def fields(**changes: Any) -> dict[str, Any]:
    """A good request's fields, some of them changed."""
    return {"prompt": decode_pb2.Prompt(**TEXT)} | changes


def tokens(ids: list[int]) -> decode_pb2.Prompt:
    return decode_pb2.Prompt(tokens=decode_pb2.TokenPrompt(ids=ids))


def sampling(**values: Any) -> dict[str, Any]:
    return fields(sampling=decode_pb2.Sampling(**values))


def stopping(**values: Any) -> dict[str, Any]:
    return fields(stopping=decode_pb2.Stopping(**values))


BAD: Mapping[str, tuple[dict[str, Any], str]] = {
    "no prompt": ({}, "prompt is missing; set prompt.text, prompt.chat or prompt.tokens"),
    "no form": (fields(prompt=decode_pb2.Prompt()), "prompt is missing"),
    "empty text": (fields(prompt=decode_pb2.Prompt(text="")), "the prompt is empty"),
    "no tokens": (fields(prompt=tokens([])), "the prompt is empty"),
    "empty chat": (fields(prompt=decode_pb2.Prompt(chat=decode_pb2.ChatPrompt())), "messages"),
    "token out of vocabulary": (fields(prompt=tokens([5, 320])), "token id 320 is outside the vocabulary of 320"),
    "prompt too long": (fields(prompt=tokens([5] * 513)), "has 513 tokens, the model's context holds 512"),
    "no room for an answer": (fields(prompt=tokens([5] * 512)), "has 512 tokens and fills the context of 512"),
    "max_tokens 0": (stopping(max_tokens=0), "stopping.max_tokens is 0"),
    "max_tokens too large": (
        fields(prompt=tokens([5] * 500), stopping=decode_pb2.Stopping(max_tokens=13)),
        "stopping.max_tokens is 13, but after 500 prompt tokens the context of 512 has 12 left",
    ),
    "max_tokens far too large": (stopping(max_tokens=2**32 - 1), "stopping.max_tokens is 4294967295"),
    "temperature negative": (sampling(temperature=-0.5), "temperature is -0.5"),
    "temperature NaN": (sampling(temperature=math.nan), "temperature is nan"),
    "temperature infinite": (sampling(temperature=math.inf), "temperature is inf"),
    "temperature too high": (sampling(temperature=101.0), "temperature is 101.0; it must be from 0 to 100"),
    "top_p 0": (sampling(top_p=0.0), "top_p is 0.0; it must be above 0 and at most 1"),
    "top_p above 1": (sampling(top_p=1.5), "top_p is 1.5"),
    "top_p negative": (sampling(top_p=-0.25), "top_p is -0.25"),
    "top_p NaN": (sampling(top_p=math.nan), "top_p is nan"),
    "min_p above 1": (sampling(min_p=1.5), "min_p is 1.5; it must be from 0"),
    "repetition_penalty 0": (sampling(repetition_penalty=0.0), "repetition_penalty is 0.0; it must be from 0.1 to 10"),
    "presence_penalty": (sampling(presence_penalty=-2.5), "presence_penalty is -2.5; it must be from -2 to 2"),
    "frequency_penalty": (sampling(frequency_penalty=math.inf), "frequency_penalty is inf"),
    "logit_bias": (sampling(logit_bias={7: -101.0}), "logit_bias of token 7 is -101.0; it must be from -100 to 100"),
    "unknown biased id": (sampling(logit_bias={320: 1.0}), "logit_bias has [320]; ids must be from 0 to 319"),
    "unknown bad id": (sampling(bad_token_ids=[320]), "bad_token_ids has [320]; ids must be from 0 to 319"),
    "nothing left": (sampling(bad_token_ids=range(320)), "rule out all 320 tokens of the vocabulary"),
    "min_tokens above max_tokens": (
        stopping(max_tokens=5, min_tokens=6),
        "stopping.min_tokens is 6; it must be from 0 to max_tokens, here 5",
    ),
    "min_tokens beyond the context": (stopping(min_tokens=2**32 - 1), "stopping.min_tokens is 4294967295"),
    "top_logprobs 21": (fields(logprobs=True, top_logprobs=21), "top_logprobs is 21; it must be from 0 to 20"),
    "top_logprobs alone": (fields(top_logprobs=2), "top_logprobs is 2, but logprobs is not set; set it too"),
    "17 stop strings": (stopping(strings=[str(n) for n in range(17)]), "stopping.strings has 17 entries; at most 16"),
    "empty stop string": (stopping(strings=["a", ""]), "stopping.strings[1] is empty"),
    "unknown stop ids": (stopping(token_ids=[3, 320, 400]), "stopping.token_ids has [320, 400]; ids must be from 0"),
    "request_id too long": (fields(request_id="x" * 129), "request_id has 129 characters; at most 128"),
    "cache_salt too long": (fields(cache_salt="x" * 129), "cache_salt has 129 characters; at most 128"),
    "priority too high": (fields(priority=101), "priority is 101; it must be from -100 to 100"),
    "priority too low": (fields(priority=-(2**31)), "priority is -2147483648; it must be from -100 to 100"),
}


async def test_every_request_that_can_never_be_served_is_refused_with_field_value_and_range(pack: Path) -> None:
    got: dict[str, Any] = {}
    async with services(pack) as decode:
        for name, (bad, message) in BAD.items():
            calls = (
                decode.stub.Complete(decode_pb2.CompleteRequest(**bad)),
                decode.stub.Generate(decode_pb2.GenerateRequest(**bad)).read(),
            )
            for call in calls:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call
                found = str(refused.value.details())
                got[name] = (refused.value.code().name, message if message in found else found)
        await decode.idle()
        assert decode.telemetry.totals.prompt_tokens == 0
    assert got == {name: ("INVALID_ARGUMENT", message) for name, (_, message) in BAD.items()}


async def test_a_request_larger_than_all_kv_memory_is_refused_with_both_numbers(pack: Path) -> None:
    async with services(pack, kv_blocks=4) as decode:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await decode.stub.Complete(
                decode_pb2.CompleteRequest(prompt=tokens([5] * 50), stopping=decode_pb2.Stopping(max_tokens=20))
            )
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "prompt and max_tokens make 70 tokens, this server's KV memory holds 64" in str(refused.value.details())


async def test_a_stream_is_a_header_chunks_and_a_result_and_says_what_the_whole_answer_says(pack: Path) -> None:
    request: dict[str, Any] = fields(
        sampling=decode_pb2.Sampling(temperature=0.7, seed=3),
        stopping=decode_pb2.Stopping(max_tokens=24),
        request_id="r1",
    )
    async with services(pack, draft="ngram") as decode:
        events = [event async for event in decode.stub.Generate(decode_pb2.GenerateRequest(**request))]
        whole = await decode.stub.Complete(decode_pb2.CompleteRequest(**request))
        await decode.idle()
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["header", *["chunk"] * (len(events) - 2), "result"]
    header, *chunks, result = (getattr(event, kind) for event, kind in zip(events, kinds, strict=True))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == list(whole.token_ids)
    assert header == whole.header
    assert result.finish_reason == whole.result.finish_reason
    assert result.usage == whole.result.usage
    assert (header.request_id, header.seed, header.model_digest) == ("r1", 3, Pack.open(pack).manifest.model_digest)
    usage = result.usage
    assert header.prompt_tokens == usage.prompt_tokens > 0
    assert usage.completion_tokens == len(whole.token_ids) <= 24
    assert usage.passes + usage.accepted_tokens + 1 >= usage.completion_tokens
    timings = result.timings
    assert 0 < timings.prefill_compute_ms <= timings.prefill_ms <= timings.first_token_ms
    assert timings.decode_ms > 0


async def test_an_answer_may_fill_the_context_to_its_last_token(pack: Path) -> None:
    async with services(pack, draft="ngram", draft_length=15) as decode:
        answers = [await decode.client.complete(token_ids=[5] * 511), await decode.client.complete(token_ids=[7] * 495)]
        await decode.idle()
    assert [len(answer.token_ids) for answer in answers if answer.finish_reason == "length"] == [1, 17]


async def test_without_a_seed_the_service_draws_one_and_reports_the_one_that_repeats_the_answer(pack: Path) -> None:
    async with services(pack) as decode:
        first, second = [
            await decode.client.complete("cellar", temperature=1.0, max_tokens=16, seed=None) for _ in range(2)
        ]
        again = await decode.client.complete("cellar", temperature=1.0, max_tokens=16, seed=first.seed)
    assert first.seed != second.seed
    assert first.request_id != second.request_id
    assert again.token_ids == first.token_ids


async def test_stop_strings_and_stop_tokens_end_an_answer_and_only_tokens_are_part_of_it(pack: Path) -> None:
    async with services(pack, draft="ngram") as decode:
        free = await decode.client.complete("cellar", max_tokens=32)
        stop = free.text[5:8]
        by_string = await decode.client.complete("cellar", max_tokens=32, stop=[stop, "never"])
        token = free.token_ids[4]
        by_token = await decode.client.complete("cellar", max_tokens=32, stop_token_ids=[token])
    assert by_string.text == free.text[: free.text.index(stop)]
    assert by_token.token_ids == free.token_ids[: free.token_ids.index(token) + 1]
    assert {by_string.finish_reason, by_token.finish_reason} == {"stop"}


async def test_text_chat_and_tokens_that_mean_the_same_get_the_same_answer(pack: Path) -> None:
    from decode_service.text.tokenizer import Message, Tokenizer

    opened = Pack.open(pack)
    tokenizer = Tokenizer(opened.tokenizer_json(), opened.chat_template(), opened.manifest.special_tokens)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "leak"}]
    rendered = tokenizer.render_chat([Message(**message) for message in messages])
    async with services(pack) as decode:
        answers = [
            await decode.client.complete(rendered, max_tokens=16),
            await decode.client.complete(messages=messages, max_tokens=16),
            await decode.client.complete(token_ids=tokenizer.encode(rendered), max_tokens=16),
        ]
    assert len({answer.token_ids for answer in answers}) == 1
    assert len({answer.usage.prompt_tokens for answer in answers}) == 1


async def test_totals_tell_what_was_done(pack: Path) -> None:
    async with prefill_replica(pack) as prefill, decode_replica(pack, prefill.address, draft="ngram") as decode:
        answers = [await decode.client.complete(token_ids=[4, 5] * 20, max_tokens=30) for _ in range(2)]
        computed, totals = prefill.telemetry.totals, decode.telemetry.totals
    usages = [dataclasses.asdict(answer.usage) for answer in answers]
    assert totals.prompt_tokens == sum(usage["prompt_tokens"] for usage in usages) == 80
    assert computed.prompt_tokens + computed.cached_tokens == 80
    assert totals.cached_tokens == computed.cached_tokens == sum(usage["cached_tokens"] for usage in usages) == 32
    assert totals.generated_tokens == sum(usage["completion_tokens"] for usage in usages)
    assert totals.draft_tokens == sum(usage["draft_tokens"] for usage in usages) > 0
    assert totals.accepted_tokens == sum(usage["accepted_tokens"] for usage in usages)
    assert totals.passes == totals.batched_requests == sum(usage["passes"] for usage in usages)
    assert computed.passes == 2
