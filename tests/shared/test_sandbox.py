"""A chat template can neither run nor grow without end, however it is written, and honest ones notice nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared import sandbox_limits
from shared.errors import UnsupportedModelError
from shared.sandbox import compile_template, render_template, template_variables
from shared.sandbox_limits import TemplateLimitError

MESSAGES = [
    {"role": "system", "content": "Be brief & <kind>."},
    {"role": "user", "content": "One\ntwo"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1, None]}}}]},
]

HONEST = [
    "{% for m in messages if m.role != 'system' %}{{ loop.index0 ~ ': ' ~ m['content'] | trim }}"
    "{% else %}none{% endfor %}",
    "{% macro turn(m, end='.') %}<{{ m.role }}>{{ m.content | indent(2) }}{{ end }}{% endmacro %}"
    "{% for m in messages %}{{ turn(m, end=loop.last and '!' or ',') }}{% endfor %}",
    "{% set ns = namespace(found=false, text='', list=[]) %}{% for m in messages[1:] %}"
    "{% set ns.text = ns.text + m.content %}"
    "{% set ns.list = ns.list + [m.role] %}{% if m.tool_calls %}{% set ns.found = true %}{% endif %}{% endfor %}"
    "{{ ns.found }} {{ ns.text }} {{ ns.list | join('|') }} {{ ns.list | length * 2 }}",
    "{% set block %}{{ messages | map(attribute='role') | list | tojson }}{% endset %}{{ block | upper }}"
    "{{ 2 ** 10 % 7 }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(' / ') }}",
    "{%- for k, v in {'b': 1, 'a': (2, 3)} | dictsort %}{{ k }}={{ v }};{% endfor %}"
    "{{ '%s-%05.1f' | format('x', 2.5) }}",
    "{% for n in range(3) recursive %}{{ n }}{% endfor %}{{ 'a,b'.split(',') }}{{ 'x'.join(['1', '2']) }}"
    "{{ '{:>4}'.format(7) }}",
    "{{ 'ab'.replace('a', 'c') }}{{ messages[0].content | replace('&', 'and') | title }}"
    "{{ [1, 2, 3] | sum }}{{ 'x' * 3 }}",
    "{% macro wrap() %}[{{ caller('in') }}]{% endmacro %}{% call(x) wrap() %}{{ x }}{% endcall %}",
    "{{ messages | tojson(indent=2) }}{{ missing is defined }}{{ missing | default('d') }}"
    "{% filter upper %}up{% endfilter %}",
]

HOSTILE = {
    "nested loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}"
        "{% endfor %}{% endfor %}"
    ),
    "loops that choose nothing": (
        "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}"
    ),
    "macros that call twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "macros without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive loops": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "repeated text": "{{ 'a' * 999999999999 }}",
    "repeated list": "{{ [0] * 999999999 }}",
    "doubled text": "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "doubled by concatenation": (
        "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}"
    ),
    "doubled lists": (
        "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}"
    ),
    "doubled tuples": (
        "{% set n = namespace(s=1) %}{% for i in range(60) %}{% set n.s = (n.s, n.s) %}{% endfor %}{{ n.s == n.s }}"
    ),
    "doubled dictionaries": (
        "{% set n = namespace(s=1) %}{% for i in range(60) %}{% set n.s = {1: n.s, 2: n.s} %}{% endfor %}"
    ),
    "doubled by a function": (
        "{% set n = namespace(s=1) %}{% for i in range(60) %}{% set n.s = dict(a=n.s, b=n.s) %}{% endfor %}"
    ),
    "a large power": "{{ 7 ** 999999999 }}",
    "squares": "{% set n = namespace(s=3) %}{% for i in range(60) %}{% set n.s = n.s * n.s %}{% endfor %}",
    "centered": "{{ 'a' | center(999999999) }}",
    "centered by a method": "{{ 'a'.center(999999999) }}",
    "padded": "{{ 'a'.ljust(999999999) }}{{ '1'.zfill(999999999) }}",
    "indented": "{{ ('\n' * 9999) | indent(99999) }}",
    "printf": "{{ '%999999999d' % 1 }}",
    "printf by a filter": "{{ '%0999999999d' | format(1) }}",
    "printf with a width of its own": "{{ '%*d' % (999999999, 1) }}",
    "format": "{{ '{:>999999999}'.format(1) }}",
    "format with a width of its own": "{{ '{:>{w}}'.format(1, w=999999999) }}",
    "replaced": "{% set s = 'a' * 99999 %}{{ s | replace('a', s) }}",
    "replaced by a method": "{% set s = 'a' * 99999 %}{{ s.replace('a', s) }}",
    "replaced between all": "{% set s = 'a' * 99999 %}{{ s.replace('', s) }}",
    "joined": "{% set s = 'a' * 99999 %}{{ range(99999) | join(s) }}",
    "joined many": (
        "{% set s = 'a' * 99999 %}{% set l = [s] * 40 %}{{ (l | map('upper') | list) | map('lower') | join }}"
        "{{ s.join(l) }}"
    ),
    "joined by a method": "{% set s = 'a' * 9999 %}{{ s.join(s) }}",
    "output without end": "{% set s = 'a' * 99999 %}{% for i in range(99999) %}{{ s }}{% endfor %}",
    "own text without end": "{% for i in range(99999) %}" + "a" * 50_000 + "{% endfor %}",
    "kept without end": (
        "{% set n = namespace(s=[]) %}{% for i in range(99999) %}{% set n.s = [n.s, 'a' * 99999] %}{% endfor %}"
    ),
    "summed lists": "{{ [[1], [2]] | sum(start=[]) }}",
    "a wide JSON": "{{ [1, [2]] | tojson(indent=999999999) }}",
    "batches": "{{ [1] | batch(999999999, 0) | list }}",
    "slices": "{{ [1] | slice(999999999) | list }}",
    "files": "{% include '/etc/passwd' %}",
    "attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attributes by a filter": "{{ ('a' | attr('__class__')).mro }}",
    "attributes by a format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "changed messages": "{{ messages.append(1) }}",
    "globals": "{{ raise_exception.__globals__.os }}",
    "encoded": "{{ 'a'.encode('utf-32') }}",
}


def render(template: str) -> str:
    return render_template(compile_template(template), {"messages": MESSAGES, "bos_token": "<s>"})


@pytest.mark.parametrize("template", HONEST)
def test_honest_templates_notice_nothing(template: str) -> None:
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    plain.filters["tojson"] = compile_template("").environment.filters["tojson"].__wrapped__
    assert render(template) == plain.from_string(template).render(messages=MESSAGES, bos_token="<s>")


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE)
def test_hostile_templates_are_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_limits, "MOST_SECONDS", 0.3)
    with pytest.raises((TemplateError, RecursionError, AttributeError, TypeError)):
        render(template)


def test_a_limit_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_limits, "MOST_SECONDS", 0.05)
    with pytest.raises(TemplateLimitError, match=r"more than 0\.05 s of processor time"):
        render(HOSTILE["nested loops"])
    with pytest.raises(TemplateLimitError, match="a value of more than 4,194,304 characters or elements"):
        render(HOSTILE["doubled text"])
    with pytest.raises(TemplateLimitError, match="more than 268,435,456 characters"):
        render(HOSTILE["own text without end"])


def test_a_long_conversation_is_far_below_the_limits() -> None:
    template = (
        "{% set n = namespace(t='') %}{% for m in messages %}{% set n.t = n.t ~ m.content %}{% endfor %}{{ n.t }}"
    )
    messages = [{"role": "user", "content": "x" * 1000}] * 500
    assert len(render_template(compile_template(template), {"messages": messages})) == 500_000


@pytest.mark.parametrize(
    "template",
    ["{% for %}", "{{ a | wordwrap }}", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "x" * (1 << 20) + "y",
     "{% if a %}" * 300 + "{% endif %}" * 300, "{% for a in b %}" * 40 + "{% endfor %}" * 40],
    ids=["broken", "unknown filter", "deep expression", "long", "deep blocks", "deep loops"],
)  # fmt: skip
def test_what_does_not_compile_is_refused(template: str) -> None:
    with pytest.raises(UnsupportedModelError, match="the model's chat template"):
        compile_template(template)


PIECES = st.sampled_from(
    [
        "{% for a in messages %}", "{% endfor %}", "{% if a %}", "{% else %}", "{% endif %}", "{% set a = a ~ 'x' %}",
        "{% macro f(a) %}", "{% endmacro %}", "{{ f(a) }}", "{{ a }}", "{{ a.b['c'][0:2] }}", "{{ a * 9999 }}",
        "{{ a | tojson }}", "{{ a | join(a) }}", "{{ a | replace(a, a) }}", "{% generation %}", "{% endgeneration %}",
        "{% break %}", "{% set n = namespace(a=[]) %}", "{% set n.a = n.a + [n.a] %}", "{{ range(99999) | list }}",
        "{{ raise_exception('x') }}", "{{ strftime_now('%Y') }}", "{# c #}", "text\n", "{{", "}}", "{%", "%}", "'", "(",
        "{{ loop(a) }}", "{{ self }}", "{{ caller() }}", "{% call f(1) %}", "{% endcall %}", "{% block x %}"
        "", "{% endblock %}",
        "{{ a.__class__ }}", "{{ a() }}", "{{ (a, a) }}", "{% filter upper %}", "{% endfilter %}", "{% raw %}"
        "", "{{ 1 // 0 }}",
    ]
)  # fmt: skip


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(PIECES, max_size=12).map("".join) | st.text(max_size=30))
def test_any_template_is_refused_or_renders_or_says_what_is_wrong(template: str) -> None:
    try:
        compiled = compile_template(template)
    except UnsupportedModelError:
        with pytest.raises(UnsupportedModelError):
            compile_template(template)
        return
    assert template_variables(template) is not None
    outcome: Any
    try:
        outcome = render_template(compiled, {"messages": MESSAGES})
    except Exception as error:  # a template may raise anything; what matters is that it ends
        outcome = str(error)
    assert isinstance(outcome, str)
