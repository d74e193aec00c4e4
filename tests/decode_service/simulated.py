"""Readers and an engine without a model: what sequences, schedulers and block tables see of both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from decode_service.sampling import SamplingParams
from decode_service.sequence import Sequence
from decode_service.text.output import Emission
from shared.blocks import BlockPool
from shared.outlet import Outlet

Content = tuple[str, tuple[int, ...]]
"""What keys and values of a place depend on: the salt, and all tokens up to that place."""


class Reader:
    """The RPC's end of one sequence, on a loop of its own: it reads when it is told to."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self.outlet: Outlet[Emission] = self._loop.run_until_complete(self._open())
        self._reading: asyncio.Task[None] | None = None

    def catch_up(self) -> None:
        """Reads everything that waits."""
        self._reading = self._reading or self._loop.create_task(self._read())
        while self.outlet.pending:
            self._loop.run_until_complete(asyncio.sleep(0))

    def close(self) -> None:
        if self._reading:
            self._reading.cancel()
            self._loop.run_until_complete(asyncio.gather(self._reading, return_exceptions=True))
        self._loop.close()

    @staticmethod
    async def _open() -> Outlet[Emission]:
        return Outlet()

    async def _read(self) -> None:
        async for _ in self.outlet:
            pass


def sequence_of(
    prompt: list[int], max_tokens: int, outlet: Outlet[Emission], on_admitted: Callable[[], None], **fields: Any
) -> Sequence:
    """A sequence without text."""
    return Sequence(
        request_id="",
        tokens=list(prompt),
        prompt_tokens=len(prompt),
        max_tokens=max_tokens,
        sampling=SamplingParams(),
        output=None,  # type: ignore[arg-type]  # text is the engine's business
        outlet=outlet,
        on_admitted=on_admitted,
        **fields,
    )


class Memory:
    """What a pool of keys and values holds, place by place; reads and writes go through block tables."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._places: dict[tuple[int, int], Content] = {}

    def write(self, sequence: Sequence, first: int, tokens: list[int], *, alone: bool = True) -> None:
        """Adds keys and values of tokens at `first` onwards.

        Args:
            alone: the blocks must not be shared.
        """
        whole = sequence.tokens[:first] + tokens
        for place in range(first, first + len(tokens)):
            block = sequence.blocks[place // self._pool.block_tokens]
            assert not alone or self._pool.reference_count(block) == 1, "a shared block was written"
            self._places[block, place % self._pool.block_tokens] = (sequence.cache_salt, tuple(whole[: place + 1]))

    def check(self, sequence: Sequence, count: int) -> None:
        """The first `count` tokens' keys and values are those of this sequence."""
        for place in range(count):
            block = sequence.blocks[place // self._pool.block_tokens]
            found = self._places[block, place % self._pool.block_tokens]
            assert found == (sequence.cache_salt, tuple(sequence.tokens[: place + 1])), "wrong keys and values"


class SimulatedEngine:
    """Passes that move sequences on as `DecodeEngine` does: chunks of prompts, drafts, acceptance, handed-off tokens.

    The target's memory and that of a draft model with its own are checked before every read.
    """

    def __init__(self, pool: BlockPool, choose: Callable[[int], int]) -> None:
        """Starts with empty memories.

        Args:
            choose: a number from 0 to the one given, for everything that an engine would compute or measure.
        """
        self.target, self.draft = Memory(pool), Memory(pool)
        self._block_tokens = pool.block_tokens
        self._choose = choose

    def hand_off(self, sequence: Sequence) -> None:
        """A handoff writes everything that is not held."""
        self.target.write(sequence, sequence.kv_length, sequence.tokens[sequence.kv_length :])

    def run(self, batch: list[Sequence], draft_limit: int, chunk_limit: int) -> None:
        """One pass; sequences that have all their tokens end."""
        for sequence in batch:
            if sequence.ended:
                continue
            if sequence.last_hidden is not None:
                sequence.last_hidden = None
                self._emit(sequence, [self._choose(1)])
            if not sequence.ended:
                self._turn(sequence, draft_limit, chunk_limit)

    def _turn(self, sequence: Sequence, draft_limit: int, chunk_limit: int) -> None:
        known, end = sequence.kv_length, len(sequence.tokens)
        self.target.check(sequence, known)
        missing = sequence.tokens[known:]
        chunk = missing if len(missing) == 1 else missing[: 1 + self._choose(chunk_limit - 1)]
        proposal: list[int] = []
        if len(missing) == 1:
            room = len(sequence.blocks) * self._block_tokens - end
            assert room >= 0, "a sequence takes part without blocks for its last token"
            count = self._choose(min(draft_limit, sequence.remaining_tokens - 1, room))
            proposal = [self._choose(1) for _ in range(count)]
            if proposal:
                self._draft(sequence, proposal)
        self.target.write(sequence, known, chunk + proposal)
        if len(chunk) < len(missing):
            sequence.kv_length += len(chunk)
            return
        accepted = self._choose(len(proposal))
        sequence.kv_length += len(chunk) + accepted
        self._emit(sequence, [*proposal[:accepted], self._choose(1)])

    def _draft(self, sequence: Sequence, proposal: list[int]) -> None:
        known = min(sequence.draft_kv_length, sequence.kv_length)
        self.draft.check(sequence, known)
        inputs = sequence.tokens[known:] + proposal[:-1]
        # A shared block that a draft has not seen yet is filled with what anybody would fill it with.
        self.draft.write(sequence, known, inputs, alone=False)
        sequence.draft_kv_length = known + len(inputs)

    def _emit(self, sequence: Sequence, tokens: list[int]) -> None:
        sequence.tokens.extend(tokens)
        sequence.outlet.put(Emission("", tokens, None), len(tokens))
        sequence.ended = sequence.remaining_tokens == 0
