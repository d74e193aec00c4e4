"""A ring of slots: layers are read in a fixed cyclic order, ahead of use, and the end wraps round to the beginning.

The order of use is known for ever (0, 1, …, last, 0, 1, …), so there is no policy here: a slot that is given back
starts at once to receive the next layer that has none. Near the end of a pass that is the beginning of the next one.
`docs/streaming.md` draws it, and has the measurements behind the constants.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from shared.model.layers import LayerWeights
from shared.streaming.files import DataFile
from shared.streaming.loader import READERS, Load, Loader, split


@dataclass(frozen=True, eq=False)
class Slot:
    """A buffer that holds one streamed layer, and the views of its tensors."""

    buffer: Tensor
    """uint8 [data_bytes], page-aligned; what the readers fill."""
    weights: LayerWeights
    """What a pass computes with."""


@dataclass(frozen=True, eq=False)
class _Coming:
    """A layer on its way into a slot, or there."""

    index: int
    slot: Slot
    load: Load

    def abandon(self) -> Slot:
        """Stops reading, and returns the slot when nothing writes into it any more."""
        self.load.abandon()
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
        self._loader = Loader(readers, "layer", verify_always=verify_always)
        self._taken: list[_Coming] = []
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
        coming = self._ahead.popleft()
        self._taken.append(coming)
        if coming.load.ready.exception() is not None:
            self._files[coming.index].reopen()
            coming = self._taken[-1] = self._load(coming.index, coming.slot)
        self.bytes_read += coming.load.ready.result()
        return coming.slot

    def arrives(self) -> bool:
        """Waits until reading the next layer ahead has ended, and tells whether it went well."""
        return self._ahead[0].load.ready.exception() is None

    def give_back(self, slot: Slot) -> None:
        """Declares a taken slot free; reading into it starts at once."""
        self._taken = [coming for coming in self._taken if coming.slot is not slot]
        self._ahead.append(self._load(self._next, slot))
        self._next = (self._next + 1) % len(self._files)

    def rewind(self) -> None:
        """Makes the first file the next one, wherever the ring is; what is taken counts as given back.

        What is in the slots already, or on its way, and is needed first is kept.
        """
        if not self._taken and self._ahead[0].index == 0:
            return
        all_slots = [*self._taken, *self._ahead]
        kept = {
            coming.index: coming for coming in all_slots if coming.index < len(all_slots) and not coming.load.failed
        }
        free = [coming.abandon() for coming in all_slots if kept.get(coming.index) is not coming]
        self._taken = []
        self._ahead = deque(kept.get(index) or self._load(index, free.pop()) for index in range(len(all_slots)))
        self._next = len(all_slots) % len(self._files)

    def close(self) -> None:
        """Stops the threads and closes the files."""
        for coming in (*self._taken, *self._ahead):
            coming.abandon()
        self._loader.close()
        for file in self._files:
            file.close()

    def _load(self, index: int, slot: Slot) -> _Coming:
        return _Coming(index, slot, self._loader.load(self._files[index], self._parts[slot], slot.buffer))
