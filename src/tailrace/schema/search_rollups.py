"""Rollups: which records are counted together, over which spans of time, and what is measured."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal

from msgspec import Struct

from tailrace.schema.body import expect_array, expect_object, expect_string, invalid_request, shorten
from tailrace.schema.search_fields import Field, check_name, check_pointer

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
    """What a rollup keeps of its records. Which keys are set depends on the kind."""

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
    """Counts per span of time and dimensions. Without a timestamp field it uses the primary one."""

    intervals: tuple[str, ...]
    measures: dict[str, Measure]
    timestamp_field: str | None = None
    include: str | None = None
    dimensions: tuple[str, ...] = ()


def parse_interval_ms(text: str) -> int | None:
    """`10s` and the like in milliseconds; None if it is no interval."""
    match = _INTERVAL.fullmatch(text)
    if not match:
        return None
    span_ms = int(match[1]) * _UNIT_MS[match[2]]
    return span_ms if span_ms <= INTERVAL_MS_MAX else None


def parse_rollup(value: object, path: str, fields: Mapping[str, Field], primary: str | None) -> Rollup:
    """One entry of `search.rollups`. Includes are queries and are checked where queries are known."""
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
            raise invalid_request(f"{path}[{index}] is named twice")
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
