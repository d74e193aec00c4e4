"""A ring of slots: layers are read in a fixed cyclic order, ahead of use, and the end wraps round to the beginning.

The order of use is known for ever (0, 1, …, last, 0, 1, …), so there is no policy here: a slot that is given back
starts at once to receive the next layer that has none. Near the end of a pass that is the beginning of the next one.
`docs/streaming.md` draws it, and has the measurements behind the constants.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from torch import Tensor

from shared.model.layers import LayerWeights
from shared.pack.format import PAGE
from shared.streaming.files import DataFile, Stamp
from shared.tensors import byte_view

READ_BYTES = 8 << 20
"""Largest read request. Small ones cost processor time, which the arithmetic needs."""
READERS = 2
"""Reading threads: while one hands over what it has read, the other keeps the disk busy."""

Part = tuple[memoryview, int]
"""A piece of a slot, and where its bytes lie in a file's data section."""


@dataclass(frozen=True, eq=False)
class Slot:
    """A buffer that holds one streamed layer, and the views of its tensors."""

    buffer: Tensor
    """uint8 [data_bytes], page-aligned; what the readers fill."""
    weights: LayerWeights
    """What a pass computes with."""


@dataclass(frozen=True, eq=False)
class _Load:
    """A layer on its way into a slot, or there."""

    index: int
    slot: Slot
    reads: Sequence[Future[int]]
    ready: Future[int]
    """Done when every read has ended and the digest holds; from then on nothing writes into the slot."""

    @property
    def failed(self) -> bool:
        return self.ready.done() and self.ready.exception() is not None

    def abandon(self) -> Slot:
        """Stops reading, and returns the slot when nothing writes into it any more."""
        for read in self.reads:
            read.cancel()
        wait([self.ready])
        return self.slot


class Ring:
    """Streams files through slots. Used by one thread; reading and verifying happen on its own threads."""

    def __init__(
        self, files: Sequence[DataFile], slots: Sequence[Slot], readers: int = READERS, verify_always: bool = False
    ) -> None:
        """Starts reading the first files at once. The files are the ring's from now on.

        Args:
            files: in order of use; at least as many as slots.
            verify_always: compare digests whenever a file is read, not only when it is new or has changed.
        """
        self._files = files
        self._parts = {slot: split(slot.buffer, readers) for slot in slots}
        self._verify_always = verify_always
        self._verified: dict[DataFile, Stamp] = {}
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="layer-reader")
        self._verifier = ThreadPoolExecutor(1, thread_name_prefix="layer-verifier")
        self._taken: list[_Load] = []
        self._ahead = deque(self._load(index, slot) for index, slot in enumerate(slots))
        self._next = len(slots) % len(files)
        """The file that the next free slot is for."""
        self.bytes_read = 0

    def take(self) -> Slot:
        """Waits for the next layer in the order and returns its slot, to be given back after use.

        A layer that could not be read ahead is read once more, from whatever lies at its path by now: the fault may be
        long gone.

        Raises:
            DataLossError, UnavailableError: the layer cannot be read as it was packed. To go on, rewind.
        """
        load = self._ahead.popleft()
        self._taken.append(load)
        if load.ready.exception() is not None:
            self._files[load.index].reopen()
            load = self._taken[-1] = self._load(load.index, load.slot)
        self.bytes_read += load.ready.result()
        return load.slot

    def give_back(self, slot: Slot) -> None:
        """Declares a taken slot free; reading into it starts at once."""
        self._taken = [load for load in self._taken if load.slot is not slot]
        self._ahead.append(self._load(self._next, slot))
        self._next = (self._next + 1) % len(self._files)

    def rewind(self) -> None:
        """Makes the first file the next one, wherever the ring is; what is taken counts as given back.

        What is in the slots already, or on its way, and is needed first is kept.
        """
        if not self._taken and self._ahead[0].index == 0:
            return
        loads = [*self._taken, *self._ahead]
        kept = {load.index: load for load in loads if load.index < len(loads) and not load.failed}
        free = [load.abandon() for load in loads if kept.get(load.index) is not load]
        self._taken = []
        self._ahead = deque(kept.get(index) or self._load(index, free.pop()) for index in range(len(loads)))
        self._next = len(loads) % len(self._files)

    def close(self) -> None:
        """Stops the threads and closes the files."""
        for load in (*self._taken, *self._ahead):
            load.abandon()
        self._readers.shutdown()
        self._verifier.shutdown()
        for file in self._files:
            file.close()

    def _load(self, index: int, slot: Slot) -> _Load:
        file = self._files[index]
        stamp = file.stamp()
        reads = [self._readers.submit(file.read, part, start) for part, start in self._parts[slot]]
        return _Load(index, slot, reads, self._verifier.submit(self._finish, file, slot, stamp, reads))

    def _finish(self, file: DataFile, slot: Slot, stamp: Stamp, reads: Sequence[Future[int]]) -> int:
        """Waits for a layer's reads and makes sure of what they brought; returns the bytes read."""
        wait(reads)
        size_bytes = sum(read.result() for read in reads)
        # Asked after reading: a file that is as it was when its digest held has brought the same bytes again.
        if self._verify_always or self._verified.get(file) != file.stamp():
            file.verify(byte_view(slot.buffer))
            self._verified[file] = stamp
        return size_bytes


def split(buffer: Tensor, readers: int) -> list[Part]:
    """How a layer is read: in equal pieces of whole pages, one for each reader or more, none above `READ_BYTES`."""
    size_bytes = buffer.numel()
    count = max(readers, -(-size_bytes // READ_BYTES))
    step = -(-size_bytes // (count * PAGE)) * PAGE
    view = byte_view(buffer)
    return [(view[start : start + step], start) for start in range(0, size_bytes, step)]
