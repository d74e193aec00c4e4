"""Input embeddings: rows of a matrix in memory, or, where nothing else needs that matrix, rows read on demand."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from shared.errors import DataLossError, UnavailableError
from shared.pack.format import TensorEntry
from shared.tensors import byte_view


class EmbeddingFile:
    """An embedding that stays on disk. A pass needs a few rows of it, and the page cache keeps the common ones."""

    def __init__(self, path: Path, data_start: int, entry: TensorEntry) -> None:
        """Opens the file that holds the matrix `entry`, [vocab_size, hidden_size]."""
        self._entry = entry
        self._start = data_start + entry.offset
        self._row_bytes = entry.shape[1] * entry.dtype.itemsize
        self._descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def rows(self, token_ids: Tensor) -> Tensor:
        """The tokens' rows, [tokens, hidden_size]; each distinct row is read once.

        Raises:
            DataLossError: the file has become shorter.
            UnavailableError: the disk reports an error.
        """
        distinct, places = token_ids.unique(return_inverse=True)
        table = torch.empty((len(distinct), self._row_bytes), dtype=torch.uint8)
        for row, token_id in zip(table, distinct.tolist(), strict=True):
            try:
                count = os.preadv(self._descriptor, [byte_view(row)], self._start + token_id * self._row_bytes)
            except OSError as error:
                raise UnavailableError(f"the embedding cannot be read: {error.strerror}; check the disk") from error
            if count != self._row_bytes:
                raise DataLossError("the embedding's file is truncated; pack the model again")
        return table.view(self._entry.dtype)[places]

    def close(self) -> None:
        os.close(self._descriptor)
