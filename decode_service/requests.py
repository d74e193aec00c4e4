"""From a request message to a sequence, everything validated. Errors name the field as the protos do."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from decode_service.requests_chat import chat_extras, chat_messages
from decode_service.sampling import MAX_SEED, SamplingParams
from decode_service.sequence import Sequence
from decode_service.shaping import Shaping
from decode_service.text.output import Emission, TextOutput
from decode_service.text.stopping import StopConditions
from decode_service.text.tokenizer import Tokenizer
from headrace.v1 import decode_pb2
from shared.errors import InvalidRequestError
from shared.kv.handoff import prompt_tokens_error
from shared.outlet import Outlet
from shared.request_fields import check_name, check_priority, check_top_logprobs

DEFAULT_MAX_TOKENS = 256

AnyRequest = decode_pb2.GenerateRequest | decode_pb2.CompleteRequest


class RequestReader:
    """Reads requests for one model."""

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, context_length: int, end_token_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._context_length = context_length
        # A model may name ends beyond its vocabulary; these are never chosen, so nothing has to rule them out.
        self._end_token_ids = frozenset(token_id for token_id in end_token_ids if token_id < vocab_size)

    async def read(self, request: AnyRequest, outlet: Outlet[Emission], on_admitted: Callable[[], None]) -> Sequence:
        """Makes the sequence that a request asks for. Tokenizing happens beside the event loop.

        Raises:
            InvalidRequestError: it can never be served as it is.
        """
        for name in ("request_id", "cache_salt"):
            check_name(name, getattr(request, name))
        check_priority(request.priority)
        end_ids = frozenset[int]() if request.stopping.ignore_eos else self._end_token_ids
        sampling = self._sampling(request, end_ids)
        tokens = await self.prompt_tokens(request.prompt)
        stop = self._stop_conditions(request.stopping, len(tokens))
        return Sequence(
            request_id=request.request_id or secrets.token_hex(8),
            tokens=tokens,
            prompt_tokens=len(tokens),
            max_tokens=stop.max_tokens,
            sampling=sampling,
            output=TextOutput(self._tokenizer, stop, end_ids),
            outlet=outlet,
            on_admitted=on_admitted,
            priority=request.priority,
            cache_salt=request.cache_salt,
            top_logprobs=_top_logprobs(request),
        )

    async def prompt_tokens(self, prompt: decode_pb2.Prompt) -> list[int]:
        """The tokens of a prompt in any form. Tokenizing happens beside the event loop.

        Raises:
            InvalidRequestError: there are none, too many, or some that the model does not know.
        """
        tokens = await asyncio.to_thread(self._prompt_tokens, prompt)
        if error := prompt_tokens_error(tokens, self._vocab_size, self._context_length):
            raise InvalidRequestError(error)
        return tokens

    def _prompt_tokens(self, prompt: decode_pb2.Prompt) -> list[int]:
        match prompt.WhichOneof("form"):
            case "text":
                return self._tokenizer.encode(prompt.text)
            case "chat":
                return self._tokenizer.encode_chat(chat_messages(prompt.chat), chat_extras(prompt.chat))
            case "tokens":
                return list(prompt.tokens.ids)
        raise InvalidRequestError("prompt is missing; set prompt.text, prompt.chat or prompt.tokens")

    def _stop_conditions(self, stopping: decode_pb2.Stopping, prompt_tokens: int) -> StopConditions:
        left = self._context_length - prompt_tokens
        if left < 1:
            raise InvalidRequestError(
                f"the prompt has {prompt_tokens} tokens and fills the context of {self._context_length}; "
                "shorten it to leave room for an answer"
            )
        default = min(max(DEFAULT_MAX_TOKENS, stopping.min_tokens), left)
        max_tokens = stopping.max_tokens if stopping.HasField("max_tokens") else default
        if max_tokens > left:
            raise InvalidRequestError(
                f"stopping.max_tokens is {max_tokens}, but after {prompt_tokens} prompt tokens the context of "
                f"{self._context_length} has {left} left; ask for less"
            )
        if stopping.min_tokens > max_tokens:
            raise InvalidRequestError(
                f"stopping.min_tokens is {stopping.min_tokens}; it must be from 0 to max_tokens, here {max_tokens}"
            )
        conditions = StopConditions(max_tokens, tuple(stopping.strings), frozenset(stopping.token_ids))
        conditions.require_vocabulary(self._vocab_size)
        return conditions

    def _sampling(self, request: AnyRequest, end_ids: frozenset[int]) -> SamplingParams:
        message, stopping = request.sampling, request.stopping
        shaping = Shaping(
            repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            logit_bias=tuple(message.logit_bias.items()),
            bad_token_ids=frozenset(message.bad_token_ids),
            min_tokens=stopping.min_tokens,
            end_token_ids=end_ids | frozenset(stopping.token_ids),
        )
        shaping.require_vocabulary(self._vocab_size)
        return SamplingParams(
            temperature=message.temperature,
            top_k=message.top_k,
            top_p=message.top_p if message.HasField("top_p") else 1.0,
            min_p=message.min_p,
            seed=message.seed if message.HasField("seed") else secrets.randbelow(MAX_SEED + 1),
            shaping=shaping,
        )


def _top_logprobs(request: AnyRequest) -> int | None:
    """How many alternatives to report with each token's log-probability; None reports neither."""
    check_top_logprobs(request.top_logprobs)
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequestError(f"top_logprobs is {request.top_logprobs}, but logprobs is not set; set it too")
    return request.top_logprobs if request.logprobs else None
