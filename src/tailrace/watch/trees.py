"""Expressions as JSON, so that they are decided elsewhere exactly as they are here."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# Trees are whatever JSON holds.

from __future__ import annotations

import math
from typing import Any

from tailrace.watch.syntax import Call, Const, Ident, ListLiteral, MapLiteral, Node, Quantified, Select

ExpressionJson = list[Any]


class ExpressionDecodeError(ValueError):
    """Not an expression that this version knows."""


def encode_expression(node: Node) -> ExpressionJson:
    if isinstance(node, Const):
        value: Any = node.value
        if type(value) is float and not math.isfinite(value):
            return ["double", repr(value)]  # which JSON cannot say
        return ["const", node.kind, value]
    if isinstance(node, Ident):
        return ["ident", node.name]
    if isinstance(node, Select):
        return ["has" if node.test else "select", encode_expression(node.operand), node.field]
    if isinstance(node, Call):
        return ["call", node.function, [encode_expression(argument) for argument in node.args]]
    if isinstance(node, ListLiteral):
        return ["items", [encode_expression(item) for item in node.items]]
    if isinstance(node, MapLiteral):
        return [
            "entries",
            [[encode_expression(key), encode_expression(value)] for key, value in node.entries],
        ]
    return [node.quantifier, node.variable, encode_expression(node.range), encode_expression(node.condition)]


def decode_expression(tree: ExpressionJson) -> Node:
    match tree:
        case ["const", ("json" | "uint") as kind, value]:
            return Const(value, kind)
        case ["double", str(text)]:
            return Const(float(text))
        case ["ident", str(name)]:
            return Ident(name)
        case ["select" | "has" as form, list(operand), str(field)]:
            return Select(decode_expression(operand), field, form == "has")
        case ["call", str(function), list(args)]:
            return Call(function, tuple(decode_expression(argument) for argument in args))
        case ["items", list(items)]:
            return ListLiteral(tuple(decode_expression(item) for item in items))
        case ["entries", list(entries)]:
            return MapLiteral(
                tuple((decode_expression(key), decode_expression(value)) for key, value in entries)
            )
        case [
            ("exists" | "all" | "exists_one") as quantifier,
            str(variable),
            list(over),
            list(condition),
        ]:
            return Quantified(quantifier, variable, decode_expression(over), decode_expression(condition))
        case _:
            raise ExpressionDecodeError("the expression has a form that this version does not know")
