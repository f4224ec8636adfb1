"""The query object: filters, a CEL expression, ids and an order. Filters become trees, never text."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple, cast

from tailrace.common.errors import TailraceError
from tailrace.watch import names
from tailrace.watch.cel import (
    ITEMS_MAX,
    STRING_BYTES_MAX,
    Call,
    Const,
    Node,
    compile_cel,
    invalid_query,
    path_node,
    query_too_complex,
)
from tailrace.watch.document import INT_MAX, INT_MIN
from tailrace.watch.predicate import FieldPath, PredicatePart

FILTERS_MAX: Final = 32
DOCUMENTS_MAX: Final = 100
ORDERS_MAX: Final = 8
PATH_NAMES_MAX: Final = 20
LIMIT_MAX: Final = 1000
LIMIT_DEFAULT: Final = 100

_OPERATORS: Final = {
    "==": "_==_",
    "!=": "_!=_",
    ">": "_>_",
    ">=": "_>=_",
    "<": "_<_",
    "<=": "_<=_",
    "in": "@in",
}
_MEMBERS: Final = frozenset({"collection", "filters", "where", "documents", "orderBy"})
_ONE_SHOT: Final = frozenset({"limit", "cursor", "startAfter"})


class OrderBy(NamedTuple):
    path: FieldPath
    descending: bool


class Query(NamedTuple):
    """A validated query."""

    collection: str
    parts: tuple[PredicatePart, ...]
    documents: frozenset[str] | None
    order: tuple[OrderBy, ...]
    limit: int
    cursor: str | None


def read_query(value: object, *, live: bool) -> Query:
    """Parse a query; a live one has no limit or cursor, since a partial result could not be maintained."""
    if not isinstance(value, dict):
        raise invalid_query("a query must be an object")
    query = cast("dict[str, Any]", value)
    for member in query:
        if member in _ONE_SHOT and (live or member == "startAfter"):
            raise TailraceError("unsupported_query", f"{member!r} is not supported here")
        if member not in _MEMBERS and member not in _ONE_SHOT:
            raise invalid_query(f"unknown member {member!r}")
    collection = query.get("collection")
    if not isinstance(collection, str):
        raise invalid_query("collection is required")
    parts = [PredicatePart(node) for node in _filters(query.get("filters"))]
    where = query.get("where")
    if where is not None:
        if not isinstance(where, str):
            raise invalid_query("where must be a string")
        if where.strip():
            parts.append(PredicatePart(*compile_cel(where)))
    limit = query.get("limit", LIMIT_DEFAULT)
    if type(limit) is not int or not 1 <= limit <= LIMIT_MAX:
        raise invalid_query(f"limit must be 1 to {LIMIT_MAX}")
    cursor = query.get("cursor")
    if cursor is not None and not isinstance(cursor, str):
        raise invalid_query("cursor must be taken from an earlier response")
    return Query(
        names.check_collection(collection),
        tuple(parts),
        _documents(query.get("documents")),
        _orders(query.get("orderBy")),
        limit,
        cursor,
    )


def _filters(value: object) -> list[Node]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise invalid_query("filters must be a list")
    filters = cast("list[object]", value)
    if len(filters) > FILTERS_MAX:
        raise query_too_complex(f"filters must have at most {FILTERS_MAX} items")
    return [_filter(item, index) for index, item in enumerate(filters)]


def _filter(value: object, index: int) -> Node:
    if not isinstance(value, dict):
        raise invalid_query(f"filter {index}: must be an object")
    members = cast("dict[str, Any]", value)
    if not set(members) <= {"field", "fieldPath", "op", "value"} or "value" not in members:
        raise invalid_query(f"filter {index}: must have field or fieldPath, op and value")
    node = path_node(_path(members, f"filter {index}"))
    op, value = members.get("op"), members["value"]
    if op == "contains":
        _check_value(value, index)
        return Call("@in", (Const(_number(value)), node))
    function = _OPERATORS.get(op) if isinstance(op, str) else None
    if function is None:
        raise invalid_query(f"filter {index}: op must be one of {', '.join(_OPERATORS)}, contains")
    if op == "in":
        if not isinstance(value, list):
            raise invalid_query(f"filter {index}: the value of in must be a list")
        values = cast("list[Any]", value)
        if len(values) > ITEMS_MAX:
            raise query_too_complex(f"filter {index}: in must have at most {ITEMS_MAX} values")
        for item in values:
            _check_value(item, index)
        return Call(function, (node, Const([_number(item) for item in values])))
    _check_value(value, index)
    return Call(function, (node, Const(_number(value))))


def _number(value: Any) -> Any:
    return float(value) if type(value) is int and not INT_MIN <= value <= INT_MAX else value


def _check_value(value: Any, index: int) -> None:
    if value is not None and type(value) not in (bool, int, float, str):
        raise invalid_query(f"filter {index}: a value must be null, a bool, a number or a string")
    if type(value) is float and not math.isfinite(value):
        raise invalid_query(f"filter {index}: a number is out of range")
    if type(value) is str and len(value.encode("utf-8", "surrogatepass")) > STRING_BYTES_MAX:
        raise query_too_complex(f"filter {index}: a string must have at most {STRING_BYTES_MAX} bytes")


def _path(members: dict[str, Any], where: str) -> FieldPath:
    field, listed = members.get("field"), members.get("fieldPath")
    if isinstance(field, str) and listed is None:
        path: list[Any] = list(field.split("."))
    elif isinstance(listed, list) and field is None:
        path = cast("list[Any]", listed)
    else:
        raise invalid_query(f"{where}: must have either field or fieldPath")
    if not 1 <= len(path) <= PATH_NAMES_MAX or not all(isinstance(name, str) and name for name in path):
        raise invalid_query(f"{where}: a field must have 1 to {PATH_NAMES_MAX} names")
    return tuple(path)


def _documents(value: object) -> frozenset[str] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise invalid_query("documents must be a list of ids")
    ids = cast("list[Any]", value)
    if len(ids) > DOCUMENTS_MAX:
        raise query_too_complex(f"documents must have at most {DOCUMENTS_MAX} ids")
    if not all(isinstance(item, str) and 1 <= len(item) <= names.PATH_BYTES_MAX for item in ids):
        raise invalid_query("documents must be a list of ids")
    return frozenset(ids)


def _orders(value: object) -> tuple[OrderBy, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(cast("list[Any]", value)) > ORDERS_MAX:
        raise invalid_query(f"orderBy must be a list of at most {ORDERS_MAX} fields")
    orders: list[OrderBy] = []
    for index, item in enumerate(cast("list[object]", value)):
        members = cast("dict[str, Any]", item) if isinstance(item, dict) else {}
        direction = members.get("direction", "asc")
        if not set(members) <= {"field", "fieldPath", "direction"} or direction not in ("asc", "desc"):
            raise invalid_query(f"orderBy {index}: must have field or fieldPath, and direction asc or desc")
        orders.append(OrderBy(_path(members, f"orderBy {index}"), direction == "desc"))
    return tuple(orders)


_RANKS: Final = {type(None): 0, bool: 1, int: 2, float: 2, str: 3, list: 4, dict: 5}


class Descending:
    """A key with reversed order."""

    __slots__ = ("key",)

    def __init__(self, key: Any) -> None:
        self.key = key

    def __lt__(self, other: Descending) -> bool:
        return other.key < self.key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Descending) and other.key == self.key

    __hash__ = None  # type: ignore[assignment]


def sort_values(document: dict[str, Any], order: tuple[OrderBy, ...]) -> list[Any]:
    """The sort values of a document, each after its type rank; missing fields come first."""
    found: list[Any] = []
    for path, _ in order:
        value: Any = document
        for name in path:
            value = cast("dict[str, Any]", value).get(name, _ABSENT) if type(value) is dict else _ABSENT
        rank = -1 if value is _ABSENT else _RANKS[type(value)]
        found.append([rank, value if rank in (1, 2, 3) else 0])
    return found


def sort_key(values: list[Any], document_id: str, order: tuple[OrderBy, ...]) -> tuple[Any, ...]:
    """The sort key of a document; ties are ordered by id."""
    parts = [
        Descending(tuple(value)) if one.descending else tuple(value)
        for value, one in zip(values, order, strict=True)
    ]
    return (*parts, document_id)


_ABSENT: Final = object()
