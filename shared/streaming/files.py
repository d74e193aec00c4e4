"""Reading layer files past the page cache, into aligned memory."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import time
from mmap import mmap
from pathlib import Path

from shared.errors import DataLossError, UnavailableError
from shared.pack.format import PAGE, FileLayout

log = logging.getLogger(__name__)

Stamp = tuple[int, ...]
"""Which file is open, and when it was last changed: equal stamps, equal content, as far as the filesystem knows."""


class DataFile:
    """One pack file, opened for reading its data section in aligned ranges, from any thread."""

    def __init__(self, path: Path, layout: FileLayout, sha256: str, label: str) -> None:
        """Opens the file.

        Args:
            label: names the file in errors, as in "layer 7".

        Raises:
            UnavailableError: the file cannot be opened.
        """
        self.label = label
        self._path = path
        self._header = layout.header()
        self._sha256 = sha256
        self._descriptor = self._open()

    def read(self, into: memoryview, offset: int, label: str | None = None) -> int:
        """Fills `into` from `offset` bytes into the data section; returns the bytes read.

        Args:
            label: names what is read in errors, where it is not the whole file.

        Raises:
            DataLossError: the file ends early.
            UnavailableError: the disk reports an error.
        """
        start, done, label = len(self._header) + offset, 0, label or self.label
        while done < len(into):
            try:
                count = os.preadv(self._descriptor, [into[done:]], start + done)
            except OSError as error:
                raise UnavailableError(f"{label} cannot be read: {error.strerror}; check the disk") from error
            if count == 0:
                raise DataLossError(f"{label} is truncated at byte {start + done}; pack the model again")
            done += count
        return done

    def stamp(self) -> Stamp:
        """Changes whenever the file does; where nobody can tell, it is never the same twice."""
        try:
            status = os.fstat(self._descriptor)
        except OSError:
            return (time.monotonic_ns(),)
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def verify(self, data: memoryview) -> None:
        """Compares the whole data section, as it was read, with the manifest's digest of the whole file.

        Raises:
            DataLossError: they differ.
        """
        digest = hashlib.sha256(self._header)
        digest.update(data)
        if digest.hexdigest() != self._sha256:
            raise DataLossError(f"{self.label} does not match its digest; pack the model again")

    def reopen(self, label: str | None = None) -> None:
        """Opens whatever lies at the path by now: a file that was replaced, or whose device went and came back.

        Nothing may be reading. On failure the file stays open as it was.

        Args:
            label: as in `read`.

        Raises:
            UnavailableError: the file cannot be opened.
        """
        stale, self._descriptor = self._descriptor, self._open(label)
        os.close(stale)

    def close(self) -> None:
        os.close(self._descriptor)

    def _open(self, label: str | None = None) -> int:
        try:
            return _open_direct(self._path)
        except OSError as error:
            raise UnavailableError(
                f"{label or self.label} cannot be opened: {error.strerror}; restore {self._path.name}"
            ) from error


def _open_direct(path: Path) -> int:
    descriptor = None
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        _try_to_read(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        if descriptor is not None:
            os.close(descriptor)
        log.warning("%s: the filesystem refuses O_DIRECT; reading through the page cache", path.name)
        return os.open(path, os.O_RDONLY)
    return descriptor


def _try_to_read(descriptor: int) -> None:
    """Some filesystems refuse O_DIRECT, with EINVAL, only when something is read. Other errors can wait till then."""
    with mmap(-1, PAGE) as page:
        try:
            os.preadv(descriptor, [page], 0)
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise
