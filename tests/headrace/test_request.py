"""What a request may say."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import InvalidRequest
from headrace.request import Request


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, "none of them"),
        ({"prompt": "a", "token_ids": [1]}, "prompt and token_ids"),
        ({"prompt": ""}, "prompt must be text that is not empty, in valid Unicode; found text of 0"),
        ({"prompt": "\ud800"}, "prompt must be text"),
        ({"prompt": 3}, "prompt must be text"),
        ({"messages": []}, "messages must be"),
        ({"messages": "hello"}, "messages must be"),
        ({"messages": [{"role": "user"}]}, "messages must be"),
        ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages must be"),
        ({"token_ids": []}, "token_ids must be"),
        ({"token_ids": [-1]}, "token_ids must be"),
        ({"token_ids": [True]}, "token_ids must be"),
        ({"token_ids": ["1"]}, "token_ids must be"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens must be an integer, 1 or more; found 0"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens must be"),
        ({"prompt": "a", "temperature": -0.1}, "temperature must be a number from 0 to 100; found -0.1"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature must be"),
        ({"prompt": "a", "temperature": "0.7"}, "temperature must be"),
        ({"prompt": "a", "top_k": -1}, "top_k must be"),
        ({"prompt": "a", "top_p": 0}, "top_p must be above 0"),
        ({"prompt": "a", "top_p": 1.01}, "top_p must be"),
        ({"prompt": "a", "min_p": 1.5}, "min_p must be a number from 0 to 1; found 1.5"),
        ({"prompt": "a", "repetition_penalty": 0.05}, "repetition_penalty must be a number from 0.1 to 10"),
        ({"prompt": "a", "presence_penalty": 2.5}, "presence_penalty must be a number from -2 to 2"),
        ({"prompt": "a", "frequency_penalty": None}, "frequency_penalty must be"),
        ({"prompt": "a", "logit_bias": {"7": 1.0}}, "logit_bias must be a map of at most 1024 token ids"),
        ({"prompt": "a", "logit_bias": {7: 101}}, "logit_bias must be"),
        ({"prompt": "a", "logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias must be"),
        ({"prompt": "a", "logit_bias": [7]}, "logit_bias must be"),
        ({"prompt": "a", "bad_token_ids": [-1]}, "bad_token_ids must be a list of at most 1024"),
        ({"prompt": "a", "bad_token_ids": range(1025)}, "bad_token_ids must be"),
        ({"prompt": "a", "ignore_eos": 1}, "ignore_eos must be true or false; found 1"),
        ({"prompt": "a", "min_tokens": -1}, "min_tokens must be an integer, 0 or more"),
        ({"prompt": "a", "logprobs": 5}, "logprobs must be true or false; found 5"),
        (
            {"prompt": "a", "logprobs": True, "top_logprobs": 21},
            "top_logprobs must be an integer from 0 to 20; found 21",
        ),
        ({"prompt": "a", "top_logprobs": 2}, "top_logprobs is 2, but logprobs is not set"),
        ({"prompt": "a", "seed": 2**64}, "seed must be"),
        ({"prompt": "a", "stop": ""}, "stop must be"),
        ({"prompt": "a", "stop": ["x"] * 17}, "stop must be"),
        ({"prompt": "a", "stop": None}, "stop must be"),
        ({"prompt": "a", "stop_token_ids": [2**32]}, "stop_token_ids must be"),
        ({"prompt": "a", "priority": 101}, "priority must be an integer from -100 to 100; found 101"),
        ({"prompt": "a", "cache_salt": "s" * 129}, "cache_salt must be text of at most 128 characters"),
        ({"prompt": "a", "request_id": "r" * 129}, "request_id must be"),
    ],
)
def test_a_wrong_field_is_named_with_what_was_found(fields: dict[str, Any], names: str) -> None:
    with pytest.raises(InvalidRequest, match=names):
        Request(**fields)


def test_a_message_never_repeats_the_prompt() -> None:
    with pytest.raises(InvalidRequest) as error:
        Request(messages=[{"role": "user", "content": "secret", "extra": "secret"}])
    assert "secret" not in str(error.value)


def test_the_limits_themselves_are_fine() -> None:
    request = Request("a", max_tokens=1, temperature=100, top_k=0, top_p=1, seed=2**64 - 1, stop="x")
    assert request.stop_strings == ("x",)
    assert Request(token_ids=(0, 2**32 - 1), stop=["x"] * 16).stop_strings == ("x",) * 16
