"""Where items wait for slow readers: in bounded memory, then in files, and beyond that not at all.

A `Spool` bounds all outlets of a service together. While no more than half of its memory is taken, it does nothing.
Beyond that a thread of its own writes items to disk: the newest of the reader that is furthest behind, who needs them
last. What a reader is being given is in memory, whether it came from there or from disk. Where neither memory nor disk
has room, the reader that is furthest behind loses its stream, and the others lose nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

from shared.errors import CapacityError, UnavailableError
from shared.outlet import Item, Outlet
from shared.spool_file import SpoolFile, SpoolFolder

PATIENCE_S = 5.0
"""How long whoever fills an outlet waits for the disk once memory is full: enough for any disk that works."""


@runtime_checkable
class Spoolable(Protocol):
    """An item most of which is bytes that may wait on disk."""

    @property
    def payload(self) -> tuple[bytes, ...]: ...

    def with_payload(self, payload: Sequence[bytes]) -> Self:
        """The same item with other bytes."""
        ...


@dataclass(frozen=True)
class _Place:
    """Where an item's bytes are in a file."""

    file: SpoolFile
    start: int
    sizes: tuple[int, ...]


@dataclass(eq=False)
class _Entry:
    """An item that waits; without its bytes once these are on disk."""

    item: Any
    size: int
    place: _Place | None = None
    taken: bool = False


class Spool:
    """Bounds what waits in all its outlets together. Thread safe; nobody waits for the disk while memory has room."""

    def __init__(self, memory_bytes: int, folder: SpoolFolder | None = None) -> None:
        """Makes an empty spool.

        Args:
            memory_bytes: most bytes that wait in memory.
            folder: where bytes wait beyond that; None nowhere.
        """
        self._memory_limit = memory_bytes
        self._folder = folder
        self.changed = threading.Condition()
        """Held for every change to an outlet of this spool; never while the disk works."""
        self._outlets: set[SpooledOutlet[Any]] = set()
        self._writer: threading.Thread | None = None
        self._writing = self._closed = False
        self._failures = 0
        self._failure: OSError | None = None

    @property
    def memory_bytes(self) -> int:
        """Bytes that wait in memory."""
        with self.changed:
            return sum(outlet.memory_bytes for outlet in self._outlets)

    @property
    def disk_bytes(self) -> int:
        """Bytes in files."""
        with self.changed:
            return sum(outlet.disk_bytes for outlet in self._outlets)

    def close(self) -> None:
        """Writes nothing any more; what waits can still be read."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        if self._writer is not None:
            self._writer.join()

    def added(self, outlet: SpooledOutlet[Any]) -> None:
        """An outlet has another item in memory: returns when everything is within bounds, whatever that takes."""
        self._outlets.add(outlet)
        self._start_writer()
        self.changed.notify_all()
        while not self._within_bounds():
            failures = self._failures
            in_time = self.changed.wait_for(
                lambda: self._within_bounds() or self._failures > failures or not self._may_write(),  # noqa: B023
                PATIENCE_S,
            )
            if not in_time or self._failures > failures or not (self._within_bounds() or self._may_write()):
                self._give_up_slowest()

    def forget(self, outlet: SpooledOutlet[Any]) -> None:
        """Nothing waits in an outlet any more."""
        self._outlets.discard(outlet)
        self.changed.notify_all()

    def _within_bounds(self) -> bool:
        return self.memory_bytes <= self._memory_limit

    def _may_write(self) -> bool:
        return self._writing or self._next_to_write() is not None

    def _give_up_slowest(self) -> None:
        slowest = max(self._outlets, key=lambda outlet: outlet.pending)
        reason = f"; the spool's disk does not take them: {self._failure.strerror}" if self._failure else ""
        slowest.drop(
            CapacityError(f"{slowest.pending} bytes of KV wait for a caller that reads too slowly; read faster{reason}")
        )

    def _start_writer(self) -> None:
        if self._writer is None and self._next_to_write() is not None:
            self._writer = threading.Thread(target=self._write, name="spool-writer", daemon=True)
            self._writer.start()

    def _next_to_write(self) -> tuple[SpooledOutlet[Any], _Entry] | None:
        """What goes to disk now, if anything has to. After a failure, only when there is no other way."""
        threshold = self._memory_limit if self._failure else self._memory_limit // 2
        if self._folder is None or self._closed or self.memory_bytes <= threshold:
            return None
        for outlet in sorted(self._outlets, key=lambda outlet: outlet.memory_bytes, reverse=True):
            entry = outlet.newest_in_memory()
            if entry is not None and self.disk_bytes + entry.size <= self._folder.limit_bytes:
                return outlet, entry
        return None

    def _write(self) -> None:
        with self.changed:
            while not self._closed:
                found = self._next_to_write()
                if found is None or not self._write_one(*found):
                    self.changed.wait()

    def _write_one(self, outlet: SpooledOutlet[Any], entry: _Entry) -> bool:
        """Moves an item's bytes to disk, without holding the lock meanwhile; false where the disk fails."""
        file, payload = outlet.file, entry.item.payload
        self._writing = True
        self.changed.release()
        try:
            file = file or self._new_file()
            place = _Place(file, file.append(payload), tuple(map(len, payload)))
            failure = None
        except OSError as error:
            failure = error
        finally:
            self.changed.acquire()
            self._writing = False
            self.changed.notify_all()
        self._failure = failure
        if failure is not None:
            self._failures += 1
            return False
        outlet.written(entry, place)
        return True

    def _new_file(self) -> SpoolFile:
        assert self._folder is not None
        return self._folder.new_file()


class SpooledOutlet(Outlet[Item]):
    """An outlet whose items wait in a spool."""

    def __init__(self, spool: Spool) -> None:
        """Must be made on the event loop that reads it."""
        super().__init__()
        self._spool = spool
        self.memory_bytes = 0
        """Size of the items in memory, the one being read included."""
        self.disk_bytes = 0
        """Size of its file."""
        self.file: SpoolFile | None = None
        """Gone as soon as nothing in it waits any more."""
        self._on_disk = 0
        self._reading: _Entry | None = None

    def put(self, item: Item, size: int = 1) -> None:
        """Adds an item of some size. May wait for the disk, and end this or another stream, where memory is full."""
        with self._spool.changed:
            if self.ended:
                return
            self._push(_Entry(item, size), size)
            self.memory_bytes += size
            self._spool.added(self)

    def drop(self, error: Exception) -> None:
        """Ends the stream with an error, and forgets the items that wait: memory and disk are free at once."""
        with self._spool.changed:
            super().drop(error)
            self.memory_bytes = self.disk_bytes = self._on_disk = 0
            self.file = None
            self._spool.forget(self)

    def newest_in_memory(self) -> _Entry | None:
        """The last item that could go to disk."""
        entries = (entry for entry, _ in reversed(self._items))
        return next((entry for entry in entries if entry.place is None and isinstance(entry.item, Spoolable)), None)

    def written(self, entry: _Entry, place: _Place) -> None:
        """An item's bytes are on disk, and need no memory unless it has been taken meanwhile."""
        if self._dropped or (entry.taken and not self._on_disk):
            return  # with the last reference to its file
        self.file = place.file
        self.disk_bytes += entry.size
        if not entry.taken:
            entry.item, entry.place = entry.item.with_payload([b""] * len(place.sizes)), place
            self.memory_bytes -= entry.size
            self._on_disk += 1

    async def _next(self) -> tuple[Item, int] | None:
        with self._spool.changed:
            found = self._pop()
            if found is None:
                return None
            entry: _Entry = found[0]
            entry.taken, self._reading = True, entry
            if entry.place is not None:
                self.memory_bytes += entry.size
        if entry.place is None:
            return entry.item, entry.size
        try:
            payload = await asyncio.to_thread(entry.place.file.read, entry.place.start, entry.place.sizes)
        except OSError as error:
            raise UnavailableError(f"KV cannot be read back from the spool's disk: {error.strerror}") from error
        return entry.item.with_payload(payload), entry.size

    def _finished(self, size: int) -> None:
        with self._spool.changed:
            super()._finished(size)
            entry, self._reading = self._reading, None
            if self._dropped or entry is None:
                return
            self.memory_bytes -= size
            if entry.place is not None:
                self._on_disk -= 1
                if not self._on_disk:
                    self.file, self.disk_bytes = None, 0
            self._spool.changed.notify_all()
