"""Reading one layer file: aligned ranges, past the page cache where the filesystem allows."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from shared.errors import DataLossError, UnavailableError
from shared.pack.format import PAGE, FileLayout
from shared.pack.reader import Pack
from shared.streaming.files import DataFile
from shared.tensors import aligned_buffer, byte_view
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
            assert file.read(byte_view(buffer), offset) == size
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
            with pytest.raises(DataLossError, match=rf"layer 0 is truncated at byte {kept}; pack the model again"):
                file.read(byte_view(aligned_buffer(pack.layer_layout.data_bytes)), 0)
        finally:
            file.close()


def test_the_digest_covers_header_and_data(pack: Pack) -> None:
    data = aligned_buffer(pack.layer_layout.data_bytes)
    file = DataFile(pack.layer_path(2), pack.layer_layout, pack.layer_digest(2), "layer 2")
    other = DataFile(pack.layer_path(2), pack.outer_layout, pack.layer_digest(2), "layer 2")
    try:
        file.read(byte_view(data), 0)
        file.verify(byte_view(data))
        with pytest.raises(DataLossError, match="layer 2 does not match its digest"):
            other.verify(byte_view(data))
        data[-1] ^= 1
        with pytest.raises(DataLossError, match="layer 2 does not match its digest"):
            file.verify(byte_view(data))
    finally:
        file.close()
        other.close()


def test_a_file_that_was_replaced_is_read_after_reopening_and_its_stamp_tells(tmp_path: Path, pack: Pack) -> None:
    path, start = tmp_path / "layer", pack.layer_layout.data_start
    path.write_bytes(pack.layer_path(0).read_bytes())
    file, buffer = DataFile(path, pack.layer_layout, pack.layer_digest(0), "layer 0"), aligned_buffer(PAGE)
    try:
        stamp = file.stamp()
        assert file.stamp() == stamp
        replacement = tmp_path / "replacement"
        replacement.write_bytes(pack.layer_path(1).read_bytes())
        replacement.rename(path)
        file.reopen()
        assert file.stamp() != stamp
        file.read(byte_view(buffer), 0)
        assert buffer.numpy().tobytes() == path.read_bytes()[start:][:PAGE]
    finally:
        file.close()


def test_a_file_that_cannot_be_reopened_stays_open_as_it_was(tmp_path: Path, pack: Pack) -> None:
    path = tmp_path / "layer"
    path.write_bytes(pack.layer_path(0).read_bytes())
    file = DataFile(path, pack.layer_layout, pack.layer_digest(0), "layer 0")
    try:
        path.unlink()
        with pytest.raises(UnavailableError, match="layer 0 cannot be opened: No such file.*; restore layer"):
            file.reopen()
        data = aligned_buffer(pack.layer_layout.data_bytes)
        file.read(byte_view(data), 0)
        file.verify(byte_view(data))
    finally:
        file.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_unavailable_by_name(tmp_path: Path, pack: Pack) -> None:
    path = tmp_path / "layer"
    path.write_bytes(pack.layer_path(0).read_bytes())
    path.chmod(0)
    with pytest.raises(UnavailableError, match="layer 0 cannot be opened: Permission denied"):
        DataFile(path, pack.layer_layout, pack.layer_digest(0), "layer 0")


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
        assert file.read(byte_view(buffer), PAGE) == 4 * PAGE
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
