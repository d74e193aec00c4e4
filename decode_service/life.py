"""What one sequence needs the event loop for: to have its keys and values computed whenever it is given blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from decode_service.prompts import Prompts
from decode_service.scheduler import DecodeScheduler
from decode_service.sequence import Sequence
from shared.kv.handoff import PrefillOutcome


class Life:
    """Takes a submitted sequence from blocks to passes: at first, and again each time after it was preempted."""

    def __init__(
        self, scheduler: DecodeScheduler, prompts: Prompts, time_remaining: Callable[[], float | None]
    ) -> None:
        """Must be made on the event loop.

        Args:
            time_remaining: what is left of the client's deadline, in seconds.
        """
        self._scheduler = scheduler
        self._prompts = prompts
        self._time_remaining = time_remaining
        self._loop = asyncio.get_running_loop()
        self._admitted = asyncio.Event()
        self._comebacks: asyncio.Task[None] | None = None

    def on_admitted(self) -> None:
        """The sequence has blocks. Any thread."""
        self._loop.call_soon_threadsafe(self._admitted.set)

    async def begin(self, sequence: Sequence) -> PrefillOutcome | None:
        """Waits for blocks, has the prompt computed, and starts the sequence; from then on it is looked after.

        Returns:
            What a handoff ended with; None when decode's own passes compute the prompt.

        Raises:
            HeadraceError: the prompt could not be computed.
        """
        outcome = await self._fill(sequence)
        self._comebacks = asyncio.create_task(self._come_back(sequence))
        return outcome

    def end(self) -> None:
        """From now on no handoff writes to the sequence's blocks: it would on this loop, and finds itself cancelled.

        Waits for nothing, so that an RPC that is cut off on the way out of the process still gives its blocks back.
        """
        if self._comebacks:
            self._comebacks.cancel()

    async def _come_back(self, sequence: Sequence) -> None:
        while not sequence.ended:
            try:
                await self._fill(sequence)
            except Exception as error:
                sequence.fail(error)

    async def _fill(self, sequence: Sequence) -> PrefillOutcome | None:
        await self._admitted.wait()
        self._admitted.clear()
        outcome = await self._prompts.compute(sequence, self._time_remaining())
        self._scheduler.start(sequence, outcome.last_hidden if outcome else None)
        return outcome
