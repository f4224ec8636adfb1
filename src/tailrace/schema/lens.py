"""Lenses (`durable.lens/v1`): how a record of one version becomes a record of the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, cast

from msgspec import Struct

from tailrace.schema.convert import Conversion, LensFailureError, has_type
from tailrace.schema.pointer import ABSENT, resolve_pointer

API_VERSION: Final = "durable.lens/v1"

PointerTokens = tuple[str, ...]


class LensOp(Struct, frozen=True):
    """One step. `source` is where a value is taken from or changed, `target` where it goes."""

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
    document: dict[str, object]  # as it is shown in the registry

    def apply(self, record: object) -> object:
        """The record in the next version. The one given is used up: it may be changed in place."""
        return apply_ops(self.ops, record)


def apply_ops(ops: tuple[LensOp, ...], record: object) -> object:
    """Applies every operation in order, or raises LensFailureError."""
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
    """Takes away what is known to be there."""
    parent = resolve_pointer(record, tokens[:-1])
    if isinstance(parent, dict):
        del cast("dict[str, object]", parent)[tokens[-1]]
    else:
        del cast("list[object]", parent)[int(tokens[-1])]


def _put(record: object, tokens: PointerTokens, value: object) -> object:
    """Sets what is at a place; the place before it must be there. Returns the record."""
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
    """A pointer for people."""
    if not tokens:
        return "the record"
    text = "".join("/" + token.replace("~", "~0").replace("/", "~1") for token in tokens)
    return text[:100].encode("utf-8", "replace").decode()
