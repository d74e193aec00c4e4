"""The experts of a model with a mixture of them: brought as the router asks, the hot ones kept in memory.

A layer's reads begin when its router has spoken, for as many experts as there are slots; meanwhile those that are in
memory are computed. Each expert is read once for all tokens of a pass. `docs/streaming.md` has the measurements.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from shared.errors import DataLossError, HeadraceError
from shared.model.mlp import Mlp
from shared.pack.format import FileLayout, bind
from shared.pack.reader import Pack
from shared.streaming.expert_usage import ExpertUsage
from shared.streaming.files import DataFile, Stamp
from shared.streaming.loader import READERS, Load, Loader, Part, split
from shared.streaming.plan import MOST_SLOTS, kept_experts
from shared.tensors import aligned_buffer

FileOpener = Callable[[Path, FileLayout, str, str], DataFile]


class ExpertRange:
    """One expert's bytes in the file of its layer's experts."""

    def __init__(self, file: DataFile, layer: int, expert: int, size_bytes: int, sha256: str) -> None:
        self._label = f"layer {layer}, expert {expert}"
        self._file = file
        self._start = expert * size_bytes
        self._sha256 = sha256

    def read(self, into: memoryview, offset: int) -> int:
        """See `DataFile.read`; `offset` counts from the expert's start."""
        return self._file.read(into, self._start + offset, self._label)

    def stamp(self) -> Stamp:
        """See `DataFile.stamp`."""
        return self._file.stamp()

    def verify(self, data: memoryview) -> None:
        """Compares the expert's bytes with their digest.

        Raises:
            DataLossError: they differ.
        """
        if hashlib.sha256(data).hexdigest() != self._sha256:
            raise DataLossError(f"{self._label} does not match its digest; pack the model again")

    def reopen(self) -> None:
        """See `DataFile.reopen`; it concerns all experts of the layer."""
        self._file.reopen(self._label)


@dataclass(frozen=True, eq=False)
class ExpertSlot:
    """A buffer that holds one expert, and the views of its tensors."""

    buffer: Tensor
    """uint8 [data_bytes], page-aligned."""
    parts: Sequence[Part]
    mlp: Mlp


@dataclass(frozen=True, eq=False)
class _Coming:
    """An expert on its way into a slot, or there."""

    key: int
    slot: ExpertSlot
    load: Load


class ExpertStream:
    """Brings experts. Used by one thread; reading and verifying happen on its own threads.

    Inside, an expert's key is its number, counted through all layers.
    """

    def __init__(
        self,
        pack: Pack,
        slots: int | None,
        readers: int = READERS,
        *,
        verify_always: bool = False,
        open_file: FileOpener = DataFile,
    ) -> None:
        """Opens the files of experts; where there is a slot for every expert, loads and verifies them all.

        Args:
            slots: None: as many as there are experts.
            verify_always: compare an expert's digest whenever it is read, not only when it is new or changed.
            open_file: what `DataFile` does.

        Raises:
            DataLossError, UnavailableError: a file cannot be opened, or an expert not be read as it was packed.
        """
        self._pack = pack
        self._per_layer = pack.experts_per_layer
        count = pack.spec.layers * self._per_layer
        slots = count if slots is None else min(slots, count)
        self._usage = ExpertUsage(pack.spec.layers, self._per_layer, kept_experts(slots, count))
        self._readers = readers
        self._loader = Loader(readers, "expert", verify_always=verify_always)
        self._kept: dict[int, ExpertSlot] = {}
        self._coming: deque[_Coming] = deque()
        self._in_use: ExpertSlot | None = None
        """The slot of an expert that was brought and is not kept, as long as it is computed with."""
        self._lost: set[int] = set()
        """Experts that could not be read when they were last needed."""
        self._ranges: list[ExpertRange] = []
        self.bytes_read = 0
        """Of experts that passes have used."""
        self.uses = 0
        """Experts that passes have used, whether they were in memory or not."""
        self.reads = 0
        """Of these, those that were read."""
        with ExitStack() as opened:
            for layer in range(pack.spec.layers):
                digest, label = pack.experts_digest(layer), f"layer {layer}, experts"
                file = open_file(pack.experts_path(layer), pack.experts_layout, digest, label)
                opened.callback(file.close)
                digests = enumerate(pack.expert_digests(layer))
                self._ranges += [ExpertRange(file, layer, i, pack.expert_bytes, digest) for i, digest in digests]
            opened.callback(self._stop)
            self._free = [self._slot() for _ in range(slots)]
            if slots == count:
                self._load_all()
            self._files = opened.pop_all()

    def bring(self, layer: int, needed: Sequence[int], *, in_order: bool) -> Iterator[tuple[int, Mlp]]:
        """Brings a layer's experts; see `shared.model.experts.ExpertWeights`. It may be left at any expert.

        An expert that could not be read is read once more, from whatever lies at its path by now.

        Raises:
            DataLossError, UnavailableError: an expert cannot be read as it was packed; the next call tries again.
        """
        # Here and not where it is left: what ended in an error may be closed much later, by any thread.
        self._reclaim()
        first = layer * self._per_layer
        keys = [first + expert for expert in needed]
        self._usage.count(layer, needed)
        self.uses += len(keys)
        missing = [key for key in keys if key not in self._kept]
        waiting = deque(missing)
        self._start(waiting)
        for key in keys if in_order else [*(key for key in keys if key in self._kept), *missing]:
            kept = self._kept.get(key)
            if kept is not None:
                yield key - first, kept.mlp
            else:
                slot = self._in_use = self._arrived(self._coming.popleft())
                yield key - first, slot.mlp
                self._in_use = None
                self._keep(key, slot, keys)
                self._start(waiting)

    def bring_lost(self) -> None:
        """Reads the experts that could not be read when they were last needed.

        Raises:
            DataLossError, UnavailableError: one of them still cannot.
        """
        for key in sorted(self._lost):
            layer, expert = divmod(key, self._per_layer)
            for _ in self.bring(layer, [expert], in_order=True):
                pass

    def close(self) -> None:
        """Stops the threads and closes the files."""
        self._files.close()

    def _start(self, waiting: deque[int]) -> None:
        """Begins to read as many experts as there are free slots."""
        while waiting and self._free:
            self._coming.append(self._load(waiting.popleft(), self._free.pop()))

    def _load(self, key: int, slot: ExpertSlot) -> _Coming:
        return _Coming(key, slot, self._loader.load(self._ranges[key], slot.parts, slot.buffer))

    def _arrived(self, coming: _Coming) -> ExpertSlot:
        """Waits for an expert."""
        self._in_use = coming.slot
        self._lost.add(coming.key)
        if coming.load.ready.exception() is not None:
            wait([other.load.ready for other in self._coming])  # they may be of the same file
            self._ranges[coming.key].reopen()
            coming = self._load(coming.key, coming.slot)
        self.bytes_read += coming.load.ready.result()
        self.reads += 1
        self._lost.remove(coming.key)
        return coming.slot

    def _keep(self, key: int, slot: ExpertSlot, needed: Sequence[int]) -> None:
        """Keeps an expert, or frees its slot or that of another one."""
        gone = self._usage.keep(key, needed)
        if gone != key:
            self._kept[key] = slot
        if gone is not None:
            self._free.append(slot if gone == key else self._kept.pop(gone))

    def _reclaim(self) -> None:
        """Takes back the slots of a call that was left early."""
        for coming in self._coming:
            coming.load.abandon()
            self._free.append(coming.slot)
        self._coming.clear()
        if self._in_use is not None:
            self._free.append(self._in_use)
            self._in_use = None

    def _load_all(self) -> None:
        """Loads and verifies every expert, a few at a time."""
        waiting = deque(range(len(self._ranges)))
        while waiting or self._coming:
            while waiting and len(self._coming) < MOST_SLOTS:
                self._coming.append(self._load(waiting.popleft(), self._free.pop()))
            coming = self._coming.popleft()
            try:
                coming.load.ready.result()
            except HeadraceError:
                self._free.append(coming.slot)
                raise
            self._keep(coming.key, coming.slot, [])

    def _slot(self) -> ExpertSlot:
        layout = self._pack.expert_layout
        buffer = aligned_buffer(layout.data_bytes)
        return ExpertSlot(buffer, split(buffer, self._readers), Mlp.of(bind(buffer, layout), "", self._pack.scheme))

    def _stop(self) -> None:
        self._reclaim()
        self._loader.close()
