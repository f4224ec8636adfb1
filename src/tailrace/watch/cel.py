"""CEL expressions: the syntax tree, its JSON form, and parsing and checking of CEL text.

Filters, CEL text and rules all become the same trees. The JSON form lets other processes evaluate an
expression identically. CEL text is parsed and checked by the CEL library, an extra; everything else works
without it.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import orjson

from tailrace.common.errors import TailraceError

if TYPE_CHECKING:
    from cel_expr_python import cel  # pyright: ignore[reportMissingTypeStubs]


ConstKind = Literal["json", "uint"]
Quantifier = Literal["exists", "all", "exists_one"]

DOC: Final = "doc"
REQUEST: Final = "request"


class Const(msgspec.Struct, frozen=True, eq=False):
    """A JSON value or an unsigned integer."""

    value: Any
    kind: ConstKind = "json"


class Ident(msgspec.Struct, frozen=True, eq=False):
    name: str


class Select(msgspec.Struct, frozen=True, eq=False):
    """`operand.field`; with `test`, whether the field exists."""

    operand: Node
    field: str
    test: bool = False


class Call(msgspec.Struct, frozen=True, eq=False):
    """A function or operator by its CEL name; the target of a method is the first argument."""

    function: str
    args: tuple[Node, ...]


class ListLiteral(msgspec.Struct, frozen=True, eq=False):
    items: tuple[Node, ...]


class MapLiteral(msgspec.Struct, frozen=True, eq=False):
    entries: tuple[tuple[Node, Node], ...]


class Quantified(msgspec.Struct, frozen=True, eq=False):
    """`range.exists(variable, condition)`, `all` or `exists_one`."""

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
    """The field path if the node is a plain field of the document."""
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
    """The node as a constant; list literals of constants included."""
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
    """The operands of a chain of one operator, from left to right."""
    if isinstance(node, Call) and node.function == function:
        return [part for argument in node.args for part in flatten_operands(argument, function)]
    return [node]


def conjoin(nodes: list[Node]) -> Node:
    """The conjunction of the nodes."""
    if not nodes:
        return TRUE
    found = nodes[0]
    for node in nodes[1:]:
        found = Call("_&&_", (found, node))
    return found


def expression_shape(node: Node) -> str:
    """The canonical form with a question mark for each value."""
    return canonical_text(node, _placeholder)


def _constant_text(node: Const) -> str:
    value = orjson.dumps(node.value, option=orjson.OPT_SORT_KEYS).decode()
    return f"{value}u" if node.kind == "uint" else value


def _placeholder(_: Const) -> str:
    return "?"


def canonical_text(node: Node, format_constant: Callable[[Const], str] = _constant_text) -> str:
    """A canonical form: equal texts give equal values on every document.

    Operands of AND and OR are sorted without duplicates; constants are on the right of comparisons.
    """
    if isinstance(node, Const):
        return format_constant(node)

    def inner(child: Node) -> str:
        return canonical_text(child, format_constant)

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


# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# Trees are any JSON.


ExpressionJson = list[Any]


class ExpressionDecodeError(ValueError):
    """The form of an expression is unknown to this version."""


def encode_expression(node: Node) -> ExpressionJson:
    if isinstance(node, Const):
        value: Any = node.value
        if type(value) is float and not math.isfinite(value):
            return ["double", repr(value)]  # not representable in JSON
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
            raise ExpressionDecodeError("unknown form of expression")


TEXT_BYTES_MAX: Final = 4096
DEPTH_MAX: Final = 20
NODES_MAX: Final = 500
STRING_BYTES_MAX: Final = 1024
ITEMS_MAX: Final = 1000

OPERATORS: Final = frozenset(
    ("!_", "-_", "_+_", "_-_", "_*_", "_/_", "_%_", "_==_", "_!=_", "_<_", "_<=_", "_>_", "_>=_")
) | frozenset(("@in", "_&&_", "_||_", "_?_:_", "_[_]"))
FUNCTIONS: Final = frozenset(("size", "contains", "startsWith", "endsWith"))
CONVERSIONS: Final = frozenset(("int", "uint", "double", "string", "timestamp", "duration", "type"))
_TYPE_NAMES: Final = frozenset(
    ("bool", "int", "uint", "double", "string", "list", "map", "null_type", "type")
) | frozenset(("google.protobuf.Timestamp", "google.protobuf.Duration"))
_ERROR_POSITION: Final = re.compile(r"<input>:(\d+):(\d+): ([^\n]*)")


def invalid_query(message: str) -> TailraceError:
    return TailraceError("invalid_query", message)


def query_too_complex(message: str) -> TailraceError:
    return TailraceError("query_too_complex", message)


@cache
def cel_environments() -> tuple[cel.Env, cel.Env]:
    """The environments of predicates (with `doc`) and of rules (also with `request`)."""
    try:
        from cel_expr_python import cel  # pyright: ignore[reportMissingTypeStubs]
    except ImportError:
        raise TailraceError(
            "not_installed", "CEL expressions require the extra 'watch': pip install 'tailrace[watch]'"
        ) from None
    doc = cel.Type.Map(cel.Type.STRING, cel.Type.DYN)
    return (
        cel.NewEnv(variables={"doc": doc}),
        cel.NewEnv(variables={"doc": doc, "request": doc}),
    )


class CelProgram:
    """An expression run by the CEL library: the reference, and the fallback for what is not compiled."""

    def __init__(self, expression: cel.Expression, source: str) -> None:
        self._expression = expression
        self.source = source  # sent to other processes

    def value(self, **variables: Any) -> tuple[str, Any]:
        """Type and value; the type is ERROR if the evaluation fails."""
        try:
            found = self._expression.eval(data=variables)
        except RuntimeError:
            return "ERROR", None  # some errors are exceptions, e.g. a duplicate key
        return found.type().name(), found.value()

    def holds(self, **variables: Any) -> bool:
        kind, value = self.value(**variables)
        return kind == "BOOL" and value is True


def compile_cel(source: str, *, rule: bool = False, name: str = "where") -> tuple[Node, CelProgram]:
    """The tree and program of an expression; raises if it is invalid."""
    if len(source.encode("utf-8", "surrogatepass")) > TEXT_BYTES_MAX:
        raise query_too_complex(f"{name}: an expression must have at most {TEXT_BYTES_MAX} bytes")
    environment = cel_environments()[rule]
    if "\0" in source or not _is_unicode(source):
        raise invalid_query(f"{name}: the expression must be Unicode text")
    if _nesting_bound(source) > 4 * DEPTH_MAX:
        raise query_too_complex(f"{name}: an expression must have at most {DEPTH_MAX} levels")
    try:
        expression = environment.compile(source)
    except (RuntimeError, ValueError) as error:
        raise invalid_query(_first_error(str(error), name)) from None
    kind = expression.return_type().name()
    if kind not in ("BOOL", "DYN"):
        raise invalid_query(f"{name}:1:1: the expression must be a bool, not a {kind.lower()}")
    node = _TreeConverter(name).convert(expression.serialize())
    return node, CelProgram(expression, source)


def _is_unicode(source: str) -> bool:
    try:
        source.encode()
    except UnicodeEncodeError:
        return False
    return True


def _nesting_bound(source: str) -> int:
    """An upper bound of the nesting, checked before the text is parsed."""
    depth = deepest = 0
    for char in source:
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth -= 1
    return deepest


def _first_error(message: str, name: str) -> str:
    """The library's first error with line and column, without its source excerpt."""
    found = _ERROR_POSITION.search(message)
    if found is None:
        return f"{name}: invalid expression"
    line, column, what = found.groups()
    return f"{name}:{line}:{column}: {what[:300]}"


def _protobuf_fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """The fields of a protobuf message: number and value, in order."""
    index = 0
    while index < len(data):
        tag, index = _varint(data, index)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == 0:
            value, index = _varint(data, index)
            yield number, value
        elif wire_type == 2:
            size, index = _varint(data, index)
            yield number, data[index : index + size]
            index += size
        elif wire_type == 1:
            yield number, data[index : index + 8]
            index += 8
        else:
            yield number, data[index : index + 4]
            index += 4


def _varint(data: memoryview, index: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[index]
        index += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, index
        shift += 7


def _protobuf_message(data: memoryview) -> dict[int, Any]:
    """The last value of each field."""
    return dict(_protobuf_fields(data))


def _repeated_field(data: memoryview, number: int) -> list[memoryview]:
    return [
        value for field, value in _protobuf_fields(data) if field == number and isinstance(value, memoryview)
    ]


def _string(data: memoryview | None) -> str:
    return "" if data is None else bytes(data).decode()


class _TreeConverter:
    """Converts the library's checked tree to ours; rejects unsupported constructs."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._nodes = 0
        self._variable: str | None = None

    def convert(self, raw: bytes) -> Node:
        anything = _protobuf_message(memoryview(raw))
        return self.node(_protobuf_message(anything[2])[4], 1)

    def node(self, data: memoryview, depth: int) -> Node:
        self._nodes += 1
        if self._nodes > NODES_MAX or depth > DEPTH_MAX:
            raise query_too_complex(
                f"{self._name}: an expression must have at most {NODES_MAX} nodes and {DEPTH_MAX} levels"
            )
        fields = _protobuf_message(data)
        if 3 in fields:
            return self._constant(fields[3])
        if 4 in fields:
            return self._ident(_string(_protobuf_message(fields[4]).get(1)))
        if 5 in fields:
            select = _protobuf_message(fields[5])
            return Select(self.node(select[1], depth + 1), _string(select.get(2)), bool(select.get(3, 0)))
        if 6 in fields:
            return self._call(fields[6], depth)
        if 7 in fields:
            items = _repeated_field(fields[7], 1)
            if len(items) > ITEMS_MAX:
                raise query_too_complex(f"{self._name}: a list must have at most {ITEMS_MAX} values")
            self._nodes -= len(items)  # a list of constants counts as one node
            return ListLiteral(tuple(self.node(item, depth + 1) for item in items))
        if 8 in fields:
            return self._map(fields[8], depth)
        if 9 in fields:
            return self._quantified(fields[9], depth)
        raise invalid_query(f"{self._name}: unsupported construct in the expression")

    def _constant(self, data: memoryview) -> Const:
        fields = _protobuf_message(data)
        for number, value in fields.items():
            if number == 1:
                return Const(None)
            if number == 2:
                return Const(bool(value))
            if number == 3:
                return Const(value - 2**64 if value >= 2**63 else value)
            if number == 4:
                return Const(value, "uint")
            if number == 5:
                return Const(struct.unpack("<d", value)[0])
            if number == 6:
                if len(value) > STRING_BYTES_MAX:
                    raise query_too_complex(
                        f"{self._name}: a string must have at most {STRING_BYTES_MAX} bytes"
                    )
                return Const(_string(value))
        raise invalid_query(f"{self._name}: values of this type are not supported")

    def _ident(self, name: str) -> Node:
        if name in ("doc", "request") or name == self._variable or name in _TYPE_NAMES:
            return Ident(name)
        raise invalid_query(f"{self._name}: unknown name {name!r}")

    def _call(self, data: memoryview, depth: int) -> Node:
        fields = _protobuf_message(data)
        name = _string(fields.get(2))
        if name not in OPERATORS and name not in FUNCTIONS and name not in CONVERSIONS:
            raise invalid_query(f"{self._name}: {name!r} is not supported")
        args = [fields[1]] if 1 in fields else []
        args += _repeated_field(data, 3)
        if name in CONVERSIONS and len(args) != 1:
            raise invalid_query(f"{self._name}: {name} takes one argument")
        return Call(name, tuple(self.node(argument, depth + 1) for argument in args))

    def _map(self, data: memoryview, depth: int) -> Node:
        if _protobuf_message(data).get(1):
            raise invalid_query(f"{self._name}: messages are not supported")
        entries: list[tuple[Node, Node]] = []
        for raw in _repeated_field(data, 2):
            entry = _protobuf_message(raw)
            if 3 not in entry or 5 in entry:
                raise invalid_query(f"{self._name}: messages are not supported")
            entries.append((self.node(entry[3], depth + 1), self.node(entry[4], depth + 1)))
        return MapLiteral(tuple(entries))

    def _quantified(self, data: memoryview, depth: int) -> Node:
        """Recognize `exists`, `all` and `exists_one` by their comprehension; reject all others."""
        loop = _protobuf_message(data)
        variable = _string(loop.get(1))
        if self._variable is not None or 8 in loop:
            raise invalid_query(f"{self._name}: exists, all and exists_one cannot be nested")
        if variable in ("doc", "request") or variable in _TYPE_NAMES:
            raise invalid_query(f"{self._name}: {variable!r} is not allowed as the name of a variable")
        step = _protobuf_message(loop[6])
        init = _protobuf_message(loop[4]).get(3)
        call = _protobuf_message(step[6]) if 6 in step else {}
        name = _string(call.get(2))
        args = _repeated_field(step[6], 3) if 6 in step else []
        start = None if init is None else self._constant(init).value
        over = self.node(loop[2], depth + 1)
        self._variable = variable
        try:
            if name == "_||_" and start is False:
                return Quantified("exists", variable, over, self.node(args[1], depth + 1))
            if name == "_&&_" and start is True:
                return Quantified("all", variable, over, self.node(args[1], depth + 1))
            result = _protobuf_message(_protobuf_message(loop[7]).get(6) or memoryview(b""))
            if name == "_?_:_" and start == 0 and _string(result.get(2)) == "_==_":
                return Quantified("exists_one", variable, over, self.node(args[0], depth + 1))
        finally:
            self._variable = None
        raise invalid_query(f"{self._name}: only the macros exists, all and exists_one are supported")
