"""From a request's message to a sequence: what is filled in, what is refused, for one model."""

from __future__ import annotations

from typing import Any

import pytest

from decode_service.requests import DEFAULT_MAX_TOKENS, RequestReader
from decode_service.sequence import Sequence
from decode_service.shaping import Shaping
from decode_service.text.output import FinishReason
from decode_service.text.tokenizer import Message, Tokenizer
from headrace.v1 import decode_pb2
from shared.errors import InvalidRequestError
from shared.outlet import Outlet
from tests.models import BOS, CHAT_TEMPLATE, EOS, EOS_ID, tiny_tokenizer

VOCABULARY, CONTEXT = 384, 300
"""The model's vocabulary is padded beyond its tokenizer's 320 tokens."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer(320).to_str(), CHAT_TEMPLATE, {"bos_token": BOS, "eos_token": EOS})


@pytest.fixture(scope="module")
def reader(tokenizer: Tokenizer) -> RequestReader:
    return RequestReader(tokenizer, vocab_size=VOCABULARY, context_length=CONTEXT, end_token_ids=frozenset({EOS_ID}))


def tokens(*ids: int) -> decode_pb2.Prompt:
    return decode_pb2.Prompt(tokens=decode_pb2.TokenPrompt(ids=ids))


async def read(reader: RequestReader, **fields: Any) -> Sequence:
    return await reader.read(decode_pb2.GenerateRequest(**fields), Outlet(), lambda: None)


async def test_what_a_request_leaves_out_is_filled_in(reader: RequestReader) -> None:
    first, second = [await read(reader, prompt=tokens(7, 8)) for _ in range(2)]
    assert (first.tokens, first.prompt_tokens, first.generated_tokens) == ([7, 8], 2, 0)
    assert first.max_tokens == DEFAULT_MAX_TOKENS
    assert (first.sampling.temperature, first.sampling.top_k, first.sampling.top_p) == (0, 0, 1)
    assert first.sampling.seed != second.sampling.seed
    assert first.request_id
    assert first.request_id != second.request_id


async def test_the_default_length_ends_with_the_context(reader: RequestReader) -> None:
    sequence = await read(reader, prompt=tokens(*[5] * 290))
    assert (sequence.max_tokens, sequence.most_tokens) == (10, CONTEXT)


async def test_what_a_request_states_is_taken_as_it_is(reader: RequestReader) -> None:
    sequence = await read(
        reader,
        prompt=tokens(7),
        request_id="r" * 128,
        sampling=decode_pb2.Sampling(temperature=0.5, top_k=9, top_p=0.25, seed=2**64 - 1),
        stopping=decode_pb2.Stopping(max_tokens=299, token_ids=[VOCABULARY - 1]),
    )
    assert (sequence.request_id, sequence.max_tokens) == ("r" * 128, 299)
    sampling = sequence.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.5, 9, 0.25, 2**64 - 1)


async def test_penalties_biases_and_ends_become_the_shaping_of_logits(reader: RequestReader) -> None:
    sequence = await read(
        reader,
        prompt=tokens(7),
        sampling=decode_pb2.Sampling(
            min_p=0.5,
            repetition_penalty=1.5,
            presence_penalty=0.25,
            frequency_penalty=-0.5,
            logit_bias={9: 2.5},
            bad_token_ids=[3],
        ),
        stopping=decode_pb2.Stopping(token_ids=[8], min_tokens=4),
    )
    assert sequence.sampling.min_p == 0.5
    assert sequence.sampling.shaping == Shaping(
        repetition_penalty=1.5,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias=((9, 2.5),),
        bad_token_ids=frozenset({3}),
        min_tokens=4,
        end_token_ids=frozenset({8, EOS_ID}),
    )
    assert (await read(reader, prompt=tokens(7))).sampling.shaping == Shaping(end_token_ids=frozenset({EOS_ID}))


async def test_ends_that_are_ignored_neither_end_an_answer_nor_are_ruled_out(reader: RequestReader) -> None:
    sequence = await read(
        reader, prompt=tokens(7), stopping=decode_pb2.Stopping(ignore_eos=True, min_tokens=4, token_ids=[8])
    )
    assert sequence.sampling.shaping.end_token_ids == {8}
    assert sequence.append([EOS_ID, 9, 8]).token_ids == [EOS_ID, 9, 8]
    assert sequence.output.finish is FinishReason.STOP


async def test_an_answer_that_must_be_longer_than_the_default_length_may_be(reader: RequestReader) -> None:
    sequence = await read(reader, prompt=tokens(7), stopping=decode_pb2.Stopping(min_tokens=290))
    assert sequence.max_tokens == 290


async def test_priority_and_salt_go_with_the_sequence(reader: RequestReader) -> None:
    for priority in (-100, 0, 100):
        sequence = await read(reader, prompt=tokens(7), priority=priority, cache_salt="s" * 128)
        assert (sequence.priority, sequence.cache_salt) == (priority, "s" * 128)


async def test_seed_0_is_a_seed(reader: RequestReader) -> None:
    assert (await read(reader, prompt=tokens(7), sampling=decode_pb2.Sampling(seed=0))).sampling.seed == 0


async def test_chats_are_rendered_with_the_models_own_template(reader: RequestReader, tokenizer: Tokenizer) -> None:
    chat = decode_pb2.ChatPrompt(
        messages=[
            decode_pb2.ChatMessage(role="system", content="be brief"),
            decode_pb2.ChatMessage(role="user", content="pump"),
        ]
    )
    sequence = await read(reader, prompt=decode_pb2.Prompt(chat=chat))
    assert sequence.tokens == tokenizer.encode_chat([Message("system", "be brief"), Message("user", "pump")])


async def test_padded_ids_of_the_model_are_valid_tokens_and_those_beyond_are_not(reader: RequestReader) -> None:
    assert (await read(reader, prompt=tokens(VOCABULARY - 1))).tokens == [VOCABULARY - 1]
    with pytest.raises(InvalidRequestError, match="token id 384 is outside the vocabulary of 384"):
        await read(reader, prompt=tokens(VOCABULARY))


async def test_a_prompt_that_fills_the_context_leaves_no_room_and_one_less_leaves_one(reader: RequestReader) -> None:
    assert (await read(reader, prompt=tokens(*[5] * (CONTEXT - 1)))).max_tokens == 1
    with pytest.raises(InvalidRequestError, match="has 300 tokens and fills the context of 300"):
        await read(reader, prompt=tokens(*[5] * CONTEXT))


async def test_an_error_never_quotes_the_prompt(reader: RequestReader) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        await read(reader, prompt=decode_pb2.Prompt(text="marmalade " * 400))
    assert "marmalade" not in str(refused.value)


async def test_a_model_without_a_template_says_what_to_send_instead() -> None:
    plain = RequestReader(
        Tokenizer(tiny_tokenizer(320).to_str(), None, {}),
        vocab_size=VOCABULARY,
        context_length=CONTEXT,
        end_token_ids=frozenset(),
    )
    chat = decode_pb2.ChatPrompt(messages=[decode_pb2.ChatMessage(role="user", content="pump")])
    with pytest.raises(InvalidRequestError, match=r"no chat template; send prompt\.text or prompt\.tokens"):
        await read(plain, prompt=decode_pb2.Prompt(chat=chat))
