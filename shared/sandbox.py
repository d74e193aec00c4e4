"""The sandbox in which a model's chat template runs: it comes with the model and is not trusted. Plain Python.

Jinja's own keeps a template away from files, modules and private attributes. This one also bounds its time and memory
(`shared.sandbox_limits`): loops and calls look at the clock, and what makes a value says how large it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared import sandbox_limits as limits
from shared.errors import UnsupportedModelError
from shared.sandbox_limits import Meter, metering
from shared.sandbox_nodes import METERS, Metering, counted

MOST_TEMPLATE_CHARACTERS = 1 << 20
MOST_JSON_INDENT = 16

NOT_COMPILED = (TemplateError, SyntaxError, RecursionError, MemoryError, ValueError, OverflowError)
"""What Jinja, or Python with what Jinja makes of it, raises for a template that is none."""

LEFT_OUT_FILTERS = ("pprint", "random", "urlize", "wordwrap", "xmlattr")
"""Not bounded here, and of no use in a chat."""
LEFT_OUT_METHODS = frozenset({"encode", "expandtabs", "format_map", "maketrans", "to_bytes", "translate"})
PADDING_METHODS = ("center", "ljust", "rjust", "zfill")


def compile_template(source: str) -> Template:
    """Compiles a chat template for `render_template`.

    Templates are written against what `transformers` offers: `raise_exception`, `strftime_now`, `tojson` without HTML
    escapes, `break` and `continue` in loops, `generation` blocks.

    Raises:
        UnsupportedModelError: the template is not valid Jinja.
    """
    try:
        return _environment(source).from_string(source)
    except NOT_COMPILED as error:
        raise _invalid(error) from None


def render_template(template: Template, given: Mapping[str, Any]) -> str:
    """The text that the template makes.

    Raises:
        Exception: whatever a template can do wrong; `TemplateLimitError` where it takes too much time or memory.
    """
    token = metering.set(Meter())
    try:
        return template.render(given)
    finally:
        metering.reset(token)


def template_variables(source: str) -> frozenset[str]:
    """The names that a template looks up in what it is given.

    Raises:
        UnsupportedModelError: the template is not valid Jinja.
    """
    try:
        environment = _environment(source)
        return frozenset(meta.find_undeclared_variables(environment.parse(source))) - environment.globals.keys()
    except NOT_COMPILED as error:
        raise _invalid(error) from None


def _environment(source: str) -> _Sandbox:
    if len(source) > MOST_TEMPLATE_CHARACTERS:
        raise UnsupportedModelError(
            f"the model's chat template has {len(source):,} characters, at most {MOST_TEMPLATE_CHARACTERS:,} are read; "
            "pack it with another"
        )
    return _Sandbox()


def _invalid(error: Exception) -> UnsupportedModelError:
    what = str(error) or type(error).__name__
    return UnsupportedModelError(f"the model's chat template is not valid: {what}; pack it with another")


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
            optimized=False,  # nothing is computed before it is metered
            finalize=counted,
        )
        for name in LEFT_OUT_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters["tojson"] = _to_json
        self.filters |= {name: _metered(filter_, CHECKS.get(name)) for name, filter_ in self.filters.items()}
        self.filters["join"] = _joining(self.filters["join"])
        self.filters |= METERS
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = Metering().visit(super()._parse(source, name, filename))
        return template

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Every intercepted operation."""
        limits.check_operation(operator, left, right)
        return metering.get().keep(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *arguments: Any, **named: Any) -> Any:  # noqa: N805
        """Every call but those of filters and tests."""
        metering.get().tick()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str | bytes):
            if name == "join" and len(arguments) == 1:
                arguments = (limits.joined(arguments[0], owner),)
            elif name == "replace":
                limits.check_replacement(owner, *arguments[:2])
            elif name in PADDING_METHODS:
                limits.check_counts(arguments)
        return metering.get().keep(super().call(__context, __obj, *arguments, **named))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Leaves out methods whose results are not bounded here."""
        return attr not in LEFT_OUT_METHODS and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`format` of a text, whose widths are in the text."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def checked(*arguments: Any, **named: Any) -> str:
            limits.check_format(str(value.__self__))
            return formatted(*arguments, **named)

        return checked


def _metered(function: Callable[..., Any], check: Callable[..., Any] | None) -> Callable[..., Any]:
    """A filter whose arguments are checked and whose result is counted."""
    given_first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)  # which also keeps what Jinja passes it first
    def call(*arguments: Any, **named: Any) -> Any:
        if check is not None:
            check(*arguments[given_first:], **named)
        return metering.get().keep(function(*arguments, **named))

    return call


def _joining(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def join(context: Any, values: Any, d: Any = "", attribute: Any = None) -> Any:
        return function(context, limits.joined(values, d), d, attribute)

    return join


def _check_counts(_: Any, *arguments: Any, **named: Any) -> None:
    limits.check_counts([*arguments, *named.values()])


def _check_replace(text: Any, old: Any, new: Any, count: Any = None) -> None:
    limits.check_replacement(text, old, new)


def _check_format(text: Any, *_: Any, **__: Any) -> None:
    limits.check_printf(str(text))


def _check_sum(_: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, int | float):
        raise limits.TemplateLimitError("sum adds up other things than numbers")


CHECKS: Mapping[str, Callable[..., None]] = {
    "batch": _check_counts,
    "center": _check_counts,
    "format": _check_format,
    "indent": limits.check_indentation,
    "replace": _check_replace,
    "round": _check_counts,
    "slice": _check_counts,
    "sum": _check_sum,
}
"""What could make more than it is given."""


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
    if (indent or 0) > MOST_JSON_INDENT or limits.weight(separators) > MOST_JSON_INDENT:
        raise limits.TemplateLimitError(f"tojson indents or separates by more than {MOST_JSON_INDENT} characters")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
