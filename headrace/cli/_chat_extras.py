"""What goes into a chat template beside messages, as `generate` takes it: files of JSON, and variables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.errors import InputError
from headrace.request import RequestOptions


def extras(tools: Path | None, documents: Path | None, variables: Sequence[str]) -> RequestOptions:
    """The fields of a request that were given; the request checks what they hold.

    Raises:
        InputError: a file cannot be read or is not JSON, or a variable is not NAME=JSON.
    """
    found: RequestOptions = {}
    if tools is not None:
        found["tools"] = _listed(tools, "--tools")
    if documents is not None:
        found["documents"] = _listed(documents, "--documents")
    if variables:
        found["template_variables"] = dict(map(_variable, variables))
    return found


def _listed(path: Path, option: str) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{option}: {path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # of JSON, or of UTF-8
        raise InputError(f"{option}: {path} is not JSON: {error}") from None
    if not isinstance(found, list) or not found:
        raise InputError(f"{option}: {path} must hold a JSON list that is not empty, as [{{…}}]")
    return found


def _variable(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    try:
        if name and equals:
            return name, json.loads(value)
    except ValueError:
        pass
    raise InputError(
        f'--template-variable {text!r} is not NAME=JSON; write true, 3 or "text" behind the =, as in '
        f"enable_thinking=false or '{name or 'tone'}=\"dry\"'"
    )
