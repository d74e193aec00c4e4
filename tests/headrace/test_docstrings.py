"""What docstrings show is what happens: their examples run, and the drawn tree of errors is the real one."""

from __future__ import annotations

import asyncio
import doctest
import inspect
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

import headrace
import headrace.client
import headrace.errors
from tests.headrace.fake_decode import FakeDecode, chunk, header, result, served

ANSWERS = {
    "What is a headrace?": "A channel that leads water to a mill.",
    "What is silt?": "Fine earth that water carries.",
}


async def knowing(request: Any, context: Any) -> AsyncIterator[Any]:
    """Knows the answers to the questions of the examples."""
    asked = request.prompt.text or request.prompt.chat.messages[-1].content
    yield header(request)
    yield chunk(ANSWERS[asked], 1, 2, 3, 4)
    yield result()


@pytest.mark.parametrize("module", [headrace.client])
async def test_examples_do_what_they_say(module: Any) -> None:
    async with served(FakeDecode(knowing)) as address:
        names = {name: getattr(headrace, name) for name in headrace.__all__} | {"target": address, "asyncio": asyncio}
        failed, tried = await asyncio.to_thread(doctest.testmod, module, extraglobs=names)
    assert (failed, tried >= 10) == (0, True)


def test_the_drawn_tree_of_errors_is_the_real_one() -> None:
    drawn: dict[str, str] = {}
    above: list[str] = []
    for line in (headrace.errors.__doc__ or "").splitlines():
        if match := re.match(r"^((?:│   |    )*(?:├── |└── )?)(\w+)(?:\s{2,}|$)", line):
            depth = len(match[1]) // 4
            above[depth:] = [match[2]]
            drawn[match[2]] = above[depth - 1] if depth else "Exception"
    real = {
        name: kind.__bases__[0].__name__
        for name, kind in inspect.getmembers(headrace.errors, inspect.isclass)
        if issubclass(kind, headrace.errors.ClientError)
    }
    assert drawn == real
