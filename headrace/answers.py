"""The batch's output: answers kept as they come, and published as one whole file.

`OUT.partial` gets each answer the moment it is finished; `OUT` appears at the end, complete and in the input's order.
A run that was interrupted continues from `OUT.partial`: answers are kept, errors are tried again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from headrace.errors import InputError

Answer = dict[str, Any]
"""What one line of the output says: id, text, finish_reason, usage, timings, and logprobs where the job asks for them;
or id and error."""


class Answers:
    """The answers of one batch, in memory and in `OUT.partial`, which is locked while this is open."""

    def __init__(self, out: Path, keys: Mapping[str, str]) -> None:
        """
        Args:
            out: the file to publish; beside it lies the partial one.
            keys: id -> key of every job. A kept answer counts only with the same key: a job that was edited, or that
                another model answered, is done again.

        Raises:
            InputError: the folder cannot be written, or another run is writing the same file.
        """
        self._out = out
        self._partial = out.with_name(f"{out.name}.partial")
        self._keys = keys
        self._by_id: dict[str, Answer] = {}
        self._file = self._open()
        self._load()

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._by_id

    def __iter__(self) -> Iterator[Answer]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def append(self, answer: Answer) -> None:
        """Keeps a finished answer: when this returns, the death of the process does not lose it."""
        self._by_id[answer["id"]] = answer
        record = {**answer, "key": self._keys[answer["id"]]}
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()

    def publish(self) -> None:
        """Writes `OUT` at once and whole, in the order of the jobs. Keeps `OUT.partial` only where errors are left, so
        that running again tries those alone."""
        whole = self._out.with_name(f"{self._out.name}.tmp")
        with whole.open("wb") as file:
            file.writelines(_lines(self._by_id[job_id] for job_id in self._keys))
            file.flush()
            os.fsync(file.fileno())
        whole.replace(self._out)
        if not any("error" in answer for answer in self):
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
            self._out.parent.mkdir(parents=True, exist_ok=True)
            file = self._partial.open("a+b")
        except OSError as error:
            raise InputError(f"cannot write {self._partial}: {error.strerror}") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise InputError(f"{self._partial} is being written by another run; wait for it or stop it") from None
        return file

    def _load(self) -> None:
        """Takes what an earlier run kept; cuts off a line that it did not finish."""
        self._file.seek(0)
        sound_bytes = 0
        for line in self._file:
            record = _parse(line)
            if record is None:
                break
            sound_bytes += len(line)
            key = record.pop("key")
            if "error" not in record and self._keys.get(record["id"]) == key:
                self._by_id[record["id"]] = record
        self._file.truncate(sound_bytes)


def _parse(line: bytes) -> Answer | None:
    if not line.endswith(b"\n"):
        return None
    with contextlib.suppress(ValueError):
        record = json.loads(line)
        if isinstance(record, dict) and {"id", "key"} <= set(record):
            return record
    return None


def _lines(answers: Iterable[Answer]) -> Iterator[bytes]:
    return (json.dumps(answer, ensure_ascii=False).encode() + b"\n" for answer in answers)
