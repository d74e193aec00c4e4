"""One line of a batch's input as a job: Headrace's simple form, or a line of OpenAI's batch files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headrace.errors import InputError, InvalidRequest
from headrace.openai_body import ENDPOINTS, openai_options
from headrace.request import Request

Form = Literal["simple", "/v1/chat/completions", "/v1/completions"]
"""How a line was written, and so how its answer is."""

DIGEST_BYTES = 8
_PARAMETERS = tuple(field.name for field in dataclasses.fields(Request) if field.name != "request_id")
_OPENAI_FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True)
class Job:
    """One line of the input."""

    id: str
    """At most 128 characters; no other line has it. OpenAI's `custom_id`."""
    options: Mapping[str, Any]
    """What `AsyncClient.generate` takes."""
    form: Form = "simple"
    model: str = ""
    """What an OpenAI line calls the model: repeated in its answer, and nothing more."""

    @property
    def digest(self) -> bytes:
        """Tells lines apart by what they say, however it is written."""
        text = json.dumps([self.id, self.options, self.form, self.model], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()

    def key(self, model_digest: str) -> str:
        """Identifies request and model, so that an answer is reused only for what it answers."""
        return job_key(self.digest, model_digest)


def job_key(digest: bytes, model_digest: str) -> str:
    """The key of the job with that digest."""
    return hashlib.sha256(model_digest.encode() + digest).hexdigest()[:32]


def parse_job(line: bytes) -> Job:
    """One line as a job. A line with a `custom_id` is OpenAI's, any other the simple form.

    Raises:
        InputError: it is not a JSON object with an id and known fields.
        InvalidRequest: a field has a wrong type or value.
    """
    value = _parse_object(line)
    job = _openai_job(value) if "custom_id" in value else _simple_job(value)
    Request(**job.options, request_id=job.id)
    return job


def _parse_object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise InputError("not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"expected a JSON object, found {type(value).__name__}")
    return value


def _simple_job(value: dict[str, Any]) -> Job:
    if unknown := sorted(set(value) - {"id", *_PARAMETERS}):
        hint = "; an OpenAI line names itself with custom_id" if unknown[0] in _OPENAI_FIELDS else ""
        raise InputError(f"unknown field {unknown[0]!r}; known are id, {', '.join(_PARAMETERS)}{hint}")
    job_id = _taken_id(value, "id")
    if isinstance(bias := value.get("logit_bias"), dict):
        value["logit_bias"] = numbered(bias)
    return Job(job_id, value)


def _openai_job(value: dict[str, Any]) -> Job:
    if unknown := sorted(set(value) - set(_OPENAI_FIELDS)):
        raise InputError(f"unknown field {unknown[0]!r}; an OpenAI line has {', '.join(_OPENAI_FIELDS)}")
    job_id = _taken_id(value, "custom_id")
    if (method := value.get("method")) != "POST":
        raise InputError(f'method must be "POST"; found {method!r}')
    if (url := value.get("url")) not in ENDPOINTS:
        raise InputError(f"url must be one of {', '.join(ENDPOINTS)}; found {url!r}")
    body = value.get("body")
    if not isinstance(body, dict):
        raise InputError(f"body must be a JSON object; found {type(body).__name__}")
    options, model = openai_options(url, body)
    if isinstance(bias := options.get("logit_bias"), dict):
        options["logit_bias"] = numbered(bias)
    return Job(job_id, options, url, model)


def _taken_id(value: dict[str, Any], name: str) -> str:
    job_id = value.pop(name, None)
    if not isinstance(job_id, str) or not job_id:
        raise InputError(f'every line needs an "{name}": text that is not empty')
    if len(job_id) > 128:
        raise InvalidRequest(f"{name} must be text of at most 128 characters; found {len(job_id)}")
    return job_id


def numbered(bias: Mapping[str, Any]) -> dict[int | str, Any]:
    """A logit bias whose token ids name fields, as JSON wants it; other names are left for the request to refuse."""
    return {
        int(name) if len(name) <= 10 and name.isdecimal() and str(int(name)) == name else name: number
        for name, number in bias.items()
    }
