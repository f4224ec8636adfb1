"""Expressions as JSON, so that they are decided elsewhere exactly as they are here."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# Trees are whatever JSON holds.

from __future__ import annotations

import math
from typing import Any

from tailrace.watch.syntax import Call, Const, Entries, Ident, Items, Node, Quantified, Select

Tree = list[Any]


class TreeError(ValueError):
    """Not an expression that this version knows."""


def dump(node: Node) -> Tree:
    if isinstance(node, Const):
        value: Any = node.value
        if type(value) is float and not math.isfinite(value):
            return ["double", repr(value)]  # which JSON cannot say
        return ["const", node.kind, value]
    if isinstance(node, Ident):
        return ["ident", node.name]
    if isinstance(node, Select):
        return ["has" if node.test else "select", dump(node.operand), node.field]
    if isinstance(node, Call):
        return ["call", node.function, [dump(argument) for argument in node.args]]
    if isinstance(node, Items):
        return ["items", [dump(item) for item in node.items]]
    if isinstance(node, Entries):
        return ["entries", [[dump(key), dump(value)] for key, value in node.entries]]
    return [node.quantifier, node.variable, dump(node.range), dump(node.condition)]


def load(tree: Tree) -> Node:
    match tree:
        case ["const", ("json" | "uint") as kind, value]:
            return Const(value, kind)
        case ["double", str(text)]:
            return Const(float(text))
        case ["ident", str(name)]:
            return Ident(name)
        case ["select" | "has" as form, list(operand), str(field)]:
            return Select(load(operand), field, form == "has")
        case ["call", str(function), list(args)]:
            return Call(function, tuple(load(argument) for argument in args))
        case ["items", list(items)]:
            return Items(tuple(load(item) for item in items))
        case ["entries", list(entries)]:
            return Entries(tuple((load(key), load(value)) for key, value in entries))
        case [
            ("exists" | "all" | "exists_one") as quantifier,
            str(variable),
            list(over),
            list(condition),
        ]:
            return Quantified(quantifier, variable, load(over), load(condition))
        case _:
            raise TreeError("the expression has a form that this version does not know")
