"""Lines of OpenAI's batch files: what each parameter becomes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import InputError, InvalidRequest
from headrace.job_input import read_jobs
from headrace.job_line import Job, parse_job

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TURN = {"role": "user", "content": "Hi"}


def line(url: str, body: Any, **changes: Any) -> bytes:
    whole = {"custom_id": "a", "method": "POST", "url": url, "body": body} | changes
    return json.dumps({name: value for name, value in whole.items() if value is not None}).encode()


def test_every_chat_parameter_becomes_a_field_of_the_request() -> None:
    body = {
        "model": "any",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}],
        "max_completion_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "stop": ["x"],
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "logit_bias": {"9": 2},
        "logprobs": True,
        "top_logprobs": 3,
        "min_p": 0.1,
        "user": "u-1",
        "n": 1,
        "stream": False,
        "response_format": {"type": "text"},
        "tools": None,
    }
    expected = {
        "messages": [TURN],
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "stop": ["x"],
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "logit_bias": {9: 2},
        "logprobs": True,
        "top_logprobs": 3,
        "min_p": 0.1,
    }
    assert parse_job(line(CHAT, body)) == Job("a", expected, CHAT, "any")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"prompt": "x"}, {"prompt": "x", "temperature": 1.0, "max_tokens": 16}),
        ({"prompt": ["x"], "temperature": 0}, {"prompt": "x", "temperature": 0, "max_tokens": 16}),
        ({"prompt": [1, 2], "max_tokens": 3}, {"token_ids": [1, 2], "temperature": 1.0, "max_tokens": 3}),
        ({"prompt": [[1, 2]], "logprobs": 0}, {"token_ids": [1, 2], "logprobs": True, "top_logprobs": 0}),
    ],
)
def test_completions_take_text_or_tokens_and_openais_defaults(body: dict[str, Any], expected: dict[str, Any]) -> None:
    found = parse_job(line(COMPLETIONS, body))
    assert found == Job("a", {"temperature": 1.0, "max_tokens": 16} | expected, COMPLETIONS)


@pytest.mark.parametrize(
    ("url", "body", "says"),
    [
        (CHAT, {"messages": [TURN], "max_new_tokens": 3}, "body.max_new_tokens is unknown for /v1/chat/completions"),
        (CHAT, {"messages": [TURN], "prompt": "x"}, "body.prompt is unknown"),
        (COMPLETIONS, {"prompt": "x", "top_logprobs": 1}, "body.top_logprobs is unknown for /v1/completions"),
        (CHAT, {"messages": [TURN], "n": 2}, "body.n is offered as 1 only"),
        (CHAT, {"messages": [TURN], "n": True}, "body.n is offered as 1 only"),
        (CHAT, {"messages": [TURN], "stream": True}, "body.stream is offered as False only"),
        (CHAT, {"messages": [TURN], "tools": [{}]}, "body.tools is offered"),
        (CHAT, {"messages": [TURN], "max_tokens": 1, "max_completion_tokens": 1}, "keep one of them"),
        (CHAT, {"messages": [TURN], "max_completion_tokens": 0}, "max_tokens must be an integer, 1 or more"),
        (CHAT, {"messages": "x"}, "body.messages must be a list"),
        (CHAT, {"messages": [TURN | {"tool_calls": []}]}, r"body.messages\[0\].tool_calls is unknown"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, r"content\[0\] .*'image_url'"),
        (CHAT, {"messages": [TURN], "model": 3}, "body.model must be text"),
        (CHAT, {}, "exactly one of prompt, messages and token_ids"),
        (COMPLETIONS, {"prompt": ["x", "y"]}, "body.prompt has 2 prompts"),
        (COMPLETIONS, {"prompt": "x", "best_of": 3}, "body.best_of is offered as 1 only"),
        (CHAT, None, "body must be a JSON object"),
        ("/v1/embeddings", {}, "url must be one of /v1/chat/completions, /v1/completions; found '/v1/embeddings'"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(url: str, body: Any, says: str) -> None:
    with pytest.raises((InputError, InvalidRequest), match=says):
        parse_job(line(url, body))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"method": "GET"}, "method must be"),
        ({"custom_id": 3}, 'needs an "custom_id"'),
        ({"custom_id": "x" * 129}, "custom_id must be text of at most 128"),
        ({"id": "b"}, "unknown field 'id'; an OpenAI line has"),
    ],
)
def test_the_frame_of_a_line_is_checked_too(changes: dict[str, Any], says: str) -> None:
    with pytest.raises((InputError, InvalidRequest), match=says):
        parse_job(line(CHAT, {"messages": [TURN]}, **changes))


def test_a_refusal_names_the_line_and_a_line_without_its_name_is_told_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    faulty = line(CHAT, {"messages": [TURN], "functions": []}, custom_id="b")
    nameless = line(CHAT, {"messages": [TURN]}, custom_id=None)
    path.write_bytes(b"\n".join([line(CHAT, {"messages": [TURN]}), faulty, nameless]))
    with pytest.raises(InputError, match=r"line 2: body.functions is unknown(.|\n)*line 3: .*custom_id"):
        read_jobs(path)
