"""Lenses from requests: every key checked, pointers parsed, shapes refused with the path that breaks them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, cast

from tailrace.schema.body import invalid_request, shorten
from tailrace.schema.convert import BUILTINS, TYPES, Conversion
from tailrace.schema.lens import API_VERSION, Lens, LensOp, PointerTokens
from tailrace.schema.pointer import ABSENT, parse_pointer

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
    """A lens from a request or from a stored registry."""
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
        raise _invalid_lens(path, f"must not lie deeper than {DEPTH_MAX} levels")
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
