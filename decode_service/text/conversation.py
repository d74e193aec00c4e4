"""What a chat template is given: messages, tools, documents, and variables of the model's own. Plain Python."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.errors import InvalidRequestError

MOST_TOOLS = 128
MOST_DOCUMENTS = 1024
MOST_VARIABLES = 32
VARIABLE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")

JsonObject = Mapping[str, Any]
Variable = bool | int | float | str


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool that the assistant made."""

    name: str
    arguments: JsonObject = field(default_factory=dict)
    id: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidRequestError("a tool call in prompt.chat.messages has no name; name the tool that was called")

    def for_template(self) -> dict[str, Any]:
        """As templates expect it."""
        call = {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        return {"id": self.id, **call} if self.id else call


@dataclass(frozen=True)
class Message:
    """One turn of a conversation; `role` in the template's own words."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    def for_template(self) -> dict[str, Any]:
        """As templates expect it: without what is not there."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message | {name: getattr(self, name) for name in ("tool_call_id", "name") if getattr(self, name)}


@dataclass(frozen=True)
class Tool:
    """A tool that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str = ""
    parameters: JsonObject | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidRequestError("a tool in prompt.chat.tools has no name; name it")

    def for_template(self) -> dict[str, Any]:
        """As templates expect it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Extras:
    """What a template may be given beside messages.

    Raises:
        InvalidRequestError: there is too much of it, or a name or number that no template takes.
    """

    tools: tuple[Tool, ...] = ()
    documents: tuple[Mapping[str, str], ...] = ()
    variables: Mapping[str, Variable] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, most in (("tools", MOST_TOOLS), ("documents", MOST_DOCUMENTS), ("variables", MOST_VARIABLES)):
            if (count := len(getattr(self, name))) > most:
                field_name = "template_variables" if name == "variables" else name
                raise InvalidRequestError(f"prompt.chat.{field_name} has {count} entries; at most {most} are allowed")
        for name, value in self.variables.items():
            if not VARIABLE_NAME.fullmatch(name):
                raise InvalidRequestError(
                    f"prompt.chat.template_variables names {name[:64]!r}; a name has up to 64 letters, digits and _, "
                    "and begins with a letter"
                )
            if isinstance(value, float) and not math.isfinite(value):
                raise InvalidRequestError(f"prompt.chat.template_variables[{name!r}] is {value}; it must be finite")

    @property
    def given(self) -> dict[str, Any]:
        """What is there, under the names that templates read."""
        lists = {
            "tools": [tool.for_template() for tool in self.tools],
            "documents": [dict(document) for document in self.documents],
        }
        return {name: value for name, value in lists.items() if value} | dict(self.variables)
