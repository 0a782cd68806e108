"""Compiles chat templates to code that spends the steps of a budget.

Each body that may run repeatedly, such as a loop's, begins by spending the steps of one pass. An
operator whose cost depends on its operands is compiled to a call of a function in
`template_budget`, which spends the operator's steps.
"""

from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import TemplateSyntaxError

from gateway.text.template_budget import CHARS_PER_STEP, MAX_INTEGER

RUNTIME = (
    "spend, weighed, text, joined, add, multiply, power, modulo, contains, key, integer, spend_size"
)
"""Names of the functions in `template_budget` that compiled templates call. A template's own names
cannot collide with them, because Jinja adds a prefix to a template's names."""

UNSUPPORTED: dict[type[nodes.Node], str] = {
    nodes.Include: "include",
    nodes.Import: "import",
    nodes.FromImport: "import",
    nodes.Extends: "extends",
    nodes.ScopedEvalContextModifier: "autoescape",
}
"""Statements that are refused. Such statements are useless here, because there are no other
templates and text is never escaped."""

BOOLEANS = (nodes.Const, nodes.Compare, nodes.Not, nodes.Test)
"""Kinds of operands whose comparison costs no steps. Constants are included, because a constant is
at most as long as the template."""


class CountingCodeGenerator(CodeGenerator):
    """Code generator whose code spends steps. It does not evaluate constant expressions, so that
    the steps of all computation are spent during rendering."""

    def visit_Template(self, node: nodes.Template, frame: Any = None) -> None:
        for found in node.find_all(tuple(UNSUPPORTED)):
            raise TemplateSyntaxError(
                f"chat templates may not use {UNSUPPORTED[type(found)]!r}", found.lineno
            )
        for const in node.find_all(nodes.Const):
            if isinstance(const.value, int) and not -MAX_INTEGER < const.value < MAX_INTEGER:
                raise TemplateSyntaxError("integers have at most 64 bits", const.lineno)
        _count_bodies(node)
        self.writeline(f"from gateway.text.template_budget import {RUNTIME}")
        super().visit_Template(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:
        self._call("joined", node.nodes, frame)

    def visit_Add(self, node: nodes.Add, frame: Any) -> None:
        operands: list[nodes.Expr] = [node.right]
        left = node.left
        while isinstance(left, nodes.Add):
            operands.append(left.right)
            left = left.left
        self._call("add", [left, *reversed(operands)], frame)

    def visit_Sub(self, node: nodes.Sub, frame: Any) -> None:
        self.write("integer(")
        self.visit(node.left, frame)
        self.write(" - ")
        self.visit(node.right, frame)
        self.write(")")

    def visit_Mul(self, node: nodes.Mul, frame: Any) -> None:
        self._call("multiply", [node.left, node.right], frame)

    def visit_Pow(self, node: nodes.Pow, frame: Any) -> None:
        self._call("power", [node.left, node.right], frame)

    def visit_Mod(self, node: nodes.Mod, frame: Any) -> None:
        self._call("modulo", [node.left, node.right], frame)

    def visit_Compare(self, node: nodes.Compare, frame: Any) -> None:
        operands = [node.expr, *(operand.expr for operand in node.ops)]
        operators = [operand.op for operand in node.ops]
        if operators in (["in"], ["notin"]):
            self.write("(not " if operators == ["notin"] else "(")
            self._call("contains", operands, frame)
            self.write(")")
            return
        # A comparison with a constant takes a time that is limited by the length of the constant.
        is_short = len(operands) == 2 and any(isinstance(each, BOOLEANS) for each in operands)
        self.write("(")
        for number, operand in enumerate(operands):
            if number:
                self.write(f" {OPERATORS[operators[number - 1]]} ")
            if is_short or isinstance(operand, BOOLEANS):
                self.visit(operand, frame)
            else:
                self._call("weighed", [operand], frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Any) -> None:
        if isinstance(node.arg, nodes.Slice):
            self.write("spend_size(")
            super().visit_Getitem(node, frame)
            self.write(")")
        else:
            super().visit_Getitem(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Any) -> None:
        self.write("{")
        for item in node.items:
            if isinstance(item.key, nodes.Const):
                self.visit(item.key, frame)
            else:
                self._call("key", [item.key], frame)
            self.write(": ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("}")

    def _output_child_to_const(self, node: nodes.Expr, frame: Any, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData | nodes.Const):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def _output_child_pre(self, node: nodes.Expr, frame: Any, finalize: Any) -> None:
        self.write("text(")

    def _call(self, name: str, operands: list[nodes.Expr], frame: Any) -> None:
        self.write(f"{name}(")
        for operand in operands:
            self.visit(operand, frame)
            self.write(", ")
        self.write(")")


OPERATORS = {
    "eq": "==",
    "ne": "!=",
    "gt": ">",
    "gteq": ">=",
    "lt": "<",
    "lteq": "<=",
    "in": "in",
    "notin": "not in",
}


def _count_bodies(template: nodes.Template) -> None:
    """Makes each pass of a loop and each call of a macro or block spend the steps of its body."""
    kinds = (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)
    found = list(template.find_all(kinds))
    weights = [1 + sum(map(_weight, node.body)) for node in found]
    for node, weight in zip(found, weights, strict=True):
        if isinstance(node, nodes.For) and node.test is not None:
            # Testing an item costs steps even if the test is false.
            node.test = nodes.And(_spend(1 + _weight(node.test)), node.test)
        node.body = [nodes.ExprStmt(_spend(weight), lineno=node.lineno), *node.body]


def _spend(steps: int) -> nodes.Expr:
    # The constructor of InternalName is bypassed, because Jinja lets only its own parser call it.
    node: Any = object.__new__(nodes.InternalName)
    nodes.Node.__init__(node, f"spend({steps})", lineno=1)
    return node


def _weight(node: nodes.Node) -> int:
    """Returns the number of steps of one evaluation of a node. Excludes nested bodies, because they
    spend their own steps."""
    weight = 1
    match node:
        case nodes.TemplateData(data=str(data)) | nodes.Const(value=str(data)):
            return 1 + len(data) // CHARS_PER_STEP
        case nodes.Dict(items=items):
            # The steps are quadratic in the number of items, because numeric keys can be chosen so
            # that all of them collide.
            weight += len(items) * len(items) // 16
        case _:
            pass
    is_counted = isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block)
    skips = ("body",) if is_counted else ()
    return weight + sum(map(_weight, node.iter_child_nodes(exclude=skips)))
