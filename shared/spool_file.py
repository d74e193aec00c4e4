"""Files for what waits: without a name, and gone with the process or earlier."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigurationError


class SpoolFile:
    """A file that was unlinked when it was opened, closed with its last reference. One thread appends, any reads."""

    def __init__(self, folder: Path) -> None:
        file = tempfile.TemporaryFile(buffering=0, dir=folder)  # noqa: SIM115
        weakref.finalize(self, file.close)
        self._descriptor = file.fileno()
        self._end = 0

    def append(self, parts: Sequence[bytes]) -> int:
        """Writes the parts one after another, and returns where they begin."""
        start = self._end
        for part in parts:
            left = memoryview(part)
            while left:
                count = os.pwrite(self._descriptor, left, self._end)
                self._end, left = self._end + count, left[count:]
        return start

    def read(self, start: int, sizes: Sequence[int]) -> list[bytes]:
        """Parts that were written one after another.

        Raises:
            OSError: they cannot be read, or not all of them are there.
        """
        parts = []
        for size in sizes:
            part = os.pread(self._descriptor, size, start)
            if len(part) != size:
                raise OSError(0, f"the file ends after {len(part)} of {size} bytes")
            parts.append(part)
            start += size
        return parts


@dataclass(frozen=True)
class SpoolFolder:
    """Where files are made, and how much they may hold together."""

    path: Path
    limit_bytes: int

    @classmethod
    def checked(cls, path: Path | None, limit_bytes: int) -> SpoolFolder:
        """A folder in which files can be made now; None is the system's for temporary files that may be large.

        Raises:
            ConfigurationError: they cannot.
        """
        folder = cls(path or _default_folder(), limit_bytes)
        try:
            folder.new_file()
        except OSError as error:
            raise ConfigurationError(
                f"no file can be made in the spool's folder {folder.path}: {error.strerror}; name another with "
                "--spool-dir, or do without files: --spool-disk 0"
            ) from None
        return folder

    def new_file(self) -> SpoolFile:
        """Raises OSError where no file can be made."""
        return SpoolFile(self.path)


def _default_folder() -> Path:
    """On many systems /tmp is memory, which the budget must not be spent on twice; /var/tmp is not."""
    lasting = Path("/var/tmp")
    return lasting if os.access(lasting, os.W_OK) else Path(tempfile.gettempdir())
