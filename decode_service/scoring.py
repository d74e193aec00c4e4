"""Scores of texts: tokenized here, computed by a prefill replica, and passed on as they come."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable

from decode_service.prefill_client import PrefillClient
from decode_service.requests import RequestReader
from headrace.v1 import decode_pb2, logprobs_pb2
from shared.errors import ConfigurationError
from shared.request_fields import check_name, check_priority, check_top_logprobs


class Scoring:
    """Answers `ScorePrompt`."""

    def __init__(self, reader: RequestReader, client: PrefillClient | None, model_digest: str) -> None:
        """Without a client every request is refused."""
        self._reader = reader
        self._client = client
        self._model_digest = model_digest

    async def score(
        self,
        request: decode_pb2.ScorePromptRequest,
        send: Callable[[decode_pb2.ScorePromptResponse], Awaitable[None]],
        timeout_s: float | None,
    ) -> None:
        """Sends a header, chunks and a result.

        Args:
            timeout_s: what is left of the client's deadline.

        Raises:
            ConfigurationError: there are no prefill replicas.
            HeadraceError: as `PrefillClient.score`.
        """
        if self._client is None:
            raise ConfigurationError(
                "this decode replica has no prefill replicas, which compute scores; start it with --prefill"
            )
        check_name("request_id", request.request_id)
        check_priority(request.priority)
        check_top_logprobs(request.top_logprobs)
        token_ids = await self._reader.prompt_tokens(request.prompt)
        request_id = request.request_id or secrets.token_hex(8)
        header = logprobs_pb2.ScoreHeader(
            request_id=request_id,
            model_digest=self._model_digest,
            prompt_tokens=len(token_ids),
            first_token_id=token_ids[0],
        )
        await send(decode_pb2.ScorePromptResponse(header=header))

        async def send_chunk(chunk: logprobs_pb2.ScoreChunk) -> None:
            await send(decode_pb2.ScorePromptResponse(chunk=chunk))

        result = await self._client.score(
            request_id,
            token_ids,
            send_chunk,
            timeout_s,
            top_logprobs=request.top_logprobs,
            priority=request.priority,
        )
        await send(decode_pb2.ScorePromptResponse(result=result))
