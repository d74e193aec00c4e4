"""The sandbox in which a model's chat template runs: it comes with the model and is not trusted. Plain Python."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import UnsupportedModelError


def template_environment() -> ImmutableSandboxedEnvironment:
    """What templates are written against, as in `transformers`.

    That is `raise_exception`, `strftime_now`, `tojson` without HTML escapes, `break` and `continue` in loops, and
    `generation` blocks.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def template_variables(source: str) -> frozenset[str]:
    """The names that a template looks up in what it is given.

    Raises:
        UnsupportedModelError: the template is not valid Jinja.
    """
    environment = template_environment()
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(source))) - environment.globals.keys()
    except TemplateError as error:
        raise UnsupportedModelError(f"the model's chat template is not valid: {error}; pack it with another") from None


class _GenerationBlock(Extension):
    """`{% generation %}` marks what a model is trained on; for a prompt it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The block's body, as if the tags were not there."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
