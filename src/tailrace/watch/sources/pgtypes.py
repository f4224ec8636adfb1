"""Values of PostgreSQL as JSON: from the text that the database prints to what a document holds."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, cast

import orjson

BOOL, BYTEA, INT8, INT2, INT4, JSON, FLOAT4, FLOAT8 = 16, 17, 20, 21, 23, 114, 700, 701
TIMESTAMPTZ, NUMERIC, JSONB = 1184, 1700, 3802
DEPTH_MAX: Final = 60  # of one value: a document is nested at most 64 levels deep
DOMAINS_MAX: Final = 16
USER_TYPES: Final = 16_384  # what is not built in has a number from here on
INT_DIGITS: Final = 20  # sign and digits of the longest that 64 bits can hold

_INT_MIN: Final = -(2**63)
_INT_MAX: Final = 2**63 - 1
_INSTANT: Final = re.compile(r"(\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d(?:\.\d+)?)\+00(?::00)?\Z")
_ELEMENT: Final = re.compile(r'"((?:[^"\\]|\\.)*+)"|([^",{}]+)', re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)

Converter = Callable[[str], Any]


class TypeConverters:
    """How each type is converted. Arrays and domains are those of the database, by their numbers."""

    def __init__(
        self,
        arrays: Mapping[int, int],
        domains: Mapping[int, int],
        others: Collection[int] = (),
        *,
        numeric: str = "string",
    ) -> None:
        self._arrays = arrays
        self._domains = domains
        self._others = others
        self._known: dict[int, Converter] = dict(_PLAIN)
        if numeric == "double":
            self._known[NUMERIC] = _double

    def is_new(self, type_oid: int) -> bool:
        """A type that somebody made since the types were looked at."""
        known = type_oid in self._arrays or type_oid in self._domains or type_oid in self._others
        return type_oid >= USER_TYPES and not known

    def converter(self, type_oid: int) -> Converter:
        found = self._known.get(type_oid)
        if found is None:
            found = self._known[type_oid] = self._made(type_oid)
        return found

    def _made(self, type_oid: int) -> Converter:
        for _ in range(DOMAINS_MAX):
            if type_oid not in self._domains:
                break
            type_oid = self._domains[type_oid]
        element = self._arrays.get(type_oid)
        if element is None:
            return self._known.get(type_oid, str)
        of_element = self.converter(element)
        return lambda text: parse_array(text, of_element)


def dump_row(row: Mapping[str, Any]) -> bytes:
    """The row as a document. Half a surrogate pair, which JSON lets in by an escape, is a question mark."""
    try:
        return orjson.dumps(row)
    except TypeError:
        return orjson.dumps(_scrubbed(row))


def parse_array(text: str, convert: Converter) -> Any:
    """`{1,NULL,"a b"}`, nested as deep as it likes; bounds that do not begin at 1 are left out."""
    begin = text.find("{")
    if begin < 0:
        return text
    stack: list[list[Any]] = []
    at = begin
    while True:
        mark = text[at]
        if mark == "{":
            stack.append([])
            at += 1
        elif mark == "}":
            done = stack.pop()
            at += 1
            if not stack:
                return done
            stack[-1].append(done)
        elif mark == ",":
            at += 1
        else:
            found = _ELEMENT.match(text, at)
            if found is None:
                return text
            quoted, plain = found.group(1, 2)
            if quoted is not None:
                stack[-1].append(convert(_ESCAPE.sub(r"\1", quoted)))
            else:
                stack[-1].append(None if plain == "NULL" else convert(plain))
            at = found.end()


def _bool(text: str) -> bool:
    return text == "t"


def _double(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _bytes(text: str) -> str:
    return base64.b64encode(bytes.fromhex(text.removeprefix("\\x"))).decode()


def _instant(text: str) -> str:
    """RFC 3339; what that cannot say (infinity, years before Christ) stays as it is."""
    found = _INSTANT.match(text)
    return text if found is None else f"{found[1]}T{found[2]}Z"


def parse_json_value(text: str) -> Any:
    """The value; one that is nested deeper than a document can be stays a text."""
    try:
        return _finite(json.loads(text, parse_int=_int), DEPTH_MAX)
    except RecursionError:
        return text


def _int(text: str) -> int | float | None:
    """Beyond 64 bits it is a double, and beyond that nothing."""
    if len(text) > INT_DIGITS:
        return _double(text)
    value = int(text)
    return value if _INT_MIN <= value <= _INT_MAX else _double(text)


def _finite(value: Any, depth: int) -> Any:
    kind = cast("type[Any]", type(value))
    if kind is float:
        return value if math.isfinite(value) else None
    if kind is dict or kind is list:
        if depth == 0:
            raise RecursionError
        if kind is dict:
            items = cast("dict[str, Any]", value).items()
            return {name: _finite(item, depth - 1) for name, item in items}
        return [_finite(item, depth - 1) for item in value]
    return value


def _scrubbed(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {_scrubbed(name): _scrubbed(item) for name, item in items}
    if isinstance(value, list):
        return [_scrubbed(item) for item in cast("list[Any]", value)]
    return value


_PLAIN: Final[dict[int, Converter]] = {
    BOOL: _bool,
    BYTEA: _bytes,
    INT2: int,
    INT4: int,
    INT8: int,
    FLOAT4: _double,
    FLOAT8: _double,
    JSON: parse_json_value,
    JSONB: parse_json_value,
    TIMESTAMPTZ: _instant,
    NUMERIC: str,
}
