"""Prefill replicas: which there are, which is the least busy, and which are set aside for now."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from decode_service.prefill_client_channel import OpenChannel, open_plain
from decode_service.resolver import Target, resolve
from headrace.v1 import status_pb2, status_pb2_grpc
from shared.errors import UnavailableError

log = logging.getLogger(__name__)

FAILED_ASIDE_S = 2.0
"""How long a replica that failed is asked last."""
MISMATCHED_ASIDE_S = 30.0
"""How long a replica with another model is asked last: until then it may have been deployed anew."""
STATUS_S = 0.25
"""How long what a replica says of its queue is believed."""
STATUS_TIMEOUT_S = 0.5
SILENT_S = 5.0
"""A call that brings nothing for so long makes us ask whether its replica is alive; and so long it has to answer."""
RESOLVE_S = 10.0
"""How often names are resolved while all is well, so that new replicas are found."""
RESOLVE_AFTER_FAILURE_S = 1.0


class Replica:
    """One address, what is known of its load, and how long it is set aside."""

    def __init__(self, address: str, clock: Callable[[], float], channel: Any) -> None:
        self.address = address
        self.channel = channel
        self._clock = clock
        self._aside_until_s = float("-inf")
        self._mismatch_reported = False
        self._asked_s = float("-inf")
        self._queued_tokens = 0
        self._in_flight: dict[object, tuple[float, int]] = {}
        """Our calls: when each began, and its tokens."""

    @property
    def calls(self) -> int:
        """Our calls in flight."""
        return len(self._in_flight)

    @property
    def is_aside(self) -> bool:
        """It failed a moment ago, or serves another model."""
        return self._clock() < self._aside_until_s

    @property
    def load_tokens(self) -> int:
        """Prompt tokens before a new one: what it said it had, and what we have sent it since."""
        return self._queued_tokens + sum(
            tokens for began_s, tokens in self._in_flight.values() if began_s > self._asked_s
        )

    async def ask_load(self) -> None:
        """Learns its queue, unless that is known; one that does not tell counts as idle but for our own calls."""
        if self._clock() - self._asked_s < STATUS_S:
            return
        asked_s = self._clock()
        stub = status_pb2_grpc.StatusServiceStub(self.channel)
        try:
            status = await stub.GetStatus(status_pb2.GetStatusRequest(), timeout=STATUS_TIMEOUT_S)
            self._asked_s, self._queued_tokens = asked_s, status.queued_tokens
        except grpc.aio.AioRpcError as error:
            self._asked_s, self._queued_tokens = float("-inf"), 0
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                self.failed(f"no status: {error.details() or error.code().name}")

    async def is_alive(self, within_s: float) -> bool:
        """Whether it answers anything at all: a process that hangs, or a host that is gone, does not.

        A pass may take longer than any silence; the status is answered beside it.
        """
        stub = status_pb2_grpc.StatusServiceStub(self.channel)
        try:
            await stub.GetStatus(status_pb2.GetStatusRequest(), timeout=within_s)
        except grpc.aio.AioRpcError as error:
            return error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        return True

    @contextmanager
    def calling(self, tokens: int) -> Iterator[None]:
        """Around a call of ours with so many tokens."""
        call = object()
        self._in_flight[call] = (self._clock(), tokens)
        try:
            yield
        finally:
            del self._in_flight[call]

    def succeeded(self) -> None:
        """A call went well."""
        self._aside_until_s = float("-inf")
        self._mismatch_reported = False

    def failed(self, reason: object) -> None:
        """A call failed in a way that another replica may not."""
        if not self.is_aside:
            log.warning("prefill replica %s is asked last for %g s: %s", self.address, FAILED_ASIDE_S, reason)
        self._aside_until_s = max(self._aside_until_s, self._clock() + FAILED_ASIDE_S)

    def mismatched(self, reason: object) -> None:
        """It serves another model, or another form of KV. Reported once, until it serves ours."""
        if not self._mismatch_reported:
            log.error(
                "prefill replica %s does not fit, and is only asked when no other is left: %s", self.address, reason
            )
        self._mismatch_reported = True
        self._aside_until_s = self._clock() + MISMATCHED_ASIDE_S


Sample = Callable[[Sequence[Replica], int], list[Replica]]
LookUp = Callable[[Sequence[Target]], Awaitable[tuple[dict[str, str], list[str]]]]
"""As `decode_service.resolver.resolve`."""


class Replicas:
    """All replicas that the targets stand for, now and later. Used on one event loop."""

    def __init__(
        self,
        targets: Sequence[str],
        *,
        sample: Sample = random.sample,
        open_channel: OpenChannel = open_plain,
        look_up: LookUp = resolve,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is resolved or opened yet.

        Args:
            sample: draws so many of some replicas.
            open_channel: opens the channel to a replica.
            look_up: finds the addresses of targets.
            clock: the time in seconds.

        Raises:
            ConfigurationError: one of the texts is no target.
        """
        self._targets = [Target.parse(text) for text in targets]
        self._sample = sample
        self._open_channel = open_channel
        self._look_up = look_up
        self._clock = clock
        self._replicas: dict[str, Replica] = {}
        self._retired: list[Replica] = []
        self._problems: list[str] = []
        self._resolved_s = float("-inf")
        self._resolving: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Closes all channels."""
        if self._resolving:
            self._resolving.cancel()
        everyone = [*self._replicas.values(), *self._retired]
        await asyncio.gather(*(replica.channel.close(None) for replica in everyone))

    async def known(self) -> list[Replica]:
        """The replicas there are. Names are resolved again beside the calls; only the first call waits for that.

        Raises:
            UnavailableError: there are none.
        """
        if not self._replicas:
            await self._resolve()
        elif self._clock() - self._resolved_s >= RESOLVE_S:
            self._resolve_soon()
        if not self._replicas:
            raise UnavailableError("; ".join(self._problems) or "no prefill replica is configured")
        return list(self._replicas.values())

    def look_again(self) -> None:
        """A replica failed: perhaps it is gone, and another one came."""
        if self._clock() - self._resolved_s >= RESOLVE_AFTER_FAILURE_S:
            self._resolve_soon()

    async def least_busy(self, untried: Sequence[Replica]) -> Replica:
        """The better of two random choices; those set aside only where there is no other."""
        candidates = [replica for replica in untried if not replica.is_aside] or list(untried)
        pair = self._sample(candidates, min(2, len(candidates)))
        if len(pair) == 2:
            await asyncio.gather(*(replica.ask_load() for replica in pair))
        return min(pair, key=lambda replica: (replica.is_aside, replica.load_tokens, replica.calls))

    def _resolve_soon(self) -> None:
        if self._resolving is None or self._resolving.done():
            self._resolving = asyncio.create_task(self._resolve())

    async def _resolve(self) -> None:
        """Adds new addresses and retires old ones; where a name has no answer now, those of before stay."""
        self._resolved_s = self._clock()
        addresses, problems = await self._look_up(self._targets)
        if problems and problems != self._problems:
            log.warning("prefill replicas: %s", "; ".join(problems))
        self._problems = problems
        for address, name in addresses.items():
            if address not in self._replicas:
                self._replicas[address] = Replica(address, self._clock, self._open_channel(address, name))
        if not problems:
            for address in self._replicas.keys() - addresses.keys():
                self._retired.append(self._replicas.pop(address))
        finished = [replica for replica in self._retired if not replica.calls]
        self._retired = [replica for replica in self._retired if replica.calls]
        for replica in finished:
            await replica.channel.close(None)
