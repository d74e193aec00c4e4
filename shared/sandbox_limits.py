"""How much a template may compute and hold. Jinja's sandbox keeps it from files and attributes, but from nothing else.

Nothing that a template makes weighs more than `MOST_WEIGHT`, whatever operation makes it: what could multiply sizes is
checked before it is done, everything else after. So each single operation is short, and between them, in loops and
calls, the clock is looked at. Plain Python.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any

from jinja2 import TemplateRuntimeError

MOST_WEIGHT = 1 << 22
"""Characters and elements of a value, everything inside it included: as many as a request can bring."""
MOST_PRODUCED = 1 << 28
"""Of all values that a template makes, together."""
MOST_SECONDS = 10.0
"""Processor time of the thread that renders."""
MOST_COUNT = 10_000
"""A width or a number of repetitions that is given to a filter or a method."""
MOST_BITS = 4096
"""Of an integer."""

_WIDE_PRINTF = re.compile(r"%[^a-zA-Z%]*(\d{5,}|\*)")
_WIDE_FORMAT = re.compile(r"\{[^{}]*(:[^{}]*\d{5,}|\{)")
_COLLECTIONS = (list, tuple, set, frozenset)


class TemplateLimitError(TemplateRuntimeError):
    """A template takes more time or memory than any chat needs."""


class Meter:
    """What one rendering has used. Belongs to the thread that makes it."""

    def __init__(self) -> None:
        self._end_s = time.thread_time() + MOST_SECONDS
        self._produced = 0

    def tick(self, produced: int = 0) -> None:
        """Counts what was produced, and looks at the clock."""
        self._produced += produced
        if self._produced > MOST_PRODUCED:
            raise TemplateLimitError(f"it makes more than {MOST_PRODUCED:,} characters")
        if time.thread_time() > self._end_s:
            raise TemplateLimitError(f"it takes more than {MOST_SECONDS:g} s of processor time")

    def keep(self, value: Any) -> Any:
        """Counts a value that was made, and returns it."""
        self.tick(weight(value))
        return value


metering: ContextVar[Meter] = ContextVar("metering")
"""The meter of the rendering that is going on."""


def weight(value: Any, most: int = MOST_WEIGHT) -> int:
    """Characters and elements in a value.

    Raises:
        TemplateLimitError: there are more than `most`.
    """
    found, waiting = 0, [value]
    while waiting:
        current = waiting.pop()
        if isinstance(current, str | bytes):
            found += len(current)
        elif isinstance(current, Mapping):
            waiting.extend(current.keys())
            waiting.extend(current.values())
        elif isinstance(current, _COLLECTIONS):
            waiting.extend(current)
        found += 1
        if found + len(waiting) > most:
            raise TemplateLimitError(f"it makes a value of more than {most:,} characters or elements")
    return found


def check_operation(operator: str, left: Any, right: Any) -> None:
    """Before an arithmetic operation.

    Raises:
        TemplateLimitError: its result would be too large.
    """
    if operator == "*":
        for one, other in ((left, right), (right, left)):
            if isinstance(other, int) and isinstance(one, str | bytes | list | tuple):
                _require_size(weight(one) * max(other, 0))
    if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * max(right, 0)
        if bits > MOST_BITS:
            raise TemplateLimitError(f"it makes an integer of more than {MOST_BITS} bits")
    if operator == "+" and isinstance(left, str | bytes | list | tuple):
        _require_size(weight(left) + weight(right))
    if operator == "%" and isinstance(left, str | bytes):
        check_printf(str(left))


def check_printf(text: str) -> None:
    """Before `%` is applied to a text."""
    if _WIDE_PRINTF.search(text):
        raise TemplateLimitError("it formats with a width of its own making, or of more than four digits")


def check_format(text: str) -> None:
    """Before `format` is called on a text."""
    if _WIDE_FORMAT.search(text):
        raise TemplateLimitError("it formats with a width of its own making, or of more than four digits")


def check_replacement(text: Any, old: Any, new: Any) -> None:
    """Before parts of a text are replaced."""
    text, old, new = str(text), str(old), str(new)
    count = text.count(old) if old else len(text) + 1
    _require_size(len(text) + count * len(new))


def check_indentation(text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    """Before every line of a text is indented."""
    _require_size((str(text).count("\n") + 1) * (width if isinstance(width, int) else len(width)))


def check_counts(arguments: Iterable[Any]) -> None:
    """Before a filter or a method that makes its result as long as it is told."""
    if any(isinstance(argument, int) and argument > MOST_COUNT for argument in arguments):
        raise TemplateLimitError(f"it asks for a width or a count of more than {MOST_COUNT:,}")


def joined(values: Iterable[Any], separator: Any) -> list[Any]:
    """The values as a list, if they can be joined."""
    found, size = [], 0
    for value in values:
        found.append(value)
        size += weight(value) + weight(separator)
        _require_size(size)
        metering.get().tick()
    return found


def _require_size(size: int) -> None:
    if size > MOST_WEIGHT:
        raise TemplateLimitError(f"it makes a value of more than {MOST_WEIGHT:,} characters or elements")
