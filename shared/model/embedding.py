"""Input embeddings: rows of a matrix in memory, or, where nothing else needs that matrix, rows read on demand."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from shared.errors import DataLossError, HeadraceError, UnavailableError
from shared.pack.format import TensorEntry
from shared.tensors import byte_view


class EmbeddingFile:
    """An embedding that stays on disk. A pass needs a few rows of it, and the page cache keeps the common ones."""

    def __init__(self, path: Path, data_start: int, entry: TensorEntry) -> None:
        """Opens the file, just verified, that holds the matrix `entry`, [vocab_size, hidden_size].

        Raises:
            UnavailableError: the file cannot be opened.
        """
        self._path = path
        self._entry = entry
        self._start = data_start + entry.offset
        self._row_bytes = entry.shape[1] * entry.dtype.itemsize
        self._descriptor = self._open()
        self._version = self._found_version()

    def rows(self, token_ids: Tensor) -> Tensor:
        """The tokens' rows, [tokens, hidden_size]; each distinct row is read once.

        A file that fails is opened anew: it may have been restored meanwhile.

        Raises:
            DataLossError: the file has become shorter, or is no longer the one that was verified.
            UnavailableError: the disk reports an error.
        """
        distinct, places = token_ids.unique(return_inverse=True)
        try:
            table = self._read(distinct.tolist())
        except HeadraceError:
            stale, self._descriptor = self._descriptor, self._open()
            os.close(stale)
            table = self._read(distinct.tolist())
        return table.view(self._entry.dtype)[places]

    def close(self) -> None:
        os.close(self._descriptor)

    def _read(self, token_ids: list[int]) -> Tensor:
        table = torch.empty((len(token_ids), self._row_bytes), dtype=torch.uint8)
        for row, token_id in zip(table, token_ids, strict=True):
            try:
                count = os.preadv(self._descriptor, [byte_view(row)], self._start + token_id * self._row_bytes)
            except OSError as error:
                raise UnavailableError(f"the embedding cannot be read: {error.strerror}; check the disk") from error
            if count != self._row_bytes:
                raise DataLossError("the embedding's file is truncated; pack the model again")
        # Rows alone cannot be verified, so the file must be the one whose digest held at the start.
        if self._found_version() != self._version:
            raise DataLossError(f"{self._path.name} has changed since it was verified; restore it or restart")
        return table

    def _found_version(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns

    def _open(self) -> int:
        try:
            descriptor = os.open(self._path, os.O_RDONLY)
        except OSError as error:
            raise UnavailableError(
                f"the embedding cannot be opened: {error.strerror}; restore {self._path.name}"
            ) from error
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return descriptor
