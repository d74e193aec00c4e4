"""The tensors of safetensors files: what their headers say, read once, and rows of them when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from safetensors import safe_open
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredTensors:
    """Tensors by name, wherever they lie."""

    files: Mapping[str, Path]
    dtypes: Mapping[str, str]
    """As safetensors names them: F32, BF16, U8 …"""
    shapes: Mapping[str, Shape]

    @classmethod
    def of(cls, files: Mapping[str, Path]) -> StoredTensors:
        """Reads headers only, each once: one may list thousands of tensors.

        Args:
            files: name -> file that holds it.
        """
        dtypes: dict[str, str] = {}
        shapes: dict[str, Shape] = {}
        for path in set(files.values()):
            with safe_open(path, framework="pt") as opened:
                for name in (name for name, its_path in files.items() if its_path == path):
                    tensor = opened.get_slice(name)
                    dtypes[name], shapes[name] = tensor.get_dtype(), tuple(tensor.get_shape())
        return cls(files, dtypes, shapes)

    def rows(self, name: str, rows: slice = slice(None), matrix: int | None = None) -> Tensor:
        """Reads a tensor, or some of its rows.

        Args:
            matrix: of which of its matrices, where the tensor is [matrices, rows, columns].
        """
        with safe_open(self.files[name], framework="pt") as opened:
            if not self.shapes[name]:
                return cast(Tensor, opened.get_tensor(name))
            stored = opened.get_slice(name)
            if matrix is None:
                return cast(Tensor, stored[rows])
            return cast(Tensor, stored[matrix : matrix + 1, rows])[0]
