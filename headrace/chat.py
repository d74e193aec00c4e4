"""What a chat may hold beside roles and texts: tools, calls of them, documents, and variables of the template."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
"""One turn: {"role": …, "content": …}.

An assistant's turn may have "tool_calls", a list of {"name": …, "arguments": {…}, "id": …} (the id may be left out);
then it needs no content. A turn of the role "tool" may have a "tool_call_id" and a "name".
"""
Tool = Mapping[str, Any]
"""{"name": …, "description": …, "parameters": JSON schema}; all but the name may be left out."""
Document = Mapping[str, str]
"""Parts by name, in the template's own words: usually "title" and "text"."""
Variables = Mapping[str, bool | int | float | str]

MOST_TOOLS = 128
MOST_DOCUMENTS = 1024
MOST_VARIABLES = 32
_VARIABLE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_INTEGERS = range(-(2**63), 2**63)


def is_text(value: Any) -> bool:
    """Text that can travel: a lone surrogate, which JSON can smuggle in, has no UTF-8 form."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def is_message(value: Any) -> bool:
    """One turn of a conversation."""
    if not isinstance(value, Mapping) or not is_text(value.get("role")):
        return False
    calls, role = value.get("tool_calls", ()), value["role"]
    allowed = {"role", "content"} | ({"tool_call_id", "name"} if role == "tool" else set())
    if "tool_calls" in value and role == "assistant" and is_list(calls) and all(map(is_tool_call, calls)):
        allowed.add("tool_calls")
    content = value.get("content")
    said = is_text(content) or (content is None and len(calls) > 0)
    return set(value) <= allowed and said and all(is_text(value.get(name, "")) for name in ("tool_call_id", "name"))


def is_tool(value: Any) -> bool:
    """A tool, plain or as OpenAI wraps it."""
    tool = _unwrapped(value)
    return (
        isinstance(tool, Mapping)
        and set(tool) <= {"name", "description", "parameters"}
        and _is_name(tool.get("name"))
        and is_text(tool.get("description", ""))
        and _is_json_object(tool.get("parameters", {}))
    )


def is_tool_call(value: Any) -> bool:
    """A call of a tool, plain or as OpenAI wraps it; there, arguments may be the text of a JSON object."""
    call = _unwrapped(value)
    return (
        isinstance(call, Mapping)
        and set(call) <= {"name", "arguments", "id"}
        and _is_name(call.get("name"))
        and is_text(value.get("id", ""))
        and _is_json_object(_parsed(call.get("arguments", {})))
    )


def is_documents(value: Any) -> bool:
    """A list of documents, none of them empty."""
    return (
        is_list(value)
        and len(value) <= MOST_DOCUMENTS
        and all(
            isinstance(document, Mapping) and document and all(map(is_text, [*document, *document.values()]))
            for document in value
        )
    )


def is_variables(value: Any) -> bool:
    """Variables of a template by name."""
    return (
        isinstance(value, Mapping)
        and len(value) <= MOST_VARIABLES
        and all(isinstance(name, str) and _VARIABLE_NAME.fullmatch(name) for name in value)
        and all(map(_is_variable, value.values()))
    )


def is_tools(value: Any) -> bool:
    """A list of tools."""
    return is_list(value) and len(value) <= MOST_TOOLS and all(map(is_tool, value))


def tool_texts(tool: Tool) -> dict[str, str]:
    """A tool's fields as they travel."""
    plain = _unwrapped(tool)
    fields = {"name": plain["name"], "description": plain.get("description", "")}
    return fields | ({"parameters_json": _json(plain["parameters"])} if "parameters" in plain else {})


def tool_call_texts(call: Mapping[str, Any]) -> dict[str, str]:
    """A call's fields as they travel."""
    plain = _unwrapped(call)
    return {
        "id": call.get("id", ""),
        "name": plain["name"],
        "arguments_json": _json(_parsed(plain.get("arguments", {}))),
    }


def is_list(value: Any) -> bool:
    """A sequence that is no text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _unwrapped(value: Any) -> Any:
    """What OpenAI wraps as {"type": "function", "function": …}."""
    if not isinstance(value, Mapping) or "function" not in value:
        return value
    inner, kind = value["function"], value.get("type", "function")
    known = set(value) <= {"id", "type", "function"} and kind == "function"
    return inner if known and isinstance(inner, Mapping) and "id" not in inner else None


def _parsed(arguments: Any) -> Any:
    """Arguments that were given as text, as OpenAI does."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return None


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _is_json_object(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    try:
        return is_text(_json(value))
    except (TypeError, ValueError, RecursionError):
        return False


def _is_name(value: Any) -> bool:
    return is_text(value) and value != ""


def _is_variable(value: Any) -> bool:
    if isinstance(value, bool):
        return True
    return value in _INTEGERS if isinstance(value, int) else is_text(value) or _is_finite(value)


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)
