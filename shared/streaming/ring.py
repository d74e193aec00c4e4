"""A ring of slots: layers are read in a fixed cyclic order, ahead of use, and the end wraps round to the beginning.

The order of use is known for ever (0, 1, …, last, 0, 1, …), so there is no policy here: a slot that is given back
starts at once to receive the next layer that has none. Near the end of a pass that is the beginning of the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from torch import Tensor

from shared.model.layers import LayerWeights
from shared.streaming.files import DataFile

READ_BYTES = 2 << 20
"""Size of one read request; a layer is split among the readers."""


@dataclass(frozen=True)
class Slot:
    """A buffer that holds one streamed layer, and the views of its tensors."""

    buffer: Tensor
    """uint8 [data_bytes], page-aligned."""
    weights: LayerWeights


@dataclass(frozen=True)
class _Ticket:
    """A layer on its way into a slot."""

    file: DataFile
    slot: Slot
    reads: list[Future[int]] = field(default_factory=list)


class Ring:
    """Streams files through slots. Used by one thread; reading happens on its own threads."""

    def __init__(self, files: Sequence[DataFile], slots: Sequence[Slot], readers: int) -> None:
        """Starts reading the first files at once.

        Args:
            files: in order of use; at least as many as slots.
            readers: reading threads.
        """
        self._files = files
        self._slots = slots
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="layer-reader")
        self._verified: set[DataFile] = set()
        self._in_flight: deque[_Ticket] = deque()
        self._next = 0
        self.bytes_read = 0
        self._fill()

    def take(self) -> Slot:
        """Waits for the next layer in the order and returns its slot, to be given back after use.

        Each file's digest is verified when it is first read.

        Raises:
            DataLossError, UnavailableError: the layer cannot be read as it was packed. The next call starts again from
                the first file, and reads it then: by that time the fault may be gone.
        """
        if not self._in_flight:
            self._fill()
        ticket = self._in_flight[0]
        try:
            self.bytes_read += sum(read.result() for read in ticket.reads)
            self._verify(ticket)
        except Exception:
            self._abandon()
            raise
        self._in_flight.popleft()
        return ticket.slot

    def give_back(self, slot: Slot) -> None:
        """Declares a taken slot free; reading into it starts at once."""
        self._read_next_into(slot)

    def rewind(self) -> None:
        """Abandons what is on its way, and what is taken, and starts again from the first file."""
        self._abandon()
        self._fill()

    def close(self) -> None:
        """Stops the readers and closes the files."""
        self._readers.shutdown(wait=True, cancel_futures=True)
        for file in self._files:
            file.close()

    def _verify(self, ticket: _Ticket) -> None:
        if ticket.file not in self._verified:
            ticket.file.verify(ticket.slot.buffer)
            self._verified.add(ticket.file)

    def _abandon(self) -> None:
        for ticket in self._in_flight:
            for read in ticket.reads:
                read.cancel()
            wait(ticket.reads)
        self._in_flight.clear()
        self._next = 0

    def _fill(self) -> None:
        for slot in self._slots:
            self._read_next_into(slot)

    def _read_next_into(self, slot: Slot) -> None:
        ticket = _Ticket(self._files[self._next], slot)
        self._next = (self._next + 1) % len(self._files)
        size = slot.buffer.numel()
        for start in range(0, size, READ_BYTES):
            part = slot.buffer[start : min(start + READ_BYTES, size)]
            ticket.reads.append(self._readers.submit(ticket.file.read, part, start))
        self._in_flight.append(ticket)
