"""The batch's files: answers kept as they come, and published whole.

`OUT.partial` gets each answer and each failure the moment it is known; at the end `OUT` appears, complete, with the
answers, and beside it the file of errors, if there are any. A run that was interrupted continues from `OUT.partial`.
Memory holds one number for each job, never an answer.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from headrace.errors import InputError
from headrace.job_input import JobFile

_NONE = -1


class Answers:
    """What became of the jobs of one batch, in `OUT.partial`, which is locked while this is open."""

    def __init__(
        self,
        out: Path,
        jobs: JobFile,
        model_digest: str,
        *,
        errors: Path | None = None,
        ordered: bool = True,
        retry_failed: bool = False,
    ) -> None:
        """
        Args:
            out: the file to publish; beside it lies the partial one.
            jobs: what is to be answered. What an earlier run kept counts only with the same key: a job that was edited,
                or that another model answered, is done again.
            model_digest: of the model that answers.
            errors: the file for the failures; by default `errors_path(out)`.
            ordered: publish in the order of the jobs; else in the order in which they were finished.
            retry_failed: forget the failures of an earlier run, so that their jobs are done again.

        Raises:
            InputError: a folder cannot be written, another run is writing the same file, or there is no earlier run
                whose failures could be tried again.
        """
        self._out = out
        self._errors = errors or errors_path(out)
        self._partial = out.with_name(f"{out.name}.partial")
        if retry_failed and not self._partial.exists():
            raise InputError(f"there is nothing to try again: no {self._partial} of a run in which lines failed")
        self._jobs = jobs
        self._model_digest = model_digest
        self._ordered = ordered
        self._retry_failed = retry_failed
        self._places = array("q", [_NONE]) * len(jobs)
        """Where in `OUT.partial` each job's record begins."""
        self._failed = bytearray(len(jobs))
        self._file = self._open()
        try:
            self._end = self._load()
        except BaseException:
            self.close()
            raise

    def __contains__(self, index: int) -> bool:
        return self._places[index] != _NONE

    def __len__(self) -> int:
        return len(self._jobs) - self._places.count(_NONE)

    @property
    def failures(self) -> int:
        """Of these, the jobs that failed."""
        return self._failed.count(1)

    def pending(self) -> Iterator[int]:
        """The jobs that nothing is known of, in order."""
        return (index for index in range(len(self._jobs)) if index not in self)

    def append(self, index: int, line: dict[str, Any], *, failed: bool) -> None:
        """Keeps the line to publish for a job: when this returns, the death of the process does not lose it."""
        key = self._jobs.key(index, self._model_digest)
        job_id = line["custom_id"] if "custom_id" in line else line["id"]
        self._take(index, self._end, failed)
        self._end += self._file.write(_encoded({"id": job_id, "key": key, "failed": failed, "line": line}))
        self._file.flush()

    def publish(self) -> None:
        """Writes the file of errors, or removes an old one where there are none, and then `OUT`, at once and whole.

        Keeps `OUT.partial` only where errors are left, so that another run can try those alone.
        """
        with _written_whole(self._errors) as errors, _written_whole(self._out) as answers:
            for record in self._records():
                (errors if record["failed"] else answers).write(_encoded(record["line"]))
        if not self.failures:
            self._errors.unlink(missing_ok=True)
            self._partial.unlink()

    def close(self) -> None:
        """Lets go of `OUT.partial`."""
        self._file.close()

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self) -> BinaryIO:
        try:
            for folder in (self._out.parent, self._errors.parent):
                folder.mkdir(parents=True, exist_ok=True)
            file = self._partial.open("a+b")
        except OSError as error:
            raise InputError(f"cannot write {self._partial}: {error.strerror}") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise InputError(f"{self._partial} is being written by another run; wait for it or stop it") from None
        return file

    def _load(self) -> int:
        """Takes what an earlier run kept; cuts off a line that it did not finish. Returns the file's size."""
        self._file.seek(0)
        sound_bytes = 0
        for line in self._file:
            record = _parse(line)
            if record is None:
                break
            index = self._jobs.find(record["id"])
            if index is not None and self._jobs.key(index, self._model_digest) == record["key"]:
                if not record["failed"]:
                    self._take(index, sound_bytes, False)
                elif not self._retry_failed and index not in self:
                    self._take(index, sound_bytes, True)
            sound_bytes += len(line)
        self._file.truncate(sound_bytes)
        return sound_bytes

    def _take(self, index: int, place: int, failed: bool) -> None:
        self._places[index] = place
        self._failed[index] = failed

    def _records(self) -> Iterator[dict[str, Any]]:
        places = (place for place in self._places if place != _NONE)
        for place in places if self._ordered else sorted(places):
            self._file.seek(place)
            record = _parse(self._file.readline())
            assert record is not None  # only sound lines have a place
            yield record


def errors_path(out: Path) -> Path:
    """The file of errors beside `out`: answers.jsonl has answers.errors.jsonl."""
    return out.with_name(f"{out.stem}.errors{out.suffix or '.jsonl'}")


@contextlib.contextmanager
def _written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` at the end."""
    whole = path.with_name(f"{path.name}.tmp")
    with whole.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    whole.replace(path)


def _parse(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    with contextlib.suppress(ValueError):
        record = json.loads(line)
        if isinstance(record, dict) and {"id", "key", "failed", "line"} <= set(record):
            return record
    return None


def _encoded(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"
