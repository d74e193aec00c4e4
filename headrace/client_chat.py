"""A chat as the message that travels."""

from __future__ import annotations

from headrace.chat import Message, tool_call_texts, tool_texts
from headrace.request import Request
from headrace.v1 import decode_pb2


def chat_prompt(request: Request) -> decode_pb2.ChatPrompt:
    """Messages, tools, documents and variables of a request whose prompt is a chat."""
    return decode_pb2.ChatPrompt(
        messages=[_message(turn) for turn in request.messages or ()],
        tools=[decode_pb2.ToolDefinition(**tool_texts(tool)) for tool in request.tools],
        documents=[decode_pb2.ChatDocument(fields=document) for document in request.documents],
        template_variables={name: _variable(value) for name, value in request.template_variables.items()},
    )


def _message(turn: Message) -> decode_pb2.ChatMessage:
    return decode_pb2.ChatMessage(
        role=turn["role"],
        content=turn.get("content") or "",
        tool_calls=[decode_pb2.ToolCall(**tool_call_texts(call)) for call in turn.get("tool_calls", ())],
        tool_call_id=turn.get("tool_call_id", ""),
        name=turn.get("name", ""),
    )


def _variable(value: bool | int | float | str) -> decode_pb2.TemplateValue:
    if isinstance(value, bool):
        return decode_pb2.TemplateValue(flag=value)
    if isinstance(value, int):
        return decode_pb2.TemplateValue(integer=value)
    return decode_pb2.TemplateValue(text=value) if isinstance(value, str) else decode_pb2.TemplateValue(number=value)
