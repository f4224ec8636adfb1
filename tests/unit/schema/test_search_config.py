"""The `search` object: what is accepted, how it is shown, and the words of each refusal."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import orjson
import pytest

from tailrace.common.errors import TailraceError
from tailrace.schema.json_values import ABSENT, parse_pointer, resolve_pointer
from tailrace.schema.search_config import DefaultField, SearchConfig, parse_interval_ms, parse_search_config

BIND = [{"version": 1, "jsonPointer": "/at"}]

WHOLE: dict[str, Any] = {
    "profile": "evlog",
    "primaryTimestampField": "at",
    "defaultFields": [{"field": "message", "boost": 2}, "service"],
    "containsDefaultFields": ["message"],
    "aliases": {"svc": "service"},
    "fields": {
        "at": {"kind": "date", "bindings": BIND, "column": True, "exists": True, "sortable": True},
        "service": {
            "kind": "keyword",
            "normalizer": "lowercase_v1",
            "bindings": [
                {"version": 3, "jsonPointer": "/svc/name"},
                {"version": 1, "jsonPointer": "/service"},
            ],
            "exact": True,
            "prefix": True,
            "contains": True,
            "sortable": False,
        },
        "message": {
            "kind": "text",
            "analyzer": "unicode_word_v1",
            "bindings": BIND,
            "positions": True,
            "exact": True,
            "prefix": True,
        },
        "ms": {"kind": "float", "bindings": BIND, "column": True, "aggregatable": True},
        "ok": {"kind": "bool", "bindings": BIND, "exact": True},
    },
    "rollups": {
        "requests": {
            "include": "has:service",
            "dimensions": ["service", "ok"],
            "intervals": ["10s", "1m"],
            "measures": {
                "n": {"kind": "count", "include": "ok:true"},
                "lat": {"kind": "summary", "field": "ms", "histogram": "log2_v1"},
                "parts": {
                    "kind": "summary_parts",
                    "countJsonPointer": "/c",
                    "sumJsonPointer": "/s",
                    "minJsonPointer": "/min",
                    "maxJsonPointer": "/max",
                    "sketchJsonPointer": "/sketch",
                },
            },
        }
    },
}


def test_a_whole_search_object_is_shown_as_it_was_given_without_defaults() -> None:
    config = parse_search_config(copy.deepcopy(WHOLE))
    shown = copy.deepcopy(WHOLE)
    shown["defaultFields"] = [{"field": "message", "boost": 2}, {"field": "service"}]
    shown["containsDefaultFields"] = [{"field": "message"}]
    del shown["fields"]["service"]["sortable"]
    assert orjson.loads(orjson.dumps(config.to_json())) == shown
    assert parse_search_config(config.to_json()) == config
    assert msgspec.json.decode(msgspec.json.encode(config), type=SearchConfig) == config


def test_names_and_aliases_stand_for_fields() -> None:
    config = parse_search_config(WHOLE)
    assert config.resolve("svc") == config.resolve("service") == "service"
    assert config.resolve("nothing") is None
    assert config.default_fields == (DefaultField("message", 2), DefaultField("service", 1))


def test_the_newest_binding_that_is_not_younger_than_the_record_counts() -> None:
    field = parse_search_config(WHOLE).fields["service"]
    pointers = [field.pointer_at(version) for version in (0, 1, 2, 3, 9)]
    assert pointers == [None, "/service", "/service", "/svc/name", "/svc/name"]


def _with(path: str, value: object) -> dict[str, Any]:
    body = copy.deepcopy(WHOLE)
    *parents, last = path.split("/")
    at = body
    for key in parents:
        at = at[key]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return body


MANY = {f"f{number}": {"kind": "bool", "bindings": BIND} for number in range(501)}
COUNT = {"kind": "count"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "search must be an object"),
        ({}, "search.fields must be an object"),
        ({"fields": {}}, "search.fields must not be empty"),
        ({"fields": MANY}, "search.fields must have at most 500 fields"),
        (_with("indexes", []), "search.indexes is not supported"),
        (_with("profile", 1), "search.profile must be a string"),
        (_with("primaryTimestampField", "ms"), "search.primaryTimestampField must name a date field"),
        (_with("primaryTimestampField", "none"), "search.primaryTimestampField must name a date field"),
        (_with("fields/-x", {}), "search.fields.-x is not a valid name"),
        (_with("fields/" + "x" * 65, {}), f"search.fields.{'x' * 65} is not a valid name"),
        (_with("fields/Not", {}), "search.fields.Not is a reserved name"),
        (_with("aliases/has", "at"), "search.aliases.has is a reserved name"),
        (_with("aliases/at", "ms"), "search.aliases.at is a declared field"),
        (_with("aliases/x", "svc"), "search.aliases.x must name a declared field"),
        (
            _with("aliases", {f"a{n}": "at" for n in range(501)}),
            "search.aliases must have at most 500 aliases",
        ),
        (
            _with("fields/ms/kind", "number"),
            "search.fields.ms.kind must be keyword, text, integer, float, date or bool",
        ),
        (
            _with("fields/ms/kind", ["float"]),
            "search.fields.ms.kind must be keyword, text, integer, float, date or bool",
        ),
        (_with("fields/ms/index", True), "search.fields.ms.index is not supported"),
        (_with("fields/ms/exact", 1), "search.fields.ms.exact must be a boolean"),
        (_with("fields/ms/prefix", True), "search.fields.ms.prefix is not supported for typed fields"),
        (_with("fields/ms/contains", True), "search.fields.ms.contains is not supported for typed fields"),
        (_with("fields/ms/positions", True), "search.fields.ms.positions is not supported for typed fields"),
        (_with("fields/ok/prefix", True), "search.fields.ok.prefix is not supported for typed fields"),
        (
            _with("fields/ms/normalizer", "identity_v1"),
            "search.fields.ms.normalizer is not supported for typed fields",
        ),
        (
            _with("fields/ms/analyzer", "unicode_word_v1"),
            "search.fields.ms.analyzer is not supported for typed fields",
        ),
        (
            _with("fields/service/analyzer", "unicode_word_v1"),
            "search.fields.service.analyzer is not supported for keyword fields",
        ),
        (
            _with("fields/service/positions", True),
            "search.fields.service.positions is not supported for keyword fields",
        ),
        (
            _with("fields/service/normalizer", "upper"),
            "search.fields.service.normalizer must be identity_v1 or lowercase_v1",
        ),
        (
            _with("fields/message/analyzer", None),
            "search.fields.message.analyzer is required for text fields",
        ),
        (_with("fields/message/analyzer", "x"), "search.fields.message.analyzer must be unicode_word_v1"),
        (
            _with("fields/message/column", True),
            "search.fields.message.column is not supported for text fields",
        ),
        (
            _with("fields/message/sortable", True),
            "search.fields.message.sortable is not supported for text fields",
        ),
        (
            _with("fields/message/aggregatable", True),
            "search.fields.message.aggregatable is not supported for text fields",
        ),
        (
            _with("fields/message/normalizer", "identity_v1"),
            "search.fields.message.normalizer is not supported for text fields",
        ),
        (_with("fields/at/bindings", None), "search.fields.at.bindings must be an array"),
        (_with("fields/at/bindings", []), "search.fields.at.bindings must not be empty"),
        (_with("fields/at/bindings", BIND * 2), "search.fields.at.bindings[1].version 1 is duplicated"),
        (
            _with("fields/at/bindings", [{"version": 0, "jsonPointer": ""}]),
            "search.fields.at.bindings[0].version must be an integer of at least 1",
        ),
        (
            _with("fields/at/bindings", [{"version": True, "jsonPointer": ""}]),
            "search.fields.at.bindings[0].version must be an integer of at least 1",
        ),
        (
            _with("fields/at/bindings", [{"version": 1, "jsonPointer": "at"}]),
            "search.fields.at.bindings[0].jsonPointer must be a JSON pointer",
        ),
        (
            _with("fields/at/bindings", [{"version": 1, "jsonPointer": "/a~2"}]),
            "search.fields.at.bindings[0].jsonPointer must be a JSON pointer",
        ),
        (
            _with("fields/at/bindings", [{"version": 1, "path": "/a"}]),
            "search.fields.at.bindings[0].path is not supported",
        ),
        (_with("defaultFields", {}), "search.defaultFields must be an array"),
        (_with("defaultFields", [7]), "search.defaultFields[0] must be an object"),
        (_with("defaultFields", ["svc"]), "search.defaultFields[0].field must name a declared field"),
        (_with("defaultFields", ["ms"]), "search.defaultFields[0].field must name a text or keyword field"),
        (_with("defaultFields", ["message"] * 2), "search.defaultFields[1].field is duplicated"),
        *[
            (
                _with("defaultFields", [{"field": "message", "boost": boost}]),
                "search.defaultFields[0].boost must be a finite number greater than 0",
            )
            for boost in (0, -1, float("inf"), float("nan"), True, "2", 10**400)
        ],
        (_with("rollups", {f"r{n}": {} for n in range(65)}), "search.rollups must have at most 64 rollups"),
        (_with("rollups/or", {}), "search.rollups.or is a reserved name"),
        (_with("rollups/requests/x", 1), "search.rollups.requests.x is not supported"),
        (
            _with("primaryTimestampField", None),
            "search.rollups.requests.timestampField is required without search.primaryTimestampField",
        ),
        (
            _with("rollups/requests/timestampField", "ms"),
            "search.rollups.requests.timestampField must name a date field",
        ),
        (_with("rollups/requests/include", 1), "search.rollups.requests.include must be a string"),
        (
            _with("rollups/requests/dimensions", ["none"]),
            "search.rollups.requests.dimensions[0] must name a declared field",
        ),
        (
            _with("rollups/requests/dimensions", ["ok", "ms"]),
            "search.rollups.requests.dimensions[1] must name an exact field",
        ),
        (
            _with("rollups/requests/dimensions", ["ok", "ok"]),
            "search.rollups.requests.dimensions[1] is duplicated",
        ),
        (
            _with("rollups/requests/dimensions", [f"d{n}" for n in range(13)]),
            "search.rollups.requests.dimensions must have at most 12 items",
        ),
        (_with("rollups/requests/intervals", []), "search.rollups.requests.intervals must not be empty"),
        (
            _with("rollups/requests/intervals", ["0s"]),
            "search.rollups.requests.intervals[0] must be <n>ms, s, m, h or d",
        ),
        (
            _with("rollups/requests/intervals", ["9007199254740993d"]),
            "search.rollups.requests.intervals[0] must be <n>ms, s, m, h or d",
        ),
        (
            _with("rollups/requests/intervals", [f"{n + 1}s" for n in range(17)]),
            "search.rollups.requests.intervals must have at most 16 items",
        ),
        (_with("rollups/requests/measures", {}), "search.rollups.requests.measures must not be empty"),
        (
            _with("rollups/requests/measures", {f"m{n}": COUNT for n in range(33)}),
            "search.rollups.requests.measures must have at most 32 measures",
        ),
        (
            _with("rollups/requests/measures/n", {"kind": "sum"}),
            "search.rollups.requests.measures.n.kind must be count, summary or summary_parts",
        ),
        (
            _with("rollups/requests/measures/n", {"kind": "count", "field": "ms"}),
            "search.rollups.requests.measures.n.field is not supported",
        ),
        (
            _with("rollups/requests/measures/lat/field", "service"),
            "search.rollups.requests.measures.lat.field must name an aggregatable integer or float field",
        ),
        (
            _with("rollups/requests/measures/lat/histogram", "log10"),
            "search.rollups.requests.measures.lat.histogram must be log2_v1",
        ),
        (
            _with("rollups/requests/measures/parts/sumJsonPointer", None),
            "search.rollups.requests.measures.parts.sumJsonPointer must be a string",
        ),
    ],
)
def test_a_search_object_that_breaks_a_rule_is_refused_by_path(body: object, message: str) -> None:
    with pytest.raises(TailraceError) as refusal:
        parse_search_config(body)
    assert (refusal.value.code, refusal.value.message) == ("invalid_request", message)


def test_intervals_are_spans_of_milliseconds() -> None:
    assert [parse_interval_ms(text) for text in ("250ms", "10s", "1m", "2h", "7d", "1w", "01s", "")] == [
        250,
        10_000,
        60_000,
        7_200_000,
        604_800_000,
        None,
        None,
        None,
    ]


def test_pointers_follow_objects_and_arrays() -> None:
    record = {"a/b": {"~": [10, {"": 1}]}, "-": None}
    for text, expected in {
        "": record,
        "/a~1b/~0/0": 10,
        "/a~1b/~0/1/": 1,
        "/a~1b/~0/01": ABSENT,
        "/a~1b/~0/2": ABSENT,
        "/a~1b/~0/-": ABSENT,
        "/-": None,
        "/-/x": ABSENT,
        "/none": ABSENT,
    }.items():
        tokens = parse_pointer(text)
        assert tokens is not None
        assert resolve_pointer(record, tokens) == expected
    assert [parse_pointer(text) for text in ("a", "/~", "/~2", "/a~")] == [None] * 4
