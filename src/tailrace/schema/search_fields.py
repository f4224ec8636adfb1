"""Searchable fields: where their values lie in a record, of what kind they are, what may be asked of them."""

from __future__ import annotations

import re
from typing import Final, Literal

from msgspec import Struct

from tailrace.schema.body import (
    expect_array,
    expect_bool,
    expect_object,
    expect_string,
    invalid_request,
    shorten,
)
from tailrace.schema.pointer import parse_pointer

Kind = Literal["keyword", "text", "integer", "float", "date", "bool"]

KINDS: Final = ("keyword", "text", "integer", "float", "date", "bool")
NORMALIZERS: Final = ("identity_v1", "lowercase_v1")
ANALYZERS: Final = ("unicode_word_v1",)
BINDINGS_MAX: Final = 1000
VERSION_MAX: Final = 2**31 - 1

_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,63}")
_RESERVED = frozenset({"has", "contains", "and", "or", "not"})

_TYPED: Final = frozenset({"exact", "column", "exists", "sortable", "aggregatable"})
_FLAGS: Final[dict[str, frozenset[str]]] = {
    "keyword": _TYPED | {"prefix", "contains"},
    "text": frozenset({"exact", "prefix", "exists", "positions", "contains"}),
    "integer": _TYPED,
    "float": _TYPED,
    "date": _TYPED,
    "bool": _TYPED,
}
_ALL_FLAGS: Final = (
    "exact",
    "prefix",
    "column",
    "exists",
    "sortable",
    "aggregatable",
    "positions",
    "contains",
)
_FIELD_KEYS: Final = frozenset({"kind", "bindings", "normalizer", "analyzer", *_ALL_FLAGS})


class Binding(Struct, frozen=True, rename={"json_pointer": "jsonPointer"}):
    """Where the values lie, from a schema version on."""

    version: int
    json_pointer: str


class Field(Struct, frozen=True, omit_defaults=True):
    """One searchable field. Its JSON form leaves out what is at its default."""

    kind: Kind
    bindings: tuple[Binding, ...]
    normalizer: str | None = None
    analyzer: str | None = None
    exact: bool = False
    prefix: bool = False
    column: bool = False
    exists: bool = False
    sortable: bool = False
    aggregatable: bool = False
    positions: bool = False
    contains: bool = False

    def pointer_at(self, version: int) -> str | None:
        """The pointer for records at a schema version: the newest binding that is not younger."""
        best: Binding | None = None
        for binding in self.bindings:
            if binding.version <= version and (best is None or binding.version > best.version):
                best = binding
        return None if best is None else best.json_pointer


def check_name(name: str, path: str) -> str:
    """The name of a field, alias, rollup or measure: such that the query language can say it."""
    if not _NAME.fullmatch(name):
        raise invalid_request(f"{path}.{shorten(name)} is not a valid name")
    if name.lower() in _RESERVED:
        raise invalid_request(f"{path}.{name} is a reserved name")
    return name


def check_pointer(value: object, path: str) -> str:
    text = expect_string(value, path)
    if parse_pointer(text) is None or not _is_text(text):
        raise invalid_request(f"{path} must be a JSON pointer")
    return text


def parse_field(value: object, path: str) -> Field:
    """One entry of `search.fields`."""
    given = expect_object(value, path, _FIELD_KEYS)
    kind = given.get("kind")
    if kind not in KINDS:
        raise invalid_request(f"{path}.kind must be keyword, text, integer, float, date or bool")
    called = kind if kind in ("keyword", "text") else "typed"
    flags: dict[str, bool] = {}
    for flag in _ALL_FLAGS:
        if flag in given and expect_bool(given[flag], f"{path}.{flag}"):
            if flag not in _FLAGS[kind]:
                raise invalid_request(f"{path}.{flag} is not supported for {called} fields")
            flags[flag] = True
    normalizer = _choice(given, "normalizer", NORMALIZERS, path)
    if normalizer is not None and kind != "keyword":
        raise invalid_request(f"{path}.normalizer is not supported for {called} fields")
    analyzer = _choice(given, "analyzer", ANALYZERS, path)
    if analyzer is not None and kind != "text":
        raise invalid_request(f"{path}.analyzer is not supported for {called} fields")
    if analyzer is None and kind == "text":
        raise invalid_request(f"{path}.analyzer is required for text fields")
    bindings = _bindings(given.get("bindings"), f"{path}.bindings")
    return Field(kind=kind, bindings=bindings, normalizer=normalizer, analyzer=analyzer, **flags)


def _choice(given: dict[str, object], key: str, choices: tuple[str, ...], path: str) -> str | None:
    if key not in given:
        return None
    value = given[key]
    if not isinstance(value, str) or value not in choices:
        raise invalid_request(f"{path}.{key} must be {' or '.join(choices)}")
    return value


def _bindings(value: object, path: str) -> tuple[Binding, ...]:
    items = expect_array(value, path, BINDINGS_MAX)
    if not items:
        raise invalid_request(f"{path} must not be empty")
    bindings: dict[int, Binding] = {}
    for index, item in enumerate(items):
        at = f"{path}[{index}]"
        given = expect_object(item, at, ("version", "jsonPointer"))
        version = given.get("version")
        if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= VERSION_MAX:
            raise invalid_request(f"{at}.version must be an integer of at least 1")
        if version in bindings:
            raise invalid_request(f"{at}.version {version} is bound twice")
        bindings[version] = Binding(version, check_pointer(given.get("jsonPointer"), f"{at}.jsonPointer"))
    return tuple(bindings.values())


def _is_text(text: str) -> bool:
    """Whether it can be stored: an unpaired surrogate cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
