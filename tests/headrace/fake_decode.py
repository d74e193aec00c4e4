"""A decode service without a model: real gRPC, scripted answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from headrace.v1 import decode_pb2, decode_pb2_grpc, logprobs_pb2, status_pb2, status_pb2_grpc

Script = Callable[[Any, Any], AsyncIterator[Any]]
"""Answers one Generate call: takes request and context, yields events."""

DIGEST = "d1" * 32


def header(request: Any) -> Any:
    """The first event of an answer."""
    return decode_pb2.GenerateResponse(
        header=decode_pb2.GenerationHeader(
            request_id=request.request_id or "made-up",
            model_digest=DIGEST,
            prompt_tokens=3,
            seed=request.sampling.seed,
        )
    )


def chunk(text: str, *token_ids: int, logprobs: Sequence[Any] = ()) -> Any:
    """An event with text."""
    return decode_pb2.GenerateResponse(
        chunk=decode_pb2.GenerationChunk(text=text, token_ids=token_ids, logprobs=logprobs)
    )


def two_logprobs(request: Any) -> list[Any]:
    """Log-probabilities of two tokens, where the request asks for them."""
    top = [logprobs_pb2.TopLogprob(token_id=9, logprob=-0.25)] * request.top_logprobs
    return [logprobs_pb2.TokenLogprobs(logprob=-0.5, top=top)] * (2 if request.logprobs else 0)


def result() -> Any:
    """The last event of an answer."""
    return decode_pb2.GenerateResponse(
        result=decode_pb2.GenerationResult(
            finish_reason=decode_pb2.FINISH_REASON_STOP,
            usage=decode_pb2.Usage(prompt_tokens=3, completion_tokens=4, draft_tokens=6, accepted_tokens=2, passes=2),
            timings=decode_pb2.Timings(queue_ms=1, prefill_ms=2, prefill_compute_ms=1.5, first_token_ms=3, decode_ms=4),
        )
    )


async def echo(request: Any, context: Any) -> AsyncIterator[Any]:
    """Answers with the prompt's text, in two chunks."""
    prompt = request.prompt
    text = prompt.text or "".join(message.content for message in prompt.chat.messages)
    yield header(request)
    yield chunk(text[:2], 1, 2, logprobs=two_logprobs(request))
    yield chunk(text[2:], 3, 4, logprobs=two_logprobs(request))
    yield result()


class FakeDecode(decode_pb2_grpc.DecodeServiceServicer, status_pb2_grpc.StatusServiceServicer):
    """Answers by its script; remembers what it was asked and whether a call was cancelled."""

    def __init__(self, script: Script = echo, digest: str = DIGEST) -> None:
        self.script = script
        self.digest = digest
        self.requests: list[Any] = []
        self.metadata: list[dict[str, str]] = []
        """What came with every call, of any kind."""
        self.cancelled = asyncio.Event()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        try:
            async for event in self.script(request, context):
                yield event
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def Complete(self, request: Any, context: Any) -> Any:
        answer = decode_pb2.CompleteResponse()
        async for event in self.Generate(request, context):
            answer.header.MergeFrom(event.header)
            answer.text += event.chunk.text
            answer.token_ids.extend(event.chunk.token_ids)
            answer.logprobs.extend(event.chunk.logprobs)
            answer.result.MergeFrom(event.result)
        return answer

    async def ScorePrompt(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        response = decode_pb2.ScorePromptResponse
        yield response(
            header=logprobs_pb2.ScoreHeader(
                request_id=request.request_id or "made-up", model_digest=DIGEST, prompt_tokens=3, first_token_id=7
            )
        )
        top = [logprobs_pb2.TopLogprob(token_id=9, logprob=-0.25)] * request.top_logprobs
        place = logprobs_pb2.TokenLogprobs(logprob=-0.5, top=top)
        yield response(chunk=logprobs_pb2.ScoreChunk(first_token=1, token_ids=[8, 9], logprobs=[place] * 2))
        yield response(result=logprobs_pb2.ScoreResult(queue_ms=1, compute_ms=2, batch_prompts=1, batch_tokens=3))

    async def GetStatus(self, request: Any, context: Any) -> Any:
        answered = len(self.requests)
        self.metadata.append(dict(context.invocation_metadata()))
        return status_pb2.GetStatusResponse(
            stage=status_pb2.STAGE_DECODE,
            model_digest=self.digest,
            scheme="int8",
            passes=10 + answered,
            generated_tokens=100 + 4 * answered,
            streamed_bytes=1000 * answered,
            peak_rss_bytes=5,
            budget_bytes=7,
        )


@asynccontextmanager
async def served(fake: FakeDecode, credentials: Any = None) -> AsyncIterator[str]:
    """Serves it on a free port, encrypted where there are credentials; yields the address."""
    server = grpc.aio.server()
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(fake, server)
    status_pb2_grpc.add_StatusServiceServicer_to_server(fake, server)
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(), server)
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def failing(*codes: Any, after: Callable[[Any], list[Any]] = lambda request: []) -> Script:
    """Fails with one code after the other, each time after the given events, and then echoes."""
    left = list(codes)

    async def script(request: Any, context: Any) -> AsyncIterator[Any]:
        if left:
            for event in after(request):
                yield event
            await context.abort(left.pop(0), "as scripted")
        async for event in echo(request, context):
            yield event

    return script


async def hanging(request: Any, context: Any) -> AsyncIterator[Any]:
    """Sends a header and one chunk, then nothing more."""
    yield header(request)
    yield chunk("Wat", 1)
    await asyncio.Event().wait()
