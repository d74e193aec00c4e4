"""A chat travels from the client's request to what the template is given without loss, and hostile ones are refused."""

from __future__ import annotations

from typing import Any

import pytest

from decode_service.requests_chat import chat_extras, chat_messages
from decode_service.text.conversation import Extras, Message, Tool, ToolCall
from headrace.client_chat import chat_prompt
from headrace.errors import InvalidRequest
from headrace.request import Request
from headrace.v1 import decode_pb2
from shared.errors import InvalidRequestError

SCHEMA = {"type": "object", "properties": {"pump": {"type": "integer"}}}
USER = {"role": "user", "content": "How hot?"}


def test_a_chat_arrives_as_it_was_sent() -> None:
    request = Request(
        messages=[
            USER,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"name": "read", "arguments": {"pump": 7}, "id": "c"}],
            },
            {"role": "tool", "content": "71", "tool_call_id": "c", "name": "read"},
        ],
        tools=[{"name": "read", "description": "Reads.", "parameters": SCHEMA}, {"name": "stop"}],
        documents=[{"title": "Report", "text": "It leaks."}],
        template_variables={"enable_thinking": False, "budget": 2**40, "share": 0.5, "style": "brief"},
    )
    message = decode_pb2.ChatPrompt.FromString(chat_prompt(request).SerializeToString())
    assert chat_messages(message) == [
        Message("user", "How hot?"),
        Message("assistant", "", (ToolCall("read", {"pump": 7}, "c"),)),
        Message("tool", "71", tool_call_id="c", name="read"),
    ]
    assert chat_extras(message) == Extras(
        (Tool("read", "Reads.", SCHEMA), Tool("stop")),
        ({"title": "Report", "text": "It leaks."},),
        {"enable_thinking": False, "budget": 2**40, "share": 0.5, "style": "brief"},
    )


def test_what_openai_wraps_is_taken_too() -> None:
    function = {"name": "read", "parameters": SCHEMA}
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": '{"pump": 7}'}}
    request = Request(
        messages=[USER, {"role": "assistant", "content": "", "tool_calls": [call]}],
        tools=[{"type": "function", "function": function}],
    )
    message = chat_prompt(request)
    assert chat_messages(message)[1].tool_calls == (ToolCall("read", {"pump": 7}, "c"),)
    assert chat_extras(message).tools == (Tool("read", "", SCHEMA),)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": "a", "tools": [{"name": "t"}]}, "tools go with messages"),
        ({"prompt": "a", "template_variables": {"a": 1}}, "template_variables go with messages"),
        ({"messages": [USER], "tools": [{"description": "x"}]}, "tools must be"),
        ({"messages": [USER], "tools": [{"name": "t", "parameters": [1]}]}, "tools must be"),
        ({"messages": [USER], "tools": [{"name": "t", "parameters": {"a": float("nan")}}]}, "tools must be"),
        ({"messages": [USER], "tools": [{"name": "t", "parameters": {"a": {1, 2}}}]}, "tools must be"),
        ({"messages": [USER], "tools": [{"type": "retrieval", "function": {"name": "t"}}]}, "tools must be"),
        ({"messages": [USER], "tools": {"name": "t"}}, "tools must be"),
        ({"messages": [USER], "documents": ["text"]}, "documents must be"),
        ({"messages": [USER], "documents": [{}]}, "documents must be"),
        ({"messages": [USER], "documents": [{"text": 3}]}, "documents must be"),
        ({"messages": [USER], "template_variables": {"a": [1]}}, "template_variables must be"),
        ({"messages": [USER], "template_variables": {"a": None}}, "template_variables must be"),
        ({"messages": [USER], "template_variables": {"a b": 1}}, "template_variables must be"),
        ({"messages": [USER], "template_variables": {"a": 2**63}}, "template_variables must be"),
        ({"messages": [USER], "template_variables": {"a": float("inf")}}, "template_variables must be"),
        ({"messages": [{**USER, "tool_calls": [{"name": "t"}]}]}, "messages must be"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages must be"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"arguments": {}}]}]}, "messages must be"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"name": "t", "arguments": "["}]}]},
            "messages must be",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_before_it_travels(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        Request(**fields)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("{", "parameters_json is no JSON"),
        ("[" * 100_000, "parameters_json is no JSON"),
        ("[1]", "must be a JSON object; found list"),
        ('{"a": NaN}', "NaN is no JSON number"),
    ],
)
def test_a_service_believes_no_client(parameters: str, message: str) -> None:
    chat = decode_pb2.ChatPrompt(tools=[decode_pb2.ToolDefinition(name="t", parameters_json=parameters)])
    with pytest.raises(InvalidRequestError, match=message):
        chat_extras(chat)
    calls = [decode_pb2.ToolCall(name="t", arguments_json=parameters)]
    with pytest.raises(InvalidRequestError, match=message.replace("parameters_json", "arguments_json")):
        chat_messages(decode_pb2.ChatPrompt(messages=[decode_pb2.ChatMessage(role="assistant", tool_calls=calls)]))


def test_a_variable_without_a_value_is_refused() -> None:
    chat = decode_pb2.ChatPrompt(template_variables={"thinking": decode_pb2.TemplateValue()})
    with pytest.raises(InvalidRequestError, match=r"template_variables\['thinking'\] is empty; set flag"):
        chat_extras(chat)
