"""The bridge from an engine's thread to one RPC on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")


class Outlet(Generic[Item]):
    """A queue that the engine's thread fills and one coroutine empties.

    It never blocks the engine. Whoever fills it looks at `pending` and decides what a slow reader means.
    """

    def __init__(self) -> None:
        """Must be made on the event loop that reads it."""
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._items: deque[tuple[Any, int]] = deque()
        self._end: Exception | None = None
        self._ended = False
        self._dropped = False
        self._put = self._taken = 0

    @property
    def pending(self) -> int:
        """Total size of the items that were put and not yet taken."""
        return 0 if self._dropped else self._put - self._taken

    @property
    def ended(self) -> bool:
        """No more items will come: the stream is complete, or has failed."""
        return self._ended

    def put(self, item: Item, size: int = 1) -> None:
        """Adds an item of some size. Any thread, but one at a time."""
        self._push(item, size)

    def close(self, error: Exception | None = None) -> None:
        """Ends the stream, after the items put so far; with an error, the reader raises it then.

        Only the first call counts: a stream that failed cannot end well later.
        """
        if not self._ended:
            self._end, self._ended = error, True
            self._wake()

    def drop(self, error: Exception) -> None:
        """Ends the stream with an error, and forgets the items that wait: their memory is free at once."""
        self._dropped = True
        self._items.clear()
        self.close(error)

    async def __aiter__(self) -> AsyncIterator[Item]:
        while True:
            self._arrived.clear()
            ended = self._ended
            while (entry := await self._next()) is not None:
                item, size = entry
                yield item
                self._finished(size)
            if ended:
                break
            await self._arrived.wait()
        if self._end is not None:
            raise self._end

    async def _next(self) -> tuple[Item, int] | None:
        """The next item and its size, if there is one."""
        return self._pop()

    def _finished(self, size: int) -> None:
        """The reader is done with an item."""
        self._taken += size

    def _push(self, entry: Any, size: int) -> None:
        self._put += size
        self._items.append((entry, size))
        self._wake()

    def _pop(self) -> tuple[Any, int] | None:
        try:
            return self._items.popleft()
        except IndexError:  # asked for first, an item may be dropped in between
            return None

    def _wake(self) -> None:
        # The loop is gone only when the process is on its way out; then nobody reads.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._arrived.set)
