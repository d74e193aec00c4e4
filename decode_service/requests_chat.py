"""From a chat prompt's message to what the model's template is given. Errors name the field as the protos do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from decode_service.text.conversation import Extras, Message, Tool, ToolCall, Variable
from headrace.v1 import decode_pb2
from shared.errors import InvalidRequestError


def chat_messages(chat: decode_pb2.ChatPrompt) -> list[Message]:
    """The conversation.

    Raises:
        InvalidRequestError: a tool call has no name, or arguments that are no JSON object.
    """
    return [
        Message(turn.role, turn.content, tuple(map(_tool_call, turn.tool_calls)), turn.tool_call_id, turn.name)
        for turn in chat.messages
    ]


def chat_extras(chat: decode_pb2.ChatPrompt) -> Extras:
    """Tools, documents and variables.

    Raises:
        InvalidRequestError: one of them can never be given to a template.
    """
    return Extras(
        tools=tuple(map(_tool, chat.tools)),
        documents=tuple(dict(document.fields) for document in chat.documents),
        variables={name: _variable(name, value) for name, value in chat.template_variables.items()},
    )


def _tool(tool: decode_pb2.ToolDefinition) -> Tool:
    where = "prompt.chat.tools parameters_json"
    parameters = _json_object(where, tool.parameters_json) if tool.parameters_json else None
    return Tool(tool.name, tool.description, parameters)


def _tool_call(call: decode_pb2.ToolCall) -> ToolCall:
    where = "prompt.chat.messages tool_calls arguments_json"
    return ToolCall(call.name, _json_object(where, call.arguments_json) if call.arguments_json else {}, call.id)


def _variable(name: str, value: decode_pb2.TemplateValue) -> Variable:
    kind = value.WhichOneof("value")
    if kind is None:
        raise InvalidRequestError(
            f"prompt.chat.template_variables[{name[:64]!r}] is empty; set flag, integer, number or text"
        )
    found: Variable = getattr(value, kind)
    return found


def _json_object(where: str, text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text, parse_constant=_not_json)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{where} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{where} must be a JSON object; found {type(value).__name__}")
    return value


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")
