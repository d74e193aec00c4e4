"""Calling prefill: one channel per replica, the least busy first, another one when a call fails."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from headrace.v1 import prefill_pb2, prefill_pb2_grpc
from shared.config import CHANNEL_OPTIONS
from shared.errors import (
    CapacityError,
    DataLossError,
    HeadraceError,
    InvalidRequestError,
    ModelMismatchError,
    UnavailableError,
)
from shared.kv.handoff import HandoffReceiver, KvLayout, PrefillOutcome
from shared.wire import frame_from_wire, layout_from_wire, layout_to_wire, outcome_from_wire

log = logging.getLogger(__name__)

REPLICA_OPTIONS = (
    *CHANNEL_OPTIONS,
    # A replica that comes back is found soon; gRPC's own pause grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A proxy set in the environment is for the world outside, not for the other stage.
    ("grpc.enable_http_proxy", 0),
)

ROUNDS = 3
"""How often every replica is tried before a request fails."""
FIRST_PAUSE_S = 0.1
"""Pause before the second round; doubled before each further one."""
SET_ASIDE_S = 2.0
"""How long a replica that failed is asked last."""

_ERRORS: dict[grpc.StatusCode, type[HeadraceError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.FAILED_PRECONDITION: ModelMismatchError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: CapacityError,
    grpc.StatusCode.DATA_LOSS: DataLossError,
}
"""What a status of prefill means here; every other status makes the replica unavailable."""


@dataclass(eq=False)
class _Replica:
    address: str
    channel: grpc.aio.Channel
    calls: int = 0
    failed_s: float = -SET_ASIDE_S

    @property
    def load(self) -> tuple[bool, int]:
        return time.monotonic() - self.failed_s < SET_ASIDE_S, self.calls


class PrefillClient:
    """Computes prompts on whichever prefill replica answers."""

    def __init__(self, addresses: list[str], *, model_digest: str, layout: KvLayout, hidden_size: int) -> None:
        """Opens a channel to each address; replicas need not be up yet."""
        self._model_digest = model_digest
        self._layout = layout
        self._hidden_size = hidden_size
        self._replicas = [
            _Replica(address, grpc.aio.insecure_channel(address, options=REPLICA_OPTIONS)) for address in addresses
        ]

    async def close(self) -> None:
        """Closes all channels."""
        await asyncio.gather(*(replica.channel.close(None) for replica in self._replicas))

    async def prefill(
        self,
        request_id: str,
        token_ids: list[int],
        store: Callable[[int, int, bytes, bytes], None],
        timeout_s: float | None,
        *,
        priority: int = 0,
        held_tokens: int = 0,
        cache_salt: str = "",
    ) -> PrefillOutcome:
        """Computes a prompt and stores its keys and values as they arrive.

        When a replica fails the prompt is computed again on another, from the beginning; nothing is stored any more
        once this has returned or raised.

        Args:
            store: called as store(layer, first_token, keys, values).
            timeout_s: what is left of the client's deadline.
            priority: -100 to 100; prompts of a higher one are computed first.
            held_tokens: leading tokens whose keys and values are here already; only what follows them is stored.
            cache_salt: replicas reuse keys and values only between prompts of the same salt.

        Raises:
            InvalidRequestError, ModelMismatchError, CapacityError, DataLossError: as prefill says.
            UnavailableError: no replica could compute it.
        """
        request = prefill_pb2.PrefillRequest(
            token_ids=token_ids,
            model_digest=self._model_digest,
            kv_layout=layout_to_wire(self._layout),
            request_id=request_id,
            priority=priority,
            held_tokens=held_tokens,
            cache_salt=cache_salt,
        )
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        failure: HeadraceError = UnavailableError("no prefill replica is configured")
        for attempt in range(ROUNDS * len(self._replicas)):
            if attempt and attempt % len(self._replicas) == 0:
                await asyncio.sleep(FIRST_PAUSE_S * 2 ** (attempt // len(self._replicas) - 1))
            replica = min(self._replicas, key=lambda replica: replica.load)
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            try:
                return await self._prefill_on(replica, request, store, left_s)
            except (InvalidRequestError, CapacityError):
                raise
            except HeadraceError as error:
                failure = error
                replica.failed_s = time.monotonic()
                log.warning("prefill on %s failed for request %s: %s", replica.address, request_id, error)
        raise failure

    async def _prefill_on(
        self,
        replica: _Replica,
        request: prefill_pb2.PrefillRequest,
        store: Callable[[int, int, bytes, bytes], None],
        timeout_s: float | None,
    ) -> PrefillOutcome:
        receiver = HandoffReceiver(self._layout, len(request.token_ids), store, request.held_tokens)
        call = prefill_pb2_grpc.PrefillServiceStub(replica.channel).Prefill(request, timeout=timeout_s)
        replica.calls += 1
        try:
            async for response in call:
                match response.WhichOneof("event"):
                    case "header":
                        self._check_header(request, response.header)
                    case "frame":
                        receiver.accept(frame_from_wire(response.frame))
                    case "result":
                        outcome = outcome_from_wire(response.result)
                        receiver.finish(outcome, self._hidden_size)
                        return outcome
            raise DataLossError("the prefill stream ended without a result")
        except grpc.aio.AioRpcError as error:
            raise _ERRORS.get(error.code(), UnavailableError)(
                f"prefill replica {replica.address}: {error.details() or error.code().name}"
            ) from None
        finally:
            replica.calls -= 1
            call.cancel()

    def _check_header(self, request: prefill_pb2.PrefillRequest, header: prefill_pb2.PrefillHeader) -> None:
        """Confirms, before anything is stored, that this is the answer to our question."""
        if header.model_digest != self._model_digest:
            raise ModelMismatchError(f"prefill answers with model {header.model_digest[:12]}…")
        self._layout.require(layout_from_wire(header.kv_layout), "prefill")
        if (header.request_id, header.prompt_tokens) != (request.request_id, len(request.token_ids)):
            raise DataLossError("prefill answers another request")
