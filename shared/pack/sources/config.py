"""Typed access to a `config.json`, with messages that name checkpoint, field and value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from shared.errors import UnsupportedModelError

JsonObject = Mapping[str, Any]

MOST, LARGEST = 2**31 - 1, 1e30
"""Larger integers and numbers have no place in a configuration."""


@dataclass(frozen=True)
class Config:
    """The fields of a configuration. A field that is null counts as absent, except where null has a meaning."""

    fields: JsonObject
    checkpoint: str
    place: str = ""
    """Which object of the configuration these fields are of, as in `rope_scaling.`."""

    def integer(self, name: str, default: int | None = None, most: int = MOST) -> int:
        """A positive integer up to `most`; without a default it must be there."""
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            self.refuse(f"{self.place}{name} is {value!r}; expected a positive integer up to {most:,}")
        return value

    def integer_or_none(self, name: str) -> int | None:
        """A positive integer, or None where the field is null or absent."""
        return None if self.fields.get(name) is None else self.integer(name)

    def number(self, name: str, default: float | None = None) -> float:
        """A positive, finite number; without a default it must be there."""
        value = self._value(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < LARGEST:
            self.refuse(f"{self.place}{name} is {value!r}; expected a positive number")
        return float(value)

    def number_or_none(self, name: str) -> float | None:
        """A positive, finite number, or None where the field is null or absent."""
        return None if self.fields.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            self.refuse(f"{self.place}{name} is {value!r}; expected true or false")
        return value

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """A list of that many positive, finite numbers."""
        value = self.fields.get(name)
        if not isinstance(value, list) or len(value) != count:
            self.refuse(f"{self.place}{name} is {value!r}; expected {count} numbers")
        entries = Config({f"{name}[{place}]": entry for place, entry in enumerate(value)}, self.checkpoint, self.place)
        return tuple(map(entries.number, entries.fields))

    def words(self, name: str, count: int, known: tuple[str, ...]) -> tuple[str, ...] | None:
        """A list of that many words, each of a known kind, or None where the field is null or absent."""
        value = self.fields.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count or any(word not in known for word in value):
            self.refuse(f"{self.place}{name} is {value!r}; expected {count} of {', '.join(known)}")
        return tuple(value)

    def object(self, name: str) -> Config | None:
        """An object, or None where the field is null or absent."""
        value = self.fields.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(f"{self.place}{name} is {value!r}; expected an object")
        return Config(value, self.checkpoint, f"{self.place}{name}.")

    def refuse(self, problem: str) -> NoReturn:
        """Raises UnsupportedModelError."""
        raise UnsupportedModelError(f"{self.checkpoint}: {problem}")

    def _value(self, name: str, default: Any) -> Any:
        return default if self.fields.get(name) is None else self.fields[name]
