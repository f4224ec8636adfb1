"""CEL text to trees, by the library: it parses and checks, we walk what it made of it.

The library is an extra. Without it everything else of this room works; only text needs it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from tailrace.common.errors import TailraceError
from tailrace.watch.syntax import Call, Const, Ident, ListLiteral, MapLiteral, Node, Quantified, Select

if TYPE_CHECKING:
    from cel_expr_python import cel  # pyright: ignore[reportMissingTypeStubs]

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
    """For predicates, which know the document, and for rules, which also know who asks."""
    try:
        from cel_expr_python import cel  # pyright: ignore[reportMissingTypeStubs]
    except ImportError:
        raise TailraceError(
            "not_installed", "expressions need the extra 'watch': pip install 'tailrace[watch]'"
        ) from None
    doc = cel.Type.Map(cel.Type.STRING, cel.Type.DYN)
    return (
        cel.NewEnv(variables={"doc": doc}),
        cel.NewEnv(variables={"doc": doc, "request": doc}),
    )


class CelProgram:
    """An expression as the library runs it: the reference, and the way for what is not lowered."""

    def __init__(self, expression: cel.Expression, source: str) -> None:
        self._expression = expression
        self.source = source  # so that it can be run elsewhere, too

    def value(self, **variables: Any) -> tuple[str, Any]:
        """Type and value; the type is ERROR if there is none."""
        try:
            found = self._expression.eval(data=variables)
        except RuntimeError:
            return "ERROR", None  # some errors are no values of the library's, as a key that is there twice
        return found.type().name(), found.value()

    def holds(self, **variables: Any) -> bool:
        kind, value = self.value(**variables)
        return kind == "BOOL" and value is True


def compile_cel(source: str, *, rule: bool = False, name: str = "where") -> tuple[Node, CelProgram]:
    """The tree and the program of an expression, or why it is none."""
    if len(source.encode("utf-8", "surrogatepass")) > TEXT_BYTES_MAX:
        raise query_too_complex(f"{name}: an expression has at most {TEXT_BYTES_MAX} bytes")
    environment = cel_environments()[rule]
    if "\0" in source or not _is_unicode(source):
        raise invalid_query(f"{name}: the expression is not plain text")
    if _nesting_bound(source) > 4 * DEPTH_MAX:
        raise query_too_complex(f"{name}: an expression is at most {DEPTH_MAX} levels deep")
    try:
        expression = environment.compile(source)
    except (RuntimeError, ValueError) as error:
        raise invalid_query(_first_error(str(error), name)) from None
    kind = expression.return_type().name()
    if kind not in ("BOOL", "DYN"):
        raise invalid_query(f"{name}:1:1: the expression is a {kind.lower()}, not a truth value")
    node = _TreeConverter(name).checked(expression.serialize())
    return node, CelProgram(expression, source)


def _is_unicode(source: str) -> bool:
    try:
        source.encode()
    except UnicodeEncodeError:
        return False
    return True


def _nesting_bound(source: str) -> int:
    """An upper bound of how deep the text is nested, so that no parser has to find out."""
    depth = deepest = 0
    for char in source:
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth -= 1
    return deepest


def _first_error(message: str, name: str) -> str:
    """The first complaint with line and column, without the library's drawing."""
    found = _ERROR_POSITION.search(message)
    if found is None:
        return f"{name}: the expression cannot be understood"
    line, column, what = found.groups()
    return f"{name}:{line}:{column}: {what[:300]}"


def _protobuf_fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """The fields of a protobuf message: number and value, in order."""
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, place = _varint(data, place)
            yield number, value
        elif wire == 2:
            size, place = _varint(data, place)
            yield number, data[place : place + size]
            place += size
        elif wire == 1:
            yield number, data[place : place + 8]
            place += 8
        else:
            yield number, data[place : place + 4]
            place += 4


def _varint(data: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
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
    """From the library's checked tree to ours, refusing what the language does not have."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._nodes = 0
        self._variable: str | None = None

    def checked(self, raw: bytes) -> Node:
        anything = _protobuf_message(memoryview(raw))
        return self.node(_protobuf_message(anything[2])[4], 1)

    def node(self, data: memoryview, depth: int) -> Node:
        self._nodes += 1
        if self._nodes > NODES_MAX or depth > DEPTH_MAX:
            raise query_too_complex(
                f"{self._name}: an expression has at most {NODES_MAX} nodes, {DEPTH_MAX} levels deep"
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
                raise query_too_complex(f"{self._name}: a list has at most {ITEMS_MAX} values")
            self._nodes -= len(items)  # a long list of values is one thing
            return ListLiteral(tuple(self.node(item, depth + 1) for item in items))
        if 8 in fields:
            return self._map(fields[8], depth)
        if 9 in fields:
            return self._quantified(fields[9], depth)
        raise invalid_query(f"{self._name}: the expression holds what the language does not have")

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
                    raise query_too_complex(f"{self._name}: a text has at most {STRING_BYTES_MAX} bytes")
                return Const(_string(value))
        raise invalid_query(f"{self._name}: there are no values of this kind in the language")

    def _ident(self, name: str) -> Node:
        if name in ("doc", "request") or name == self._variable or name in _TYPE_NAMES:
            return Ident(name)
        raise invalid_query(f"{self._name}: there is no {name!r}")

    def _call(self, data: memoryview, depth: int) -> Node:
        fields = _protobuf_message(data)
        name = _string(fields.get(2))
        if name not in OPERATORS and name not in FUNCTIONS and name not in CONVERSIONS:
            raise invalid_query(f"{self._name}: the language has no {name!r}")
        args = [fields[1]] if 1 in fields else []
        args += _repeated_field(data, 3)
        if name in CONVERSIONS and len(args) != 1:
            raise invalid_query(f"{self._name}: {name} takes one value")
        return Call(name, tuple(self.node(argument, depth + 1) for argument in args))

    def _map(self, data: memoryview, depth: int) -> Node:
        if _protobuf_message(data).get(1):
            raise invalid_query(f"{self._name}: the language has no messages")
        entries: list[tuple[Node, Node]] = []
        for raw in _repeated_field(data, 2):
            entry = _protobuf_message(raw)
            if 3 not in entry or 5 in entry:
                raise invalid_query(f"{self._name}: the language has no messages")
            entries.append((self.node(entry[3], depth + 1), self.node(entry[4], depth + 1)))
        return MapLiteral(tuple(entries))

    def _quantified(self, data: memoryview, depth: int) -> Node:
        """`exists`, `all` and `exists_one` by the loops that they stand for; other loops are refused."""
        loop = _protobuf_message(data)
        variable = _string(loop.get(1))
        if self._variable is not None or 8 in loop:
            raise invalid_query(f"{self._name}: exists, all and exists_one cannot be nested")
        if variable in ("doc", "request") or variable in _TYPE_NAMES:
            raise invalid_query(f"{self._name}: {variable!r} cannot be the name of a variable")
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
        raise invalid_query(f"{self._name}: the language has exists, all and exists_one, no other loops")
