"""`OUT.partial`: where a pack grows until it is complete. It survives a crash, and packing goes on from there.

lock            held by the one process that packs
journal.jsonl   what is being packed, and each finished file with its digests
pack/           the files; renamed to OUT at the end
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shared.errors import CapacityError, ConfigurationError
from shared.pack.format import FileRecord

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The disk is full, the user's share of it is, or the largest allowed file."""


@dataclass(frozen=True)
class FinishedFile:
    """A file of the pack that is complete on disk."""

    record: FileRecord
    encoded_digests: Mapping[str, str]
    """Of the logical tensors it holds, for the model digest."""


@dataclass
class Workspace:
    """The folder `OUT.partial`, locked by this process."""

    folder: Path
    finished: dict[str, FinishedFile] = field(default_factory=dict)
    """By path inside the pack."""

    @property
    def pack(self) -> Path:
        """The growing pack."""
        return self.folder / "pack"

    @property
    def journal(self) -> Path:
        """One JSON object a line; the first says what is being packed."""
        return self.folder / "journal.jsonl"

    def resume(self, identity: Mapping[str, Any]) -> None:
        """Takes over what an earlier process finished of the same work, and discards what is of other work."""
        lines = _complete_lines(self.journal)
        if not lines or lines[0] != identity:
            shutil.rmtree(self.pack, ignore_errors=True)
            self.journal.unlink(missing_ok=True)
            self._append(identity)
            lines = []
        for line in lines[1:]:
            record = FileRecord(line["size_bytes"], line["sha256"], tuple(line.get("expert_sha256", ())))
            path = self.pack / line["path"]
            if path.is_file() and path.stat().st_size == record.size_bytes:
                self.finished[line["path"]] = FinishedFile(record, line["encoded_digests"])

    def write(
        self,
        path: str,
        pieces: Iterable[memoryview],
        encoded_digests: Mapping[str, str],
        expert_sha256: Sequence[str] = (),
    ) -> FileRecord:
        """Writes a file of the pack durably, then its line in the journal.

        Args:
            encoded_digests, expert_sha256: read after the last piece has been written.
        """
        record = replace(write_durably(self.pack / path, pieces), expert_sha256=tuple(expert_sha256))
        self.finished[path] = FinishedFile(record, dict(encoded_digests))
        self._append(
            {
                "path": path,
                "size_bytes": record.size_bytes,
                "sha256": record.sha256,
                "encoded_digests": dict(encoded_digests),
                "expert_sha256": list(expert_sha256),
            }
        )
        return record

    def publish(self, out: Path) -> None:
        """Renames the pack to `out`, replacing a pack that is there."""
        replaced = self.folder / "replaced"
        if out.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            out.rename(replaced)
        self.pack.rename(out)
        _sync_folder(out.parent)

    def _append(self, value: Mapping[str, Any]) -> None:
        text = self.journal.read_bytes() if self.journal.exists() else b""
        with self.journal.open("ab") as file:
            if text and not text.endswith(b"\n"):
                file.truncate(text.rfind(b"\n") + 1)  # a line that a crash cut off
            file.write(json.dumps(value).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def workspace_of(out: Path) -> Iterator[Workspace]:
    """Makes `OUT.partial`, or takes it over, and keeps other packers out while the context lasts.

    The folder is removed at the end, unless it holds files of a pack that is not yet complete.

    Raises:
        ConfigurationError: another process packs to the same place.
        CapacityError: the disk filled up; what is finished stays.
    """
    workspace = Workspace(out.with_name(f"{out.name}.partial"))
    with _told_when_full(out), _locked(workspace.folder, out):
        try:
            yield workspace
        finally:
            if not workspace.pack.exists():
                shutil.rmtree(workspace.folder)


@contextmanager
def _told_when_full(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        free_bytes = shutil.disk_usage(out.parent).free
        raise CapacityError(
            f"packing to {out} stopped: {error.strerror}, with {free_bytes:,} bytes free on that disk; "
            "make room and run the same command again: it goes on where it stopped"
        ) from None


@contextmanager
def _locked(folder: Path, out: Path) -> Iterator[None]:
    with ExitStack() as stack:
        while not _took_lock(folder, out, stack):
            pass
        yield


def _took_lock(folder: Path, out: Path, stack: ExitStack) -> bool:
    """False where another process finished, and removed the folder, before the lock was held: then try again."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "lock"
    try:
        lock = stack.enter_context(path.open("ab"))
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(lock.fileno()), path.stat())
    except FileNotFoundError:
        return False
    except BlockingIOError:
        raise ConfigurationError(f"another process is packing to {out}; wait for it, or stop it") from None


def write_durably(path: Path, pieces: Iterable[memoryview]) -> FileRecord:
    """Writes a file under a temporary name, syncs it to disk, and gives it its name: it is whole, or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    digest, size_bytes = hashlib.sha256(), 0
    try:
        with temporary.open("wb") as file:
            for piece in pieces:
                file.write(piece)
                digest.update(piece)
                size_bytes += piece.nbytes
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)  # a full disk gets back what could not be finished
    _sync_folder(path.parent)
    return FileRecord(size_bytes, digest.hexdigest())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _complete_lines(journal: Path) -> list[dict[str, Any]]:
    """The journal's lines but one that a crash cut off; none where it cannot be read, so that all is done again."""
    try:
        return [json.loads(line) for line in journal.read_bytes().split(b"\n")[:-1]]
    except (FileNotFoundError, ValueError):
        return []
