"""Lenses (`durable.lens/v1`): operations that turn a record of one schema version into the next.

Holds the conversions of values, the operations, and the parser, whose errors name the path of the invalid
member.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Final, cast

from msgspec import Struct

from tailrace.common.timestamps import date_time_ms, format_rfc3339_ms
from tailrace.schema.json_values import ABSENT, invalid_request, parse_pointer, resolve_pointer, shorten

TYPES: Final = frozenset({"string", "integer", "number", "boolean", "null"})
_INTEGER = re.compile(r"-?[0-9]{1,1000}")


class LensFailureError(Exception):
    """A lens cannot be applied to a record."""


class Conversion(Struct, frozen=True):
    """A table of values by their text, or one of the built-in functions."""

    table: dict[str, object] | None = None
    default: object = ABSENT
    builtin: str = ""

    def run(self, value: object) -> object:
        if self.table is None:
            return _BUILTINS[self.builtin](value)
        found = self.table.get(value_text(value), self.default)
        if found is ABSENT:
            raise LensFailureError("value is not in the map, which has no default")
        return found

    def results(self) -> list[object] | None:
        """All possible results; None if not known."""
        if self.table is None or self.default is ABSENT:
            return None
        return [*self.table.values(), self.default]


def json_type(value: object) -> str:
    """The JSON type. A number without a fraction is an integer, even if written as 1.0."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def has_type(value: object, wanted: str) -> bool:
    found = json_type(value)
    return found == wanted or (wanted == "number" and found == "integer")


def value_text(value: object) -> str:
    """The key of a value in a map: strings unchanged, numbers in their shortest form."""
    if isinstance(value, str):
        return value
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        if value.is_integer() and abs(value) < 1e21:
            return str(int(value))
        return repr(value).replace("e+", "e")
    return str(value)


def _lowercase(value: object) -> str:
    return _text(value).lower()


def _uppercase(value: object) -> str:
    return _text(value).upper()


def _string_to_int(value: object) -> int:
    text = _text(value)
    if not _INTEGER.fullmatch(text):
        raise LensFailureError("text is not an integer")
    return int(text)


def _int_to_string(value: object) -> str:
    return str(_integer(value))


def _to_unix_millis(value: object) -> int:
    found = date_time_ms(_text(value))
    if found is None:
        raise LensFailureError("text is not an RFC 3339 timestamp")
    return found


def _from_unix_millis(value: object) -> str:
    return format_rfc3339_ms(_integer(value))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise LensFailureError("value is not a string")
    return value


def _integer(value: object) -> int:
    if json_type(value) != "integer":
        raise LensFailureError("value is not an integer")
    assert isinstance(value, int | float)
    return int(value)


_BUILTINS = {
    "lowercase": _lowercase,
    "uppercase": _uppercase,
    "string_to_int": _string_to_int,
    "int_to_string": _int_to_string,
    "rfc3339_to_unix_millis": _to_unix_millis,
    "unix_millis_to_rfc3339": _from_unix_millis,
}
BUILTINS: Final = frozenset(_BUILTINS)
# Input and output types of the functions; those that are not total may fail on a value of their type.
INPUT_TYPES: Final = {
    name: "integer" if name in ("int_to_string", "unix_millis_to_rfc3339") else "string" for name in BUILTINS
}
OUTPUT_TYPES: Final = {
    name: "integer" if name in ("string_to_int", "rfc3339_to_unix_millis") else "string" for name in BUILTINS
}
PARTIAL: Final = frozenset({"string_to_int", "rfc3339_to_unix_millis"})


API_VERSION: Final = "durable.lens/v1"

PointerTokens = tuple[str, ...]


class LensOp(Struct, frozen=True):
    """One operation. `source` is where a value is read or changed, `target` where it is written."""

    op: str
    source: PointerTokens = ()
    target: PointerTokens = ()
    keeps_source: bool = False
    creates_host: bool = False
    schema: object = True  # of `add` and `remove`
    default: object = ABSENT
    from_type: str = ""
    to_type: str = ""
    forward: Conversion = Conversion()
    ops: tuple[LensOp, ...] = ()


class Lens(Struct, frozen=True):
    schema: str
    version_from: int
    version_to: int
    ops: tuple[LensOp, ...]
    document: dict[str, object]  # as in the registry

    def apply(self, record: object) -> object:
        """The record in the next version. May change its argument in place."""
        return apply_ops(self.ops, record)


def apply_ops(ops: tuple[LensOp, ...], record: object) -> object:
    """Apply all operations in order; raises LensFailureError."""
    for op in ops:
        record = _RUN[op.op](op, record)
    return record


def _rename(op: LensOp, record: object) -> object:
    value = _pop_value(record, op.source)
    _remove(record, op.source)
    return _put(record, op.target, value)


def _copy(op: LensOp, record: object) -> object:
    return _put(record, op.target, deep_copy(_pop_value(record, op.source)))


def _add(op: LensOp, record: object) -> object:
    return _put(record, op.target, deep_copy(op.default))


def _drop(op: LensOp, record: object) -> object:
    _pop_value(record, op.source)
    _remove(record, op.source)
    return record


def _hoist(op: LensOp, record: object) -> object:
    host = _pop_value(record, op.source[:-1])
    if not isinstance(host, dict):
        raise LensFailureError(f"{format_pointer(op.source[:-1])} is not an object")
    value = _pop_value(record, op.source)
    if op.keeps_source:
        value = deep_copy(value)
    else:
        _remove(record, op.source)
    return _put(record, op.target, value)


def _plunge(op: LensOp, record: object) -> object:
    value = _pop_value(record, op.source)
    if op.keeps_source:
        value = deep_copy(value)
    else:
        _remove(record, op.source)
    host = record
    for depth, token in enumerate(op.target[:-1]):
        if not isinstance(host, dict):
            raise LensFailureError(f"{format_pointer(op.target[:depth])} is not an object")
        inner = cast("dict[str, object]", host)
        if token not in inner and op.creates_host:
            inner[token] = {}
        host = inner.get(token, ABSENT)
    if not isinstance(host, dict):
        raise LensFailureError(f"{format_pointer(op.target[:-1])} is not an object")
    cast("dict[str, object]", host)[op.target[-1]] = value
    return record


def _wrap(op: LensOp, record: object) -> object:
    return _put(record, op.source, [_pop_value(record, op.source)])


def _head(op: LensOp, record: object) -> object:
    value = _pop_value(record, op.source)
    if not isinstance(value, list) or not value:
        raise LensFailureError(f"{format_pointer(op.source)} is not a non-empty array")
    return _put(record, op.source, cast("list[object]", value)[0])


def _apply_convert(op: LensOp, record: object) -> object:
    return _put(record, op.source, convert_value(op, _pop_value(record, op.source)))


def convert_value(op: LensOp, value: object) -> object:
    if not has_type(value, op.from_type):
        raise LensFailureError(f"{format_pointer(op.source)} is not of type {op.from_type}")
    result = op.forward.run(value)
    if not has_type(result, op.to_type):
        raise LensFailureError(f"{format_pointer(op.source)} does not become a value of type {op.to_type}")
    return result


def _in(op: LensOp, record: object) -> object:
    value = _pop_value(record, op.source)
    if not isinstance(value, dict):
        raise LensFailureError(f"{format_pointer(op.source)} is not an object")
    return _put(record, op.source, apply_ops(op.ops, cast("object", value)))


def _map(op: LensOp, record: object) -> object:
    value = _pop_value(record, op.source)
    if not isinstance(value, list):
        raise LensFailureError(f"{format_pointer(op.source)} is not an array")
    return _put(record, op.source, [apply_ops(op.ops, item) for item in cast("list[object]", value)])


_RUN: dict[str, Callable[[LensOp, object], object]] = {
    "rename": _rename,
    "copy": _copy,
    "add": _add,
    "remove": _drop,
    "hoist": _hoist,
    "plunge": _plunge,
    "wrap": _wrap,
    "head": _head,
    "convert": _apply_convert,
    "in": _in,
    "map": _map,
}


def _pop_value(record: object, tokens: PointerTokens) -> object:
    value = resolve_pointer(record, tokens)
    if value is ABSENT:
        raise LensFailureError(f"{format_pointer(tokens)} is absent")
    return value


def _remove(record: object, tokens: PointerTokens) -> None:
    """Remove a value that is known to exist."""
    parent = resolve_pointer(record, tokens[:-1])
    if isinstance(parent, dict):
        del cast("dict[str, object]", parent)[tokens[-1]]
    else:
        del cast("list[object]", parent)[int(tokens[-1])]


def _put(record: object, tokens: PointerTokens, value: object) -> object:
    """Set the value at a pointer whose parent must exist. Returns the record."""
    if not tokens:
        return value
    parent = resolve_pointer(record, tokens[:-1])
    if isinstance(parent, dict):
        cast("dict[str, object]", parent)[tokens[-1]] = value
        return record
    if not isinstance(parent, list):
        what = "absent" if parent is ABSENT else "not a container"
        raise LensFailureError(f"the parent of {format_pointer(tokens)} is {what}")
    items = cast("list[object]", parent)
    if resolve_pointer(items, tokens[-1:]) is not ABSENT:
        items[int(tokens[-1])] = value
    elif tokens[-1] == str(len(items)):
        items.append(value)
    else:
        raise LensFailureError(f"{format_pointer(tokens)} is outside its array")
    return record


def deep_copy(value: object) -> object:
    """A copy that shares no container with the original."""
    if isinstance(value, dict):
        return {key: deep_copy(item) for key, item in cast("dict[str, object]", value).items()}
    if isinstance(value, list):
        return [deep_copy(item) for item in cast("list[object]", value)]
    return value


def format_pointer(tokens: PointerTokens) -> str:
    """A pointer as text for messages."""
    if not tokens:
        return "the record"
    text = "".join("/" + token.replace("~", "~0").replace("/", "~1") for token in tokens)
    return text[:100].encode("utf-8", "replace").decode()


OPS_MAX: Final = 1000
MAP_ENTRIES_MAX: Final = 10_000
DEPTH_MAX: Final = 16

_ENVELOPE: Final = frozenset({"apiVersion", "schema", "from", "to", "description", "ops"})
_KEYS: Final[dict[str, tuple[frozenset[str], frozenset[str]]]] = {  # required, optional
    "rename": (frozenset({"from", "to"}), frozenset()),
    "copy": (frozenset({"from", "to"}), frozenset()),
    "add": (frozenset({"path", "schema"}), frozenset({"default"})),
    "remove": (frozenset({"path", "schema"}), frozenset({"default"})),
    "hoist": (frozenset({"host", "name", "to"}), frozenset({"removeFromHost"})),
    "plunge": (frozenset({"from", "host", "name"}), frozenset({"createHost", "removeFromSource"})),
    "wrap": (frozenset({"path", "mode"}), frozenset({"reverseMode"})),
    "head": (frozenset({"path"}), frozenset({"reverseMode"})),
    "convert": (frozenset({"path", "fromType", "toType", "forward", "backward"}), frozenset()),
    "in": (frozenset({"path", "ops"}), frozenset()),
    "map": (frozenset({"path", "ops"}), frozenset()),
}


def parse_lens(body: object) -> Lens:
    """Parse a lens from a request or a stored registry."""
    given = _object(body, "lens", _ENVELOPE)
    if given.get("apiVersion") != API_VERSION:
        raise _invalid_lens("apiVersion", f"must be {API_VERSION}")
    schema = _string(given, "schema", "schema")
    version_from, version_to = _version(given, "from"), _version(given, "to")
    if "description" in given:
        _string(given, "description", "description")
    return Lens(schema, version_from, version_to, _parse_ops(given.get("ops"), "ops", 1), given)


def _version(given: dict[str, object], key: str) -> int:
    value = given.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**53:
        raise _invalid_lens(key, "must be a version number")
    return value


def _parse_ops(value: object, path: str, depth: int) -> tuple[LensOp, ...]:
    if not isinstance(value, list) or not value:
        raise _invalid_lens(path, "must be a non-empty array")
    items = cast("list[object]", value)
    if len(items) > OPS_MAX:
        raise _invalid_lens(path, f"must have at most {OPS_MAX} operations")
    if depth > DEPTH_MAX:
        raise _invalid_lens(path, f"must not be nested deeper than {DEPTH_MAX} levels")
    return tuple(_parse_op(item, f"{path}[{index}]", depth) for index, item in enumerate(items))


def _parse_op(value: object, path: str, depth: int) -> LensOp:
    given = _object(value, path, None)
    kind = given.get("op")
    if not isinstance(kind, str) or kind not in _KEYS:
        raise _invalid_lens(f"{path}.op", f"must be one of {', '.join(_KEYS)}")
    required, optional = _KEYS[kind]
    _object(given, path, required | optional | {"op"})
    for key in sorted(required):
        if key not in given:
            raise _invalid_lens(f"{path}.{key}", "is missing")
    if kind in ("rename", "copy"):
        source = _parse_pointer_key(given, path, "from", root=kind == "copy")
        return LensOp(kind, source, _parse_pointer_key(given, path, "to", root=False))
    if kind in ("add", "remove"):
        place = _parse_pointer_key(given, path, "path", root=False)
        schema = given["schema"]
        if not isinstance(schema, dict | bool):
            raise _invalid_lens(f"{path}.schema", "must be a schema")
        default = given.get("default", ABSENT)
        return LensOp(kind, place, place, schema=cast("object", schema), default=default)
    if kind == "hoist":
        source = (*_parse_pointer_key(given, path, "host"), _string(given, "name", f"{path}.name"))
        keeps = not _flag(given, path, "removeFromHost")
        return LensOp(kind, source, _parse_pointer_key(given, path, "to", root=False), keeps_source=keeps)
    if kind == "plunge":
        target = (*_parse_pointer_key(given, path, "host"), _string(given, "name", f"{path}.name"))
        source = _parse_pointer_key(given, path, "from", root=False)
        creates, removes = _flag(given, path, "createHost"), _flag(given, path, "removeFromSource")
        return LensOp(kind, source, target, keeps_source=not removes, creates_host=creates)
    place = _parse_pointer_key(given, path, "path")
    if kind in ("in", "map"):
        return LensOp(kind, place, ops=_parse_ops(given["ops"], f"{path}.ops", depth + 1))
    if kind == "convert":
        return _parse_convert(given, path, place)
    _choice(given, path, "mode", "singleton")
    _choice(given, path, "reverseMode", "first" if kind == "wrap" else "singleton")
    return LensOp(kind, place)


def _parse_convert(given: dict[str, object], path: str, place: PointerTokens) -> LensOp:
    for key in ("fromType", "toType"):
        if not isinstance(given[key], str) or given[key] not in TYPES:
            raise _invalid_lens(f"{path}.{key}", f"must be one of {', '.join(sorted(TYPES))}")
    forward = _parse_conversion(given["forward"], f"{path}.forward")
    _parse_conversion(given["backward"], f"{path}.backward")
    types = {key: cast("str", given[key]) for key in ("fromType", "toType")}
    return LensOp("convert", place, from_type=types["fromType"], to_type=types["toType"], forward=forward)


def _parse_conversion(value: object, path: str) -> Conversion:
    given = _object(value, path, ("map", "default", "builtin"))
    if ("map" in given) == ("builtin" in given):
        raise _invalid_lens(path, "must have either map or builtin")
    if "builtin" in given:
        name = given["builtin"]
        if "default" in given:
            raise _invalid_lens(f"{path}.default", "is not supported")
        if not isinstance(name, str) or name not in BUILTINS:
            raise _invalid_lens(f"{path}.builtin", f"must be one of {', '.join(sorted(BUILTINS))}")
        return Conversion(builtin=name)
    table = _object(given["map"], f"{path}.map", None)
    if len(table) > MAP_ENTRIES_MAX:
        raise _invalid_lens(f"{path}.map", f"must have at most {MAP_ENTRIES_MAX} entries")
    for key, item in table.items():
        if isinstance(item, dict | list):
            raise _invalid_lens(f"{path}.map.{shorten(key)}", "must be a scalar")
    default = given.get("default", ABSENT)
    if isinstance(default, dict | list):
        raise _invalid_lens(f"{path}.default", "must be a scalar")
    return Conversion(table, default)


def _parse_pointer_key(given: dict[str, object], path: str, key: str, *, root: bool = True) -> PointerTokens:
    text = given[key]
    tokens = parse_pointer(text) if isinstance(text, str) else None
    if tokens is None or "-" in tokens:
        raise _invalid_lens(f"{path}.{key}", "must be a JSON pointer")
    if not tokens and not root:
        raise _invalid_lens(f"{path}.{key}", "must not be the root")
    return tokens


def _object(value: object, path: str, allowed: Collection[str] | None) -> dict[str, object]:
    if not isinstance(value, dict):
        raise _invalid_lens(path, "must be an object")
    given = cast("dict[str, object]", value)
    for key in given if allowed is not None else ():
        if key not in (allowed or ()):
            raise _invalid_lens(
                shorten(key) if path == "lens" else f"{path}.{shorten(key)}", "is not supported"
            )
    return given


def _string(given: dict[str, object], key: str, path: str) -> str:
    value = given.get(key)
    if not isinstance(value, str):
        raise _invalid_lens(path, "must be a string")
    return value


def _flag(given: dict[str, object], path: str, key: str) -> bool:
    value = given.get(key, True)
    if not isinstance(value, bool):
        raise _invalid_lens(f"{path}.{key}", "must be a boolean")
    return value


def _choice(given: dict[str, object], path: str, key: str, only: str) -> None:
    if key in given and given[key] != only:
        raise _invalid_lens(f"{path}.{key}", f'must be "{only}"')


def _invalid_lens(path: str, reason: str) -> Exception:
    return invalid_request(f"invalid lens: {path} {reason}")
