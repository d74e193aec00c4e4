"""Lets what a template does pass through the meter: loops, macros, literals, concatenations, and what is put out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.runtime import Context
from jinja2.visitor import NodeTransformer

from shared.sandbox_limits import joined, metering, weight

TICK, KEEP, CONCATENATE = "%tick", "%keep", "%concatenate"
"""Filters that no template can name."""


class Metering(NodeTransformer):
    """Puts calls of the filters below into a parsed template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802  named as Jinja's nodes
        self.generic_visit(node)
        node.body.insert(0, _tick_statement(node.body))
        if node.test is not None:
            node.test = nodes.And(_filtered(nodes.Const(0), TICK), node.test)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, _tick_statement(node.body))
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, _tick_statement(node.body))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes), CONCATENATE)

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, KEEP)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, KEEP)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return node if node.ctx == "store" else _filtered(node, KEEP)


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None)


def _tick_statement(body: list[nodes.Node]) -> nodes.Node:
    """Counts the text that the template itself has in a body, which is put out without being asked for."""
    own = sum(len(data.data) for node in body for data in (node, *node.find_all(nodes.TemplateData))
              if isinstance(data, nodes.TemplateData))  # fmt: skip
    return nodes.ExprStmt(_filtered(nodes.Const(own), TICK))


@pass_context
def counted(_: Context, value: Any) -> Any:
    """What is put out. Takes the context so that Jinja does not call it while it compiles."""
    metering.get().tick(weight(value))
    return value


@pass_context
def _tick(_: Context, produced: int) -> bool:
    metering.get().tick(produced)
    return True


@pass_context
def _keep(_: Context, value: Any) -> Any:
    return metering.get().keep(value)


@pass_context
def _concatenate(_: Context, values: list[Any]) -> str:
    return "".join(map(str, joined(values, "")))


METERS: Mapping[str, Callable[..., Any]] = {TICK: _tick, KEEP: _keep, CONCATENATE: _concatenate}
"""The filters, for the environment."""
