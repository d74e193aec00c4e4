"""The Score call: the probabilities that transformers finds, from passes shared with prompts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.v1 import prefill_pb2
from shared.limits import SCORED_ROWS
from tests.conftest import TinyCheckpoint, TinyPack
from tests.end_to_end.stack import until
from tests.prefill_service.test_servicer import everything_of, replica, request_for

TEXT = [3 + number * 7 % 310 for number in range(2 * SCORED_ROWS + 5)]


@pytest.fixture(scope="module")
def pack(tiny_pack: TinyPack) -> Path:
    return tiny_pack("fp32")


def expected_logprobs(checkpoint: Path, token_ids: list[int]) -> torch.Tensor:
    """What transformers says of each next token, float32 [tokens - 1, vocabulary]."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids])).logits[0, :-1]
    return torch.log_softmax(logits, dim=-1)


async def scored(stub: Any, token_ids: list[int], **fields: Any) -> list[prefill_pb2.ScoreResponse]:
    return await everything_of(stub.Score(prefill_pb2.ScoreRequest(token_ids=token_ids, **fields)))


def flattened(chunks: list[prefill_pb2.ScoreResponse]) -> tuple[list[int], list[Any]]:
    """Tokens and scores of all chunks, which must follow each other."""
    token_ids: list[int] = []
    places: list[Any] = []
    for response in chunks:
        assert response.chunk.first_token == len(token_ids) + 1
        assert len(response.chunk.token_ids) == len(response.chunk.logprobs)
        token_ids += response.chunk.token_ids
        places += response.chunk.logprobs
    return token_ids, places


async def test_scores_are_those_of_transformers(pack: Path, tiny_model: TinyCheckpoint) -> None:
    expected = expected_logprobs(tiny_model(), TEXT)
    async with replica(pack) as (_, stub):
        header, *chunks, result = await scored(stub, TEXT, top_logprobs=5, request_id="s1")
    token_ids, places = flattened(chunks)
    assert (header.header.request_id, header.header.prompt_tokens) == ("s1", len(TEXT))
    assert [header.header.first_token_id, *token_ids] == TEXT
    assert len(chunks) > 2
    assert (result.result.batch_prompts, result.result.batch_tokens) == (1, len(TEXT))
    found = torch.tensor([place.logprob for place in places])
    torch.testing.assert_close(found, expected[range(len(TEXT) - 1), TEXT[1:]], rtol=0, atol=1e-4)
    for place, row in zip(places, expected, strict=True):
        values, ids = row.topk(5)
        assert [other.token_id for other in place.top] == ids.tolist()
        torch.testing.assert_close(torch.tensor([other.logprob for other in place.top]), values, rtol=0, atol=1e-4)


async def test_texts_share_a_pass_with_prompts_and_with_each_other_and_nothing_changes(pack: Path) -> None:
    async with replica(pack) as (_, stub):
        (_, *alone, _), (_, *other_alone, _) = await scored(stub, TEXT), await scored(stub, TEXT[::-1])
    async with replica(pack, computes=False) as (prefill, stub):
        calls = [
            asyncio.create_task(scored(stub, TEXT)),
            asyncio.create_task(everything_of(stub.Prefill(request_for(pack, TEXT)))),
            asyncio.create_task(scored(stub, TEXT[::-1], priority=3)),
        ]
        await until(lambda: prefill.scheduler.queued == 3)
        prefill.engine.start()
        (_, *first, result), handoff, (_, *second, _) = await asyncio.gather(*calls)
        assert prefill.telemetry.totals.passes == 1
        prefill.scheduler.close()
        await asyncio.to_thread(prefill.engine.join)
    assert handoff[-1].WhichOneof("event") == "result"
    assert (result.result.batch_prompts, result.result.batch_tokens) == (3, 3 * len(TEXT))
    assert (flattened(first), flattened(second)) == (flattened(alone), flattened(other_alone))


async def test_a_text_of_one_token_has_no_scores(pack: Path) -> None:
    async with replica(pack) as (_, stub):
        header, result = await scored(stub, [7])
    assert (header.header.first_token_id, header.header.prompt_tokens) == (7, 1)
    assert result.WhichOneof("event") == "result"


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"token_ids": []}, "INVALID_ARGUMENT", "the prompt is empty"),
    ({"token_ids": [320]}, "INVALID_ARGUMENT", "token id 320 is outside the vocabulary of 320"),
    ({"token_ids": [2] * 513}, "INVALID_ARGUMENT", "has 513 tokens, the model's context holds 512"),
    ({"top_logprobs": 21}, "INVALID_ARGUMENT", "top_logprobs is 21; it must be from 0 to 20"),
    ({"priority": -101}, "INVALID_ARGUMENT", "priority is -101; it must be from -100 to 100"),
    ({"request_id": "x" * 129}, "INVALID_ARGUMENT", "request_id has 129 characters"),
    ({"model_digest": "f" * 64}, "FAILED_PRECONDITION", "the caller expects ffffffffffff"),
]


async def test_what_cannot_be_scored_is_refused_by_name_before_any_work(pack: Path) -> None:
    async with replica(pack) as (prefill, stub):
        for fields, status, message in REFUSED:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await scored(stub, **{"token_ids": [1, 2]} | fields)
            assert (refused.value.code().name, message in str(refused.value.details())) == (status, True), fields
        assert prefill.telemetry.totals.passes == 0


async def test_a_text_that_nobody_waits_for_leaves_nothing(pack: Path) -> None:
    async with replica(pack, computes=False) as (prefill, stub):
        call = stub.Score(prefill_pb2.ScoreRequest(token_ids=TEXT))
        await until(lambda: prefill.scheduler.queued == 1)
        call.cancel()
        await until(lambda: prefill.scheduler.queued == 0)
        assert prefill.spool.memory_bytes == 0
