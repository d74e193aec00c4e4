"""Tools, documents and variables reach a template as transformers gives them, and are never lost without a word."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from decode_service.text.conversation import Extras, Message, Tool, ToolCall
from decode_service.text.tokenizer import Tokenizer
from shared.errors import InvalidRequestError
from tests.models import BOS, CHAT_TEMPLATE, EOS, tiny_tokenizer

TEMPLATE = """
{%- if tools %}tools:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
{% endif %}
{%- for document in documents or [] %}{{ document['title'] }} says {{ document['text'] }}
{% endfor %}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function %} calls {{ function.name }} {{ function.arguments | tojson }} {{ call.id }}
{%- endfor %}
{%- if message.tool_call_id is defined %} answers {{ message.tool_call_id }} of {{ message.name }}{% endif %}
{% endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}no thinking{% endif %}
{{ budget | default(0) }} {{ style | default('plain') }} {{ bos_token }}"""

SCHEMA = {"type": "object", "properties": {"pump": {"type": "integer", "description": "its <number> & é"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "read_gauge", "arguments": {"pump": 7, "unit": None}}}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer(300).to_str(), TEMPLATE, {"bos_token": BOS, "eos_token": EOS})


def by_transformers(messages: list[dict[str, Any]], **given: Any) -> str:
    library = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer(300), bos_token=BOS, eos_token=EOS)
    library.chat_template = TEMPLATE
    return str(library.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **given))


def test_tools_documents_and_variables_are_rendered_as_by_transformers(tokenizer: Tokenizer) -> None:
    ours = tokenizer.render_chat(
        [Message("user", "How hot?")],
        Extras(
            tools=(Tool("read_gauge", "Reads a gauge.", SCHEMA), Tool("stop")),
            documents=({"title": "Report", "text": "It leaks."},),
            variables={"enable_thinking": False, "budget": 512, "style": "brief"},
        ),
    )
    gauge = {
        "type": "function",
        "function": {"name": "read_gauge", "description": "Reads a gauge.", "parameters": SCHEMA},
    }
    theirs = by_transformers(
        [{"role": "user", "content": "How hot?"}],
        tools=[gauge, {"type": "function", "function": {"name": "stop"}}],
        documents=[{"title": "Report", "text": "It leaks."}],
        enable_thinking=False,
        budget=512,
        style="brief",
    )
    assert ours == theirs
    assert "no thinking" in ours


def test_calls_and_their_results_are_rendered_as_by_transformers(tokenizer: Tokenizer) -> None:
    ours = [
        Message("user", "How hot?"),
        Message("assistant", "", (ToolCall("read_gauge", {"pump": 7, "unit": None}, "c1"),)),
        Message("tool", "71 degrees", tool_call_id="c1", name="read_gauge"),
    ]
    theirs = [
        {"role": "user", "content": "How hot?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "71 degrees", "tool_call_id": "c1", "name": "read_gauge"},
    ]
    assert tokenizer.render_chat(ours) == by_transformers(theirs)
    assert 'calls read_gauge {"pump": 7, "unit": null} c1' in tokenizer.render_chat(ours)


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        (Extras(tools=(Tool("stop"),)), r"prompt\.chat\.tools is given, but .* it reads nothing else"),
        (Extras(documents=({"text": "a"},)), r"prompt\.chat\.documents is given"),
        (Extras(variables={"enable_thinkng": True}), r"template_variables\['enable_thinkng'\] is given"),
    ],
)
def test_what_the_template_does_not_read_is_refused(extras: Extras, message: str) -> None:
    plain = Tokenizer(tiny_tokenizer(300).to_str(), CHAT_TEMPLATE, {"bos_token": BOS, "eos_token": EOS})
    with pytest.raises(InvalidRequestError, match=message):
        plain.render_chat([Message("user", "hi")], extras)


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "bos_token"])
def test_what_the_template_is_given_anyway_cannot_be_replaced(name: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="it reads budget, documents, enable_thinking, style, tools"):
        tokenizer.render_chat([Message("user", "hi")], Extras(variables={name: "x"}))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tool(""), "no name"),
        (lambda: ToolCall(""), "no name"),
        (lambda: Extras(tools=(Tool("t"),) * 129), "tools has 129 entries; at most 128"),
        (lambda: Extras(documents=({},) * 1025), "documents has 1025"),
        (lambda: Extras(variables={f"v{number}": 1 for number in range(33)}), "template_variables has 33"),
        (lambda: Extras(variables={"_private": 1}), "names '_private'"),
        (lambda: Extras(variables={"a" * 65: 1}), "up to 64 letters"),
        (lambda: Extras(variables={"x": float("inf")}), "must be finite"),
    ],
)
def test_what_no_template_takes_is_refused(make: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        make()
