"""Options that several commands share, as one value: a group is a frozen dataclass whose fields are options."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """The command as Typer wants it: in place of each parameter that is a group, the options of the group.

    The command itself gets the group, made of what was given.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind) and isinstance(kind, type)}

    @functools.wraps(command)
    def run(**given: Any) -> None:
        made = {
            name: kind(**{field.name: given.pop(field.name) for field in dataclasses.fields(kind)})
            for name, kind in groups.items()
        }
        command(**given, **made)

    parameters = [
        each
        for parameter in inspect.signature(command).parameters.values()
        for each in (
            _options(groups[parameter.name])
            if parameter.name in groups
            else [_keyword(parameter.name, hints[parameter.name], parameter.default)]
        )
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _options(group: type) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        yield _keyword(field.name, hints[field.name], default)


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
