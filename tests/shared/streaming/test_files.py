"""Reading one layer file: aligned ranges, past the page cache where the filesystem allows."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from shared.errors import DataLossError
from shared.pack.format import PAGE, FileLayout
from shared.pack.reader import Pack
from shared.streaming.files import DataFile
from shared.tensors import aligned_buffer
from tests.conftest import TinyPack

SYMBOLS = Path("/proc/kallsyms")
"""A long file on a filesystem that refuses O_DIRECT; it stays the same while the machine runs."""


@pytest.fixture
def pack(tiny_pack: TinyPack) -> Pack:
    return Pack.open(tiny_pack("bf16"))


def test_any_aligned_range_of_the_data_is_read(pack: Pack) -> None:
    path, start = pack.layer_path(1), pack.layer_layout.data_start
    whole = path.read_bytes()[start:]
    file = DataFile(path, pack.layer_layout, pack.layer_digest(1), "layer 1")
    try:
        for offset, size in ((0, len(whole)), (PAGE, 2 * PAGE), (len(whole) - PAGE, PAGE)):
            buffer = aligned_buffer(size)
            assert file.read(buffer, offset) == size
            assert buffer.numpy().tobytes() == whole[offset : offset + size]
    finally:
        file.close()


def test_a_file_that_ends_early_is_refused_with_the_place(tmp_path: Path, pack: Pack) -> None:
    path = tmp_path / "layer"
    whole = pack.layer_path(0).read_bytes()
    start = pack.layer_layout.data_start
    for kept in (start + 2 * PAGE, start + 2 * PAGE + 100):
        path.write_bytes(whole[:kept])
        file = DataFile(path, pack.layer_layout, pack.layer_digest(0), "layer 0")
        try:
            with pytest.raises(DataLossError, match=rf"layer 0 is truncated at byte {kept}; pack again"):
                file.read(aligned_buffer(pack.layer_layout.data_bytes), 0)
        finally:
            file.close()


def test_the_digest_covers_header_and_data(pack: Pack) -> None:
    data = aligned_buffer(pack.layer_layout.data_bytes)
    file = DataFile(pack.layer_path(2), pack.layer_layout, pack.layer_digest(2), "layer 2")
    other = DataFile(pack.layer_path(2), pack.outer_layout, pack.layer_digest(2), "layer 2")
    try:
        file.read(data, 0)
        file.verify(data)
        with pytest.raises(DataLossError, match="layer 2 does not match its digest"):
            other.verify(data)
        data[-1] ^= 1
        with pytest.raises(DataLossError, match="layer 2 does not match its digest"):
            file.verify(data)
    finally:
        file.close()
        other.close()


def test_where_the_filesystem_refuses_direct_reads_the_page_cache_serves(caplog: pytest.LogCaptureFixture) -> None:
    skip_unless_refusing_direct_reads(SYMBOLS)
    layout = FileLayout.of({})
    with caplog.at_level(logging.WARNING, "shared.streaming.files"):
        file = DataFile(SYMBOLS, layout, "", "layer 0")
    try:
        assert [record.getMessage() for record in caplog.records] == [
            "kallsyms: the filesystem refuses O_DIRECT; reading through the page cache"
        ]
        buffer = aligned_buffer(4 * PAGE)
        assert file.read(buffer, PAGE) == 4 * PAGE
        begin = layout.data_start + PAGE
        with SYMBOLS.open("rb") as symbols:
            assert buffer.numpy().tobytes() == symbols.read(begin + 4 * PAGE)[begin:]
    finally:
        file.close()


def skip_unless_refusing_direct_reads(path: Path) -> None:
    if not path.exists():
        pytest.skip(f"{path} does not exist here")
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return
    pytest.skip(f"{path} can be read with O_DIRECT here")
