"""Expressions as trees, whatever they were written as: filters, CEL text, or rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal

import msgspec
import orjson

ConstKind = Literal["json", "uint"]
Quantifier = Literal["exists", "all", "exists_one"]

DOC: Final = "doc"
REQUEST: Final = "request"


class Const(msgspec.Struct, frozen=True, eq=False):
    """A value: what JSON can say, or an unsigned integer."""

    value: Any
    kind: ConstKind = "json"


class Ident(msgspec.Struct, frozen=True, eq=False):
    name: str


class Select(msgspec.Struct, frozen=True, eq=False):
    """`operand.field`, or with `test` whether it is there."""

    operand: Node
    field: str
    test: bool = False


class Call(msgspec.Struct, frozen=True, eq=False):
    """A function or operator by CEL's name for it; the target of a method is its first argument."""

    function: str
    args: tuple[Node, ...]


class ListLiteral(msgspec.Struct, frozen=True, eq=False):
    """A list literal."""

    items: tuple[Node, ...]


class MapLiteral(msgspec.Struct, frozen=True, eq=False):
    """A map literal."""

    entries: tuple[tuple[Node, Node], ...]


class Quantified(msgspec.Struct, frozen=True, eq=False):
    """`range.exists(variable, condition)` and its kind."""

    quantifier: Quantifier
    variable: str
    range: Node
    condition: Node


Node = Const | Ident | Select | Call | ListLiteral | MapLiteral | Quantified

FALSE: Final = Const(False)
TRUE: Final = Const(True)
FLIPPED_COMPARISONS: Final = {
    "_<_": "_>_",
    "_<=_": "_>=_",
    "_>_": "_<_",
    "_>=_": "_<=_",
    "_==_": "_==_",
    "_!=_": "_!=_",
}


def path_node(path: tuple[str, ...]) -> Node:
    node: Node = Ident(DOC)
    for name in path:
        node = Select(node, name)
    return node


def field_path(node: Node) -> tuple[str, ...] | None:
    """The field of the document that a node stands for, if it is nothing else."""
    names: list[str] = []
    while True:
        if isinstance(node, Select) and not node.test:
            names.append(node.field)
            node = node.operand
        elif isinstance(node, Call) and node.function == "_[_]" and _is_text(node.args[1]):
            key = node.args[1]
            assert isinstance(key, Const)
            names.append(key.value)
            node = node.args[0]
        else:
            break
    if isinstance(node, Ident) and node.name == DOC and names:
        return tuple(reversed(names))
    return None


def _is_text(node: Node) -> bool:
    return isinstance(node, Const) and type(node.value) is str


def as_constant(node: Node) -> Const | None:
    """The node as a value, list literals of values included."""
    if isinstance(node, Const):
        return node
    if isinstance(node, ListLiteral):
        found = [as_constant(item) for item in node.items]
        if all(item is not None and item.kind == "json" for item in found):
            return Const([item.value for item in found if item is not None])
    return None


def children(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Select):
        return (node.operand,)
    if isinstance(node, Call):
        return node.args
    if isinstance(node, ListLiteral):
        return node.items
    if isinstance(node, MapLiteral):
        return tuple(part for entry in node.entries for part in entry)
    if isinstance(node, Quantified):
        return (node.range, node.condition)
    return ()


def flatten_operands(node: Node, function: str) -> list[Node]:
    """The parts of a chain of one operator, from left to right."""
    if isinstance(node, Call) and node.function == function:
        return [part for argument in node.args for part in flatten_operands(argument, function)]
    return [node]


def conjoin(nodes: list[Node]) -> Node:
    """All of them."""
    if not nodes:
        return TRUE
    found = nodes[0]
    for node in nodes[1:]:
        found = Call("_&&_", (found, node))
    return found


def expression_shape(node: Node) -> str:
    """The canonical form with a question mark for each value: what is asked, not for whom or for how much."""
    return canonical_text(node, _placeholder)


def _constant_text(node: Const) -> str:
    value = orjson.dumps(node.value, option=orjson.OPT_SORT_KEYS).decode()
    return f"{value}u" if node.kind == "uint" else value


def _placeholder(_: Const) -> str:
    return "?"


def canonical_text(node: Node, said: Callable[[Const], str] = _constant_text) -> str:
    """A canonical form: equal texts mean equal values on every document.

    Operands of AND and OR are sorted and said once; a constant stands on the right of a comparison.
    """
    if isinstance(node, Const):
        return said(node)

    def inner(child: Node) -> str:
        return canonical_text(child, said)

    if isinstance(node, Ident):
        return node.name
    if isinstance(node, Select):
        name = f"({inner(node.operand)})[{orjson.dumps(node.field).decode()}]"
        return f"has{name}" if node.test else name
    if isinstance(node, ListLiteral):
        return "[" + ",".join(map(inner, node.items)) + "]"
    if isinstance(node, MapLiteral):
        return "{" + ",".join(f"{inner(key)}:{inner(value)}" for key, value in node.entries) + "}"
    if isinstance(node, Quantified):
        return f"{node.quantifier}({inner(node.range)},{node.variable},{inner(node.condition)})"
    if node.function in ("_&&_", "_||_"):
        parts = sorted({inner(part) for part in flatten_operands(node, node.function)})
        return f"{node.function}({','.join(parts)})" if len(parts) > 1 else f"bool({parts[0]})"
    args = node.args
    if node.function == "_[_]" and _is_text(args[1]):
        return f"({inner(args[0])})[{inner(args[1])}]"  # `a["b"]` is `a.b`
    if node.function in FLIPPED_COMPARISONS and isinstance(args[0], Const) and not isinstance(args[1], Const):
        return f"{FLIPPED_COMPARISONS[node.function]}({inner(args[1])},{inner(args[0])})"
    return f"{node.function}({','.join(map(inner, args))})"
