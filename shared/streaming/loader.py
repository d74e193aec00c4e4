"""Bringing a range of a file into a buffer on other threads, and making sure of what it brought."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shared.pack.format import PAGE
from shared.streaming.files import Stamp
from shared.tensors import byte_view

READ_BYTES = 8 << 20
"""Largest read request. Small ones cost processor time, which the arithmetic needs."""
READERS = 2
"""Reading threads: while one hands over what it has read, the other keeps the disk busy."""

Part = tuple[memoryview, int]
"""A piece of a buffer, and where its bytes lie in what is read."""


class Readable(Protocol):
    """What can be loaded: a layer's file, or an expert's range of one. Two are the same where they are one object."""

    def read(self, into: memoryview, offset: int) -> int:
        """Fills `into` from `offset` on; returns the bytes read."""
        ...

    def stamp(self) -> Stamp:
        """Changes whenever the content may have changed."""
        ...

    def verify(self, data: memoryview) -> None:
        """Compares everything, as it was read, with its digest."""
        ...


@dataclass(frozen=True, eq=False)
class Load:
    """Something on its way into a buffer, or there."""

    reads: Sequence[Future[int]]
    ready: Future[int]
    """Done when every read has ended and the digest holds; from then on nothing writes into the buffer."""

    @property
    def failed(self) -> bool:
        return self.ready.done() and self.ready.exception() is not None

    def abandon(self) -> None:
        """Stops reading, and returns when nothing writes into the buffer any more."""
        for read in self.reads:
            read.cancel()
        wait([self.ready])


class Loader:
    """Loads what one thread asks for, in that order, on threads of its own."""

    def __init__(self, readers: int, name: str, *, verify_always: bool) -> None:
        """Starts no thread before there is something to load.

        Args:
            name: begins the threads' names.
            verify_always: compare digests whenever something is read, not only when it is new or has changed.
        """
        self._verify_always = verify_always
        self._verified: dict[Readable, Stamp] = {}
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix=f"{name}-reader")
        self._verifier = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-verifier")

    def load(self, source: Readable, parts: Sequence[Part], whole: Tensor) -> Load:
        """Begins to read.

        Args:
            parts: pieces of the buffer `whole`, uint8, that are read one by one.
        """
        stamp = source.stamp()
        reads = [self._readers.submit(source.read, part, start) for part, start in parts]
        return Load(reads, self._verifier.submit(self._finish, source, whole, stamp, reads))

    def close(self) -> None:
        """Stops the threads; what is being loaded is to be abandoned before."""
        self._readers.shutdown()
        self._verifier.shutdown()

    def _finish(self, source: Readable, whole: Tensor, stamp: Stamp, reads: Sequence[Future[int]]) -> int:
        """Waits for the reads and makes sure of what they brought; returns the bytes read."""
        wait(reads)
        size_bytes = sum(read.result() for read in reads)
        # Asked after reading: a file that is as it was when its digest held has brought the same bytes again.
        if self._verify_always or self._verified.get(source) != source.stamp():
            source.verify(byte_view(whole))
            self._verified[source] = stamp
        return size_bytes


def split(buffer: Tensor, readers: int) -> list[Part]:
    """How a buffer is filled: in equal pieces of whole pages, one for each reader or more, none above `READ_BYTES`."""
    size_bytes = buffer.numel()
    count = max(readers, -(-size_bytes // READ_BYTES))
    step = -(-size_bytes // (count * PAGE)) * PAGE
    view = byte_view(buffer)
    return [(view[start : start + step], start) for start in range(0, size_bytes, step)]
