"""The `search` object of a registry: fields, aliases, default fields and rollups.

A field says where its values are in a record, their kind, and which queries it supports. A rollup says which
records are aggregated, over which intervals and dimensions, and what is measured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final, Literal

import msgspec
from msgspec import Struct

from tailrace.schema.json_values import (
    expect_array,
    expect_bool,
    expect_object,
    expect_string,
    invalid_request,
    parse_pointer,
    shorten,
)

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
    """The pointer of a field from a schema version on."""

    version: int
    json_pointer: str


class Field(Struct, frozen=True, omit_defaults=True):
    """A searchable field. Its JSON form omits defaults."""

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
        """The pointer at a schema version: that of the newest binding up to it."""
        best: Binding | None = None
        for binding in self.bindings:
            if binding.version <= version and (best is None or binding.version > best.version):
                best = binding
        return None if best is None else best.json_pointer


def check_name(name: str, path: str) -> str:
    """Check a name of a field, alias, rollup or measure, which must be usable in queries."""
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
    """Parse an entry of `search.fields`."""
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
            raise invalid_request(f"{at}.version {version} is duplicated")
        bindings[version] = Binding(version, check_pointer(given.get("jsonPointer"), f"{at}.jsonPointer"))
    return tuple(bindings.values())


def _is_text(text: str) -> bool:
    """Whether a text can be encoded: a lone surrogate cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


DIMENSIONS_MAX: Final = 12
INTERVALS_MAX: Final = 16
MEASURES_MAX: Final = 32
INTERVAL_MS_MAX: Final = 2**53 - 1

_INTERVAL = re.compile(r"([1-9][0-9]{0,15})(ms|s|m|h|d)")
_UNIT_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_ROLLUP_KEYS: Final = frozenset({"timestampField", "include", "dimensions", "intervals", "measures"})
_PARTS: Final = ("countJsonPointer", "sumJsonPointer", "minJsonPointer", "maxJsonPointer")
_MEASURE_KEYS: Final[dict[str, frozenset[str]]] = {
    "count": frozenset({"kind", "include"}),
    "summary": frozenset({"kind", "field", "histogram"}),
    "summary_parts": frozenset({"kind", *_PARTS, "histogramJsonPointer", "sketchJsonPointer"}),
}


class Measure(Struct, frozen=True, omit_defaults=True, rename="camel"):
    """A measure of a rollup. Which members are set depends on the kind."""

    kind: Literal["count", "summary", "summary_parts"]
    include: str | None = None
    field: str | None = None
    histogram: str | None = None
    count_json_pointer: str | None = None
    sum_json_pointer: str | None = None
    min_json_pointer: str | None = None
    max_json_pointer: str | None = None
    histogram_json_pointer: str | None = None
    sketch_json_pointer: str | None = None


class Rollup(Struct, frozen=True, omit_defaults=True, rename="camel"):
    """Aggregates by interval and dimensions. The default timestamp field is the primary one."""

    intervals: tuple[str, ...]
    measures: dict[str, Measure]
    timestamp_field: str | None = None
    include: str | None = None
    dimensions: tuple[str, ...] = ()


def parse_interval_ms(text: str) -> int | None:
    """An interval such as `10s` in milliseconds; None if it is invalid."""
    match = _INTERVAL.fullmatch(text)
    if not match:
        return None
    span_ms = int(match[1]) * _UNIT_MS[match[2]]
    return span_ms if span_ms <= INTERVAL_MS_MAX else None


def parse_rollup(value: object, path: str, fields: Mapping[str, Field], primary: str | None) -> Rollup:
    """Parse an entry of `search.rollups`. Its includes are queries, which `search` checks."""
    given = expect_object(value, path, _ROLLUP_KEYS)
    timestamp_field = _text(given, "timestampField", path)
    if timestamp_field is None and primary is None:
        raise invalid_request(f"{path}.timestampField is required without search.primaryTimestampField")
    if timestamp_field is not None:
        field = fields.get(timestamp_field)
        if field is None or field.kind != "date":
            raise invalid_request(f"{path}.timestampField must name a date field")
    return Rollup(
        timestamp_field=timestamp_field,
        include=_text(given, "include", path),
        dimensions=_dimensions(given.get("dimensions", []), f"{path}.dimensions", fields),
        intervals=_intervals(given.get("intervals"), f"{path}.intervals"),
        measures=_measures(given.get("measures"), f"{path}.measures", fields),
    )


def _text(given: dict[str, object], key: str, path: str) -> str | None:
    return expect_string(given[key], f"{path}.{key}") if key in given else None


def _unique(value: object, path: str, length_max: int) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for index, item in enumerate(expect_array(value, path, length_max)):
        text = expect_string(item, f"{path}[{index}]")
        if text in found:
            raise invalid_request(f"{path}[{index}] is duplicated")
        found[text] = None
    return tuple(found)


def _dimensions(value: object, path: str, fields: Mapping[str, Field]) -> tuple[str, ...]:
    names = _unique(value, path, DIMENSIONS_MAX)
    for index, name in enumerate(names):
        if name not in fields:
            raise invalid_request(f"{path}[{index}] must name a declared field")
        if not fields[name].exact or fields[name].kind == "text":
            raise invalid_request(f"{path}[{index}] must name an exact field")
    return names


def _intervals(value: object, path: str) -> tuple[str, ...]:
    intervals = _unique(value, path, INTERVALS_MAX)
    if not intervals:
        raise invalid_request(f"{path} must not be empty")
    for index, text in enumerate(intervals):
        if parse_interval_ms(text) is None:
            raise invalid_request(f"{path}[{index}] must be <n>ms, s, m, h or d")
    return intervals


def _measures(value: object, path: str, fields: Mapping[str, Field]) -> dict[str, Measure]:
    given = expect_object(value, path)
    if not given:
        raise invalid_request(f"{path} must not be empty")
    if len(given) > MEASURES_MAX:
        raise invalid_request(f"{path} must have at most {MEASURES_MAX} measures")
    return {
        check_name(name, path): _measure(item, f"{path}.{shorten(name)}", fields)
        for name, item in given.items()
    }


def _measure(value: object, path: str, fields: Mapping[str, Field]) -> Measure:
    kind = expect_object(value, path).get("kind")
    if kind == "count":
        given = expect_object(value, path, _MEASURE_KEYS["count"])
        return Measure(kind="count", include=_text(given, "include", path))
    if kind == "summary":
        given = expect_object(value, path, _MEASURE_KEYS["summary"])
        name = expect_string(given.get("field"), f"{path}.field")
        field = fields.get(name)
        if field is None or not field.aggregatable or field.kind not in ("integer", "float"):
            raise invalid_request(f"{path}.field must name an aggregatable integer or float field")
        histogram = _text(given, "histogram", path)
        if histogram not in (None, "log2_v1"):
            raise invalid_request(f"{path}.histogram must be log2_v1")
        return Measure(kind="summary", field=name, histogram=histogram)
    if kind == "summary_parts":
        given = expect_object(value, path, _MEASURE_KEYS["summary_parts"])
        parts = [check_pointer(given.get(key), f"{path}.{key}") for key in _PARTS]
        rest = [
            check_pointer(given[key], f"{path}.{key}") if key in given else None
            for key in ("histogramJsonPointer", "sketchJsonPointer")
        ]
        return Measure("summary_parts", None, None, None, *parts, *rest)
    raise invalid_request(f"{path}.kind must be count, summary or summary_parts")


__all__ = [
    "Binding",
    "DefaultField",
    "Field",
    "Kind",
    "Measure",
    "Rollup",
    "SearchConfig",
    "parse_interval_ms",
    "parse_search_config",
]

FIELDS_MAX: Final = 500
ALIASES_MAX: Final = 500
ROLLUPS_MAX: Final = 64
PROFILE_CHARACTERS_MAX: Final = 64

_SEARCH_KEYS: Final = frozenset(
    {
        "profile",
        "primaryTimestampField",
        "defaultFields",
        "containsDefaultFields",
        "aliases",
        "fields",
        "rollups",
    }
)


class DefaultField(Struct, frozen=True, omit_defaults=True):
    """A field that words without a field are searched in, and the boost of its matches."""

    field: str
    boost: int | float = 1


class SearchConfig(Struct, frozen=True, omit_defaults=True, rename="camel"):
    """The search configuration of a stream. Field names are the keys of `fields`."""

    fields: dict[str, Field]
    profile: str | None = None
    primary_timestamp_field: str | None = None
    default_fields: tuple[DefaultField, ...] = ()
    contains_default_fields: tuple[DefaultField, ...] = ()
    aliases: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    rollups: dict[str, Rollup] = msgspec.field(default_factory=dict[str, Rollup])

    def resolve(self, name: str) -> str | None:
        """The declared field of a name or an alias."""
        name = self.aliases.get(name, name)
        return name if name in self.fields else None

    def to_json(self) -> dict[str, object]:
        """As in a registry: defaults are omitted."""
        return msgspec.json.decode(msgspec.json.encode(self))


def parse_search_config(body: object) -> SearchConfig:
    """Parse a `search` object. The queries in rollup includes are checked elsewhere."""
    given = expect_object(body, "search", _SEARCH_KEYS)
    fields = _fields(given.get("fields"))
    primary = _name(given, "primaryTimestampField")
    if primary is not None and (primary not in fields or fields[primary].kind != "date"):
        raise invalid_request("search.primaryTimestampField must name a date field")
    profile = _name(given, "profile")
    if profile is not None and len(profile) > PROFILE_CHARACTERS_MAX:
        raise invalid_request(f"search.profile must have at most {PROFILE_CHARACTERS_MAX} characters")
    return SearchConfig(
        fields=fields,
        profile=None if profile is None else shorten(profile),
        primary_timestamp_field=primary,
        default_fields=_default_fields(given, "defaultFields", fields),
        contains_default_fields=_default_fields(given, "containsDefaultFields", fields),
        aliases=_aliases(given.get("aliases", {}), fields),
        rollups=_rollups(given.get("rollups", {}), fields, primary),
    )


def _name(given: dict[str, object], key: str) -> str | None:
    return expect_string(given[key], f"search.{key}") if key in given else None


def _fields(value: object) -> dict[str, Field]:
    given = expect_object(value, "search.fields")
    if not given:
        raise invalid_request("search.fields must not be empty")
    if len(given) > FIELDS_MAX:
        raise invalid_request(f"search.fields must have at most {FIELDS_MAX} fields")
    return {
        check_name(name, "search.fields"): parse_field(item, f"search.fields.{shorten(name)}")
        for name, item in given.items()
    }


def _aliases(value: object, fields: dict[str, Field]) -> dict[str, str]:
    given = expect_object(value, "search.aliases")
    if len(given) > ALIASES_MAX:
        raise invalid_request(f"search.aliases must have at most {ALIASES_MAX} aliases")
    aliases: dict[str, str] = {}
    for name, target in given.items():
        check_name(name, "search.aliases")
        if name in fields:
            raise invalid_request(f"search.aliases.{name} is a declared field")
        if not isinstance(target, str) or target not in fields:
            raise invalid_request(f"search.aliases.{name} must name a declared field")
        aliases[name] = target
    return aliases


def _default_fields(given: dict[str, object], key: str, fields: dict[str, Field]) -> tuple[DefaultField, ...]:
    path = f"search.{key}"
    found: dict[str, DefaultField] = {}
    for index, item in enumerate(expect_array(given.get(key, []), path, FIELDS_MAX)):
        at = f"{path}[{index}]"
        entry: dict[str, object] = (
            {"field": item} if isinstance(item, str) else expect_object(item, at, ("field", "boost"))
        )
        name = expect_string(entry.get("field"), f"{at}.field")
        if name not in fields:
            raise invalid_request(f"{at}.field must name a declared field")
        if fields[name].kind not in ("text", "keyword"):
            raise invalid_request(f"{at}.field must name a text or keyword field")
        if name in found:
            raise invalid_request(f"{at}.field is duplicated")
        found[name] = DefaultField(name, _boost(entry.get("boost", 1), f"{at}.boost"))
    return tuple(found.values())


def _boost(value: object, path: str) -> int | float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        # An integer beyond the range of doubles has no finite boost.
        if 0 < value <= 1e308 and math.isfinite(value):
            return value if value <= 2**53 else float(value)
    raise invalid_request(f"{path} must be a finite number greater than 0")


def _rollups(value: object, fields: dict[str, Field], primary: str | None) -> dict[str, Rollup]:
    given = expect_object(value, "search.rollups")
    if len(given) > ROLLUPS_MAX:
        raise invalid_request(f"search.rollups must have at most {ROLLUPS_MAX} rollups")
    return {
        check_name(name, "search.rollups"): parse_rollup(
            item, f"search.rollups.{shorten(name)}", fields, primary
        )
        for name, item in given.items()
    }
