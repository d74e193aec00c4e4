"""The batch's input: one JSON object per line, all of them checked before any work starts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import InputError, InvalidRequest
from headrace.request import Request

_PARAMETERS = tuple(field.name for field in dataclasses.fields(Request) if field.name != "request_id")
_SHOWN_FAULTS = 20


@dataclass(frozen=True)
class Job:
    """One line of the input."""

    id: str
    """At most 128 characters; no other line has it."""
    options: Mapping[str, Any]
    """What `AsyncClient.generate` takes."""

    def key(self, model_digest: str) -> str:
        """Identifies request and model, so that an answer is reused only for what it answers."""
        text = json.dumps([model_digest, self.id, self.options], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def read_jobs(path: Path) -> tuple[Job, ...]:
    """Reads and checks a whole file. Empty lines are skipped.

    Raises:
        InputError: the file cannot be read, has no jobs, or has faulty lines; the message names lines and faults.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    jobs: dict[str, Job] = {}
    line_of: dict[str, int] = {}
    faults: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            job = parse_job(line)
            if job.id in jobs:
                raise InputError(f"id {job.id!r} is taken by line {line_of[job.id]}; make ids unique")
        except (InputError, InvalidRequest) as error:
            faults.append(f"line {number}: {error}")
        else:
            jobs[job.id], line_of[job.id] = job, number
    if faults:
        more = [f"and {len(faults) - _SHOWN_FAULTS} more"] if len(faults) > _SHOWN_FAULTS else []
        raise InputError("\n  ".join([f"{path} has {len(faults)} faulty line(s):", *faults[:_SHOWN_FAULTS], *more]))
    if not jobs:
        raise InputError(f'{path} has no jobs; write one JSON object per line, as in {{"id": "1", "prompt": "…"}}')
    return tuple(jobs.values())


def parse_job(line: bytes) -> Job:
    """One line as a job.

    Raises:
        InputError: it is not a JSON object with an id and known fields.
        InvalidRequest: a field has a wrong type or value.
    """
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise InputError("not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"expected a JSON object, found {type(value).__name__}")
    if unknown := sorted(set(value) - {"id", *_PARAMETERS}):
        raise InputError(f"unknown field {unknown[0]!r}; known are id, {', '.join(_PARAMETERS)}")
    job_id = value.pop("id", None)
    if not isinstance(job_id, str) or not job_id:
        raise InputError('every line needs an "id": text that is not empty')
    if isinstance(bias := value.get("logit_bias"), dict):
        value["logit_bias"] = {_token_id(name): number for name, number in bias.items()}
    Request(**value, request_id=job_id)
    return Job(job_id, value)


def _token_id(name: str) -> int | str:
    """A token id that names a field, as JSON wants it; anything else is left for the request to refuse."""
    return int(name) if len(name) <= 10 and name.isdecimal() and str(int(name)) == name else name
