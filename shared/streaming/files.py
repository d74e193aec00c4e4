"""Reading layer files past the page cache, into aligned memory."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

from torch import Tensor

from shared.errors import DataLossError, UnavailableError
from shared.pack.format import FileLayout
from shared.tensors import byte_view

log = logging.getLogger(__name__)


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
        self._layout = layout
        self._data_start = layout.data_start
        self._sha256 = sha256
        try:
            self._descriptor = _open_direct(path)
        except OSError as error:
            raise UnavailableError(f"{label} cannot be opened: {error.strerror}; restore {path.name}") from error

    def read(self, into: Tensor, offset: int) -> int:
        """Fills `into`, uint8, from `offset` bytes into the data section; returns the bytes read.

        Raises:
            DataLossError: the file ends early.
            UnavailableError: the disk reports an error.
        """
        view, done = byte_view(into), 0
        while done < len(view):
            try:
                count = os.preadv(self._descriptor, [view[done:]], self._data_start + offset + done)
            except OSError as error:
                raise UnavailableError(f"{self.label} cannot be read: {error.strerror}; check the disk") from error
            if count == 0:
                raise DataLossError(f"{self.label} is truncated at byte {self._data_start + offset + done}; pack again")
            done += count
        return done

    def verify(self, data: Tensor) -> None:
        """Compares data that was read, uint8 [data_bytes], with the manifest's digest of the whole file.

        Raises:
            DataLossError: they differ.
        """
        digest = hashlib.sha256(self._layout.header())
        digest.update(byte_view(data))
        if digest.hexdigest() != self._sha256:
            raise DataLossError(f"{self.label} does not match its digest; pack the model again")

    def close(self) -> None:
        os.close(self._descriptor)


def _open_direct(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        log.warning("%s: the filesystem refuses O_DIRECT; reading through the page cache", path.name)
        return os.open(path, os.O_RDONLY)
