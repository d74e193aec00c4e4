"""The batch's input: one JSON object per line, all of them checked before any work starts.

A file is read twice: once to check it, when only an index is kept (`INDEX_BYTES` a line, whatever a line's length), and
again, line by line, as the work goes on. So memory does not follow the size of the file.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from headrace.errors import InputError, InvalidRequest
from headrace.job_line import DIGEST_BYTES, Job, job_key, parse_job

INDEX_BYTES = 40
"""Memory of the index per line, rounded up."""
LONGEST_LINE_BYTES = 64 << 20
"""Far more than a request that can travel takes, however it is escaped."""
_SHOWN_FAULTS = 20


class JobFile:
    """A file whose lines are all sound."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets = array("Q")
        self._numbers = array("I")
        self._ids = array("Q")
        """64 bits of each id's hash: two of a million ids share one with a chance of 1 in 40 million, and are then
        refused as if they were equal."""
        self._digests = array("Q")
        self._by_id = np.empty(0, np.uint32)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Job:
        """Reads a job.

        Raises:
            InputError: the line is no longer what was checked.
        """
        job = None
        try:
            with self._path.open("rb") as file:
                file.seek(self._offsets[index])
                line = file.readline(LONGEST_LINE_BYTES)
        except OSError as error:
            raise InputError(f"cannot read {self._path} any more: {error.strerror}") from None
        with contextlib.suppress(InputError, InvalidRequest):
            job = parse_job(line)
        if job is None or job.digest != self._digest(index):
            raise InputError(f"line {self._numbers[index]} of {self._path} changed while the batch ran; run it again")
        return job

    def __iter__(self) -> Iterator[Job]:
        return (self[index] for index in range(len(self)))

    def find(self, job_id: str) -> int | None:
        """The index of the job with that id."""
        wanted = _id_hash(job_id)
        place = bisect.bisect_left(self._by_id, wanted, key=self._ids.__getitem__)
        if place < len(self) and self._ids[index := int(self._by_id[place])] == wanted:
            return index
        return None

    def key(self, index: int, model_digest: str) -> str:
        """What `self[index].key(model_digest)` is, without reading."""
        return job_key(self._digest(index), model_digest)

    def _digest(self, index: int) -> bytes:
        return self._digests[index].to_bytes(DIGEST_BYTES, "big")

    def _add(self, job: Job, offset: int, number: int) -> None:
        self._offsets.append(offset)
        self._numbers.append(number)
        self._ids.append(_id_hash(job.id))
        self._digests.append(int.from_bytes(job.digest, "big"))

    def _sort(self) -> Iterator[tuple[int, int]]:
        """Makes ids findable; yields for each index whose id is taken that index and the first that took it."""
        if not self._ids:
            return
        ids = np.frombuffer(self._ids, np.uint64)
        self._by_id = np.argsort(ids, kind="stable").astype(np.uint32)
        repeats = np.flatnonzero(ids[self._by_id[1:]] == ids[self._by_id[:-1]]) + 1
        for place in repeats[np.argsort(self._by_id[repeats])]:
            index = int(self._by_id[place])
            first = bisect.bisect_left(self._by_id, self._ids[index], key=self._ids.__getitem__)
            yield index, int(self._by_id[first])


def read_jobs(path: Path) -> JobFile:
    """Reads and checks a whole file. Empty lines are skipped.

    Raises:
        InputError: the file cannot be read, has no jobs, or has faulty lines; the message names lines and faults.
    """
    jobs = JobFile(path)
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is no regular file, and a batch is read twice; save it to one first")
        with path.open("rb") as file:
            _check(jobs, path, file)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    return jobs


def _check(jobs: JobFile, path: Path, file: BinaryIO) -> None:
    faults, shown = 0, list[tuple[int, str]]()
    for number, offset, line in _lines(file):
        try:
            jobs._add(_sound(line), offset, number)
        except (InputError, InvalidRequest) as error:
            faults += 1
            if len(shown) < _SHOWN_FAULTS:
                shown.append((number, str(error)))
    for repeats, (index, first) in enumerate(jobs._sort()):
        faults += 1
        if repeats < _SHOWN_FAULTS:
            taken = f"id {jobs[index].id!r} is taken by line {jobs._numbers[first]}; make ids unique"
            shown.append((jobs._numbers[index], taken))
    if faults:
        told = [f"line {number}: {fault}" for number, fault in sorted(shown)[:_SHOWN_FAULTS]]
        more = [f"and {faults - len(told)} more"] if faults > len(told) else []
        raise InputError("\n  ".join([f"{path} has {faults} faulty line(s):", *told, *more]))
    if not len(jobs):
        raise InputError(f'{path} has no jobs; write one JSON object per line, as in {{"id": "1", "prompt": "…"}}')


def _sound(line: bytes | None) -> Job:
    if line is None:
        raise InputError(f"longer than {LONGEST_LINE_BYTES >> 20} MiB, which no request is")
    return parse_job(line)


def _lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes | None]]:
    """Number, offset and content of each line that is not empty; None in place of a line that is too long to hold."""
    number = offset = 0
    while line := file.readline(LONGEST_LINE_BYTES):
        number, start, whole = number + 1, offset, True
        offset += len(line)
        while len(line) == LONGEST_LINE_BYTES and not line.endswith(b"\n"):
            line, whole = file.readline(LONGEST_LINE_BYTES), False
            offset += len(line)
        if not whole or line.strip():
            yield number, start, line if whole else None


def _id_hash(job_id: str) -> int:
    """A lone surrogate, which JSON can smuggle in, is refused by the request; here it must only not fail."""
    digest = hashlib.blake2b(job_id.encode(errors="surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "big")
