"""Frozen dataclasses as JSON objects, and back, with every field's type checked."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Container
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from shared.errors import UnsupportedModelError

T = TypeVar("T")


def to_fields(value: Any, always: Container[str] = ()) -> dict[str, Any]:
    """A dataclass as a JSON object, without the fields that have their default.

    Args:
        always: fields that are written all the same.
    """
    found = {}
    for field in dataclasses.fields(value):
        item, default = getattr(value, field.name), field.default
        if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if field.name in always or item != default:
            found[field.name] = _plain(item)
    return found


def from_fields(kind: type[T], value: Any, place: str) -> T:
    """The inverse of `to_fields`.

    Args:
        place: what the object is, for messages.

    Raises:
        UnsupportedModelError: a field is unknown, missing or of another type.
    """
    hints = get_type_hints(kind)
    if not isinstance(value, dict):
        raise UnsupportedModelError(f"{place} is {value!r}; expected an object")
    if unknown := sorted(value.keys() - hints.keys()):
        raise UnsupportedModelError(f"unknown {place} fields {unknown}; this pack needs a newer Headrace")
    fields = {name: _typed(hints[name], item, f"{place} field {name}") for name, item in value.items()}
    try:
        return kind(**fields)
    except TypeError as error:
        raise UnsupportedModelError(f"incomplete {place} description: {error}") from None


def _plain(item: Any) -> Any:
    if dataclasses.is_dataclass(item):
        return to_fields(item)
    return list(item) if isinstance(item, tuple) else item


def _typed(hint: Any, item: Any, place: str) -> Any:
    """The item as the annotation has it."""
    if get_origin(hint) in (Union, types.UnionType):  # `X | None`
        return None if item is None else _typed(get_args(hint)[0], item, place)
    if get_origin(hint) is tuple and isinstance(item, list | tuple):
        return tuple(_typed(get_args(hint)[0], entry, place) for entry in item)
    if dataclasses.is_dataclass(hint):
        return from_fields(hint, item, place)  # type: ignore[arg-type]
    if get_origin(hint) is Literal and item in get_args(hint):
        return item
    if hint is float and isinstance(item, int | float) and not isinstance(item, bool):
        return float(item)
    if isinstance(hint, type) and type(item) is hint:
        return item
    raise UnsupportedModelError(f"{place} is {item!r}, expected {getattr(hint, '__name__', hint)}")
