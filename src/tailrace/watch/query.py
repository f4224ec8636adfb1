"""The query object: filters, an expression, ids, an order. Filters become trees, never text."""

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
    """What was asked for, checked."""

    collection: str
    parts: tuple[PredicatePart, ...]
    documents: frozenset[str] | None
    order: tuple[OrderBy, ...]
    limit: int
    cursor: str | None


def read_query(given: object, *, live: bool) -> Query:
    """A query object; a live one cannot be cut short, since a cut set could not be kept right."""
    if not isinstance(given, dict):
        raise invalid_query("a query is an object")
    query = cast("dict[str, Any]", given)
    for member in query:
        if member in _ONE_SHOT and (live or member == "startAfter"):
            raise TailraceError("unsupported_query", f"{member!r} is not possible here")
        if member not in _MEMBERS and member not in _ONE_SHOT:
            raise invalid_query(f"unknown member {member!r}")
    collection = query.get("collection")
    if not isinstance(collection, str):
        raise invalid_query("a query names its collection")
    parts = [PredicatePart(node) for node in _filters(query.get("filters"))]
    where = query.get("where")
    if where is not None:
        if not isinstance(where, str):
            raise invalid_query("where is a text")
        if where.strip():
            parts.append(PredicatePart(*compile_cel(where)))
    limit = query.get("limit", LIMIT_DEFAULT)
    if type(limit) is not int or not 1 <= limit <= LIMIT_MAX:
        raise invalid_query(f"limit is a number from 1 to {LIMIT_MAX}")
    cursor = query.get("cursor")
    if cursor is not None and not isinstance(cursor, str):
        raise invalid_query("cursor is what an answer before gave")
    return Query(
        names.check_collection(collection),
        tuple(parts),
        _documents(query.get("documents")),
        _orders(query.get("orderBy")),
        limit,
        cursor,
    )


def _filters(given: object) -> list[Node]:
    if given is None:
        return []
    if not isinstance(given, list):
        raise invalid_query("filters is a list")
    filters = cast("list[object]", given)
    if len(filters) > FILTERS_MAX:
        raise query_too_complex(f"there are at most {FILTERS_MAX} filters")
    return [_filter(item, place) for place, item in enumerate(filters)]


def _filter(given: object, place: int) -> Node:
    if not isinstance(given, dict):
        raise invalid_query(f"filter {place}: it is an object")
    members = cast("dict[str, Any]", given)
    if not set(members) <= {"field", "fieldPath", "op", "value"} or "value" not in members:
        raise invalid_query(f"filter {place}: it has field or fieldPath, op and value")
    node = path_node(_path(members, f"filter {place}"))
    op, value = members.get("op"), members["value"]
    if op == "contains":
        _check_value(value, place)
        return Call("@in", (Const(_number(value)), node))
    function = _OPERATORS.get(op) if isinstance(op, str) else None
    if function is None:
        raise invalid_query(f"filter {place}: op is one of {', '.join(_OPERATORS)}, contains")
    if op == "in":
        if not isinstance(value, list):
            raise invalid_query(f"filter {place}: the value of in is a list")
        values = cast("list[Any]", value)
        if len(values) > ITEMS_MAX:
            raise query_too_complex(f"filter {place}: in takes at most {ITEMS_MAX} values")
        for item in values:
            _check_value(item, place)
        return Call(function, (node, Const([_number(item) for item in values])))
    _check_value(value, place)
    return Call(function, (node, Const(_number(value))))


def _number(value: Any) -> Any:
    return float(value) if type(value) is int and not INT_MIN <= value <= INT_MAX else value


def _check_value(value: Any, place: int) -> None:
    if value is not None and type(value) not in (bool, int, float, str):
        raise invalid_query(f"filter {place}: a value is null, a truth value, a number or a text")
    if type(value) is float and not math.isfinite(value):
        raise invalid_query(f"filter {place}: a number is out of range")
    if type(value) is str and len(value.encode("utf-8", "surrogatepass")) > STRING_BYTES_MAX:
        raise query_too_complex(f"filter {place}: a text has at most {STRING_BYTES_MAX} bytes")


def _path(members: dict[str, Any], where: str) -> FieldPath:
    field, listed = members.get("field"), members.get("fieldPath")
    if isinstance(field, str) and listed is None:
        path: list[Any] = list(field.split("."))
    elif isinstance(listed, list) and field is None:
        path = cast("list[Any]", listed)
    else:
        raise invalid_query(f"{where}: it has a field, or a fieldPath")
    if not 1 <= len(path) <= PATH_NAMES_MAX or not all(isinstance(name, str) and name for name in path):
        raise invalid_query(f"{where}: a field is 1 to {PATH_NAMES_MAX} names")
    return tuple(path)


def _documents(given: object) -> frozenset[str] | None:
    if given is None:
        return None
    if not isinstance(given, list):
        raise invalid_query("documents is a list of ids")
    ids = cast("list[Any]", given)
    if len(ids) > DOCUMENTS_MAX:
        raise query_too_complex(f"documents has at most {DOCUMENTS_MAX} ids")
    if not all(isinstance(item, str) and 1 <= len(item) <= names.PATH_BYTES_MAX for item in ids):
        raise invalid_query("documents is a list of ids")
    return frozenset(ids)


def _orders(given: object) -> tuple[OrderBy, ...]:
    if given is None:
        return ()
    if not isinstance(given, list) or len(cast("list[Any]", given)) > ORDERS_MAX:
        raise invalid_query(f"orderBy is a list of at most {ORDERS_MAX} fields")
    orders: list[OrderBy] = []
    for place, item in enumerate(cast("list[object]", given)):
        members = cast("dict[str, Any]", item) if isinstance(item, dict) else {}
        direction = members.get("direction", "asc")
        if not set(members) <= {"field", "fieldPath", "direction"} or direction not in ("asc", "desc"):
            raise invalid_query(f"orderBy {place}: it has field or fieldPath, and direction asc or desc")
        orders.append(OrderBy(_path(members, f"orderBy {place}"), direction == "desc"))
    return tuple(orders)


_RANKS: Final = {type(None): 0, bool: 1, int: 2, float: 2, str: 3, list: 4, dict: 5}


class Descending:
    """Turns an order round."""

    __slots__ = ("key",)

    def __init__(self, key: Any) -> None:
        self.key = key

    def __lt__(self, other: Descending) -> bool:
        return other.key < self.key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Descending) and other.key == self.key

    __hash__ = None  # type: ignore[assignment]


def sort_values(document: dict[str, Any], order: tuple[OrderBy, ...]) -> list[Any]:
    """What a document is ordered by, each value after its rank; a missing field comes first."""
    found: list[Any] = []
    for path, _ in order:
        value: Any = document
        for name in path:
            value = cast("dict[str, Any]", value).get(name, _ABSENT) if type(value) is dict else _ABSENT
        rank = -1 if value is _ABSENT else _RANKS[type(value)]
        found.append([rank, value if rank in (1, 2, 3) else 0])
    return found


def sort_key(values: list[Any], document_id: str, order: tuple[OrderBy, ...]) -> tuple[Any, ...]:
    """The place of a document, last by its id."""
    parts = [
        Descending(tuple(value)) if one.descending else tuple(value)
        for value, one in zip(values, order, strict=True)
    ]
    return (*parts, document_id)


_ABSENT: Final = object()
