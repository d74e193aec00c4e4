"""An embedding on disk: its rows, and that only the file that was verified is ever used."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from shared.errors import DataLossError, UnavailableError
from shared.model.embedding import EmbeddingFile
from shared.pack.reader import Pack
from tests.conftest import TinyPack

TOKENS = torch.tensor([5, 0, 5, 7])


@pytest.fixture
def pack(tiny_pack: TinyPack, tmp_path: Path) -> Pack:
    """A copy, to damage, of a pack whose embedding is not tied."""
    return Pack.open(Path(shutil.copytree(tiny_pack("bf16", tied=False), tmp_path / "pack")))


@pytest.fixture
def embedding(pack: Pack) -> Iterator[EmbeddingFile]:
    file = EmbeddingFile(pack.outer_path, pack.outer_layout.data_start, pack.embedding)
    yield file
    file.close()


@pytest.fixture
def expected(pack: Pack) -> Tensor:
    return load_file(pack.outer_path)["embedding.weight"][TOKENS]


def test_rows_come_in_the_order_of_the_tokens(embedding: EmbeddingFile, expected: Tensor) -> None:
    assert torch.equal(embedding.rows(TOKENS), expected)


def test_a_changed_file_is_refused_until_the_verified_one_is_back(
    pack: Pack, embedding: EmbeddingFile, expected: Tensor, tmp_path: Path
) -> None:
    kept = Path(shutil.copy2(pack.outer_path, tmp_path / "kept"))
    with pack.outer_path.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"other bytes")
    for _ in range(2):
        with pytest.raises(DataLossError, match=r"outer\.safetensors has changed since it was verified"):
            embedding.rows(TOKENS)
    kept.rename(pack.outer_path)
    assert torch.equal(embedding.rows(TOKENS), expected)


def test_a_file_that_is_cut_off_or_gone_is_refused_until_it_is_back(
    pack: Pack, embedding: EmbeddingFile, expected: Tensor, tmp_path: Path
) -> None:
    kept = Path(shutil.copy2(pack.outer_path, tmp_path / "kept"))
    os.truncate(pack.outer_path, 4096)
    with pytest.raises(DataLossError, match="the embedding's file is truncated"):
        embedding.rows(TOKENS)
    pack.outer_path.unlink()
    with pytest.raises(UnavailableError, match=r"the embedding cannot be opened: No such file.*; restore outer"):
        embedding.rows(TOKENS)
    kept.rename(pack.outer_path)
    assert torch.equal(embedding.rows(TOKENS), expected)
