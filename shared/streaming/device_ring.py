"""A second ring, of device memory: layers go from host memory into its slots ahead of use.

```
   disk ─▶ slots in host memory ─┐                                  computed with, in order
                                 ├─ copies, one after another ─▶ slots on the device ─▶ take()
   layers kept in host memory ───┘                                  ▲
                                                 give_back(): free when what was asked for is computed
```

A thread of its own hands layers on, so that neither reading nor copying waits for the engine. It is the only one that
uses the host's ring while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

from torch import Tensor

from shared.streaming.copies import Copies, Event
from shared.streaming.ring import Ring, Slot

Arrange = Callable[[], None]
"""What is done with a slot's bytes on the device after they were copied."""


@dataclass(frozen=True)
class _Free:
    """A slot that nothing is computed with after `used`."""

    slot: Slot
    used: Event


@dataclass(frozen=True)
class _Coming:
    """A layer on its way into a slot, or there."""

    slot: Slot
    arrived: Event


@dataclass(frozen=True)
class _Unread:
    """A layer that could not be read ahead of its turn, and the slot that it is to come into."""

    free: _Free


class DeviceRing:
    """Streams layers into device memory in a fixed cyclic order. Used by one thread."""

    def __init__(
        self, host: Ring | None, kept: Mapping[int, Tensor], count: int, slots: Mapping[Slot, Arrange], copies: Copies
    ) -> None:
        """Starts copying the first layers at once. The host's ring is this ring's from now on.

        Args:
            host: brings those layers that are not kept, in their order.
            kept: place in the cycle -> a layer's bytes, of `Copies.host_buffer`.
            count: layers in the cycle.
            slots: on the device.
        """
        self._host = host
        self._kept = kept
        self._count = count
        self._slots = slots
        self._copies = copies
        self._taken: list[Slot] = []
        self._next = 0
        """The place in the cycle that is taken next."""
        self._failed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="device-copier")
        self.bytes_read = 0
        """Of layers that passes have used and that were read for it."""
        self._start()

    def take(self) -> Slot:
        """Returns the slot of the next layer in the order, to be given back after use.

        What is computed from now on comes after the layer has arrived; it need not have. What could not be read ahead
        of its turn is read once more.

        Raises:
            DataLossError, UnavailableError: the layer cannot be read as it was packed. To go on, rewind.
        """
        found = self._coming.get()
        self._failed = True  # unless it goes well
        if isinstance(found, _Unread):
            coming = self._bring(self._next, found.free)
            self._run_from((self._next + 1) % self._count)
        elif isinstance(found, _Coming):
            coming = found
        else:
            raise found
        self._copies.order_after(coming.arrived)
        self._failed = False
        self._taken.append(coming.slot)
        if self._next not in self._kept:
            self.bytes_read += coming.slot.buffer.numel()
        self._next = (self._next + 1) % self._count
        return coming.slot

    def give_back(self, slot: Slot) -> None:
        """Declares a taken slot free, as soon as everything that was asked for is computed."""
        self._taken.remove(slot)
        self._free.put(_Free(slot, self._copies.record()))

    def rewind(self) -> None:
        """Makes the first layer the next one, wherever the ring is; what is taken counts as given back."""
        if self._taken or self._next or self._failed:
            self._stop()
            if self._host:
                self._host.rewind()
            self._start()

    def close(self) -> None:
        """Stops the threads and closes the files."""
        self._stop()
        self._thread.shutdown()
        self._copies.record().wait()
        if self._host:
            self._host.close()

    def _start(self) -> None:
        """Begins at the first layer, with all slots free."""
        self._free: SimpleQueue[_Free | None] = SimpleQueue()
        self._coming: SimpleQueue[_Coming | _Unread | BaseException] = SimpleQueue()
        self._taken, self._next, self._failed = [], 0, False
        used = self._copies.record()
        for slot in self._slots:
            self._free.put(_Free(slot, used))
        self._run_from(0)

    def _run_from(self, first: int) -> None:
        self._stopping = False
        self._running: Future[None] = self._thread.submit(self._run, first)

    def _stop(self) -> None:
        """Returns when nothing is copied any more, and nobody uses the host's ring."""
        self._stopping = True
        self._free.put(None)
        self._running.result()

    def _run(self, index: int) -> None:
        """Brings layer after layer, as slots become free, until it is stopped or one cannot be brought."""
        while (free := self._free.get()) is not None and not self._stopping:
            if self._host and index not in self._kept and not self._host.arrives():
                self._coming.put(_Unread(free))
                return
            try:
                self._coming.put(self._bring(index, free))
            except BaseException as error:
                self._coming.put(error)  # raised where the layer is taken
                return
            index = (index + 1) % self._count

    def _bring(self, index: int, free: _Free) -> _Coming:
        """Asks for a layer's copy.

        Raises:
            DataLossError, UnavailableError: as `Ring.take`.
        """
        kept = self._kept.get(index)
        if kept is not None:
            return self._copy(kept, free)
        assert self._host is not None
        read = self._host.take()
        coming = self._copy(read.buffer, free)
        coming.arrived.wait()  # before anything else is read into that slot
        self._host.give_back(read)
        return coming

    def _copy(self, source: Tensor, free: _Free) -> _Coming:
        return _Coming(free.slot, self._copies.copy(source, free.slot.buffer, self._slots[free.slot], free.used))
