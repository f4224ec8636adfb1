"""Schemas: which documents are taken, what is said about records, and that nothing is ever fetched."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from tailrace.common.errors import TailraceError
from tailrace.schema.json_schema import SchemaDocument, check_schema, compile_schema
from tailrace.schema.json_values import UnusableRecordError, decode_json_record, encode_json_record
from tailrace.schema.timestamps import from_unix_ms, is_date_time, to_unix_ms

DRAFT_7 = "http://json-schema.org/draft-07/schema#"


def refusal(schema: Any) -> str:
    with pytest.raises(TailraceError) as caught:
        check_schema(schema)
    assert caught.value.code == "invalid_request"
    return caught.value.message


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$schema": "http://json-schema.org/draft-04/schema#"}, "unsupported $schema http://json-schema"),
        ({"properties": {"a": {"$schema": "urn:mine"}}}, "unsupported $schema urn:mine"),
        ({"$schema": 5}, "invalid schema: /$schema must be a string"),
        ({"type": "text"}, "invalid schema: /type "),
        ({"properties": {"a": {"minimum": "x"}}}, "invalid schema: /properties/a/minimum "),
        ({"$ref": "#/$defs/absent"}, "invalid schema: (root) Pointer"),
        (5, "invalid schema: must be an object or a boolean"),
        (None, "invalid schema: must be an object or a boolean"),
        ({"properties": {"a": {"pattern": "(?=x)"}}}, "schema.properties.a.pattern: pattern not supported"),
        ({"patternProperties": {"(a)\\1": True}}, "schema.patternProperties.(a)\\1: pattern not supported"),
        ({"pattern": "((a{999}){999}){999}"}, "schema.pattern: pattern not supported"),
        (nested(64), "schema is nested deeper than 64 levels"),
        ({"description": "x" * 1024 * 1024}, "schema is larger than 1048576 bytes"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused_with_the_reason(schema: Any, message: str) -> None:
    assert refusal(schema).startswith(message)


@pytest.mark.parametrize(
    "reference",
    [
        "http://example.com/other.json",
        "https://json-schema.org/draft/2020-12/schema",
        "file:///etc/passwd",
        "other.json",
        "urn:registry:other#/$defs/a",
        "//example.com/x",
    ],
)
@pytest.mark.parametrize("keyword", ["$ref", "$dynamicRef"])
@pytest.mark.parametrize("where", ["root", "property", "unknown keyword"])
def test_s4_references_that_leave_the_document_are_refused_without_a_request(
    monkeypatch: pytest.MonkeyPatch, reference: str, keyword: str, where: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a schema must not cause a connection")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    node = {keyword: reference}
    schema = {"root": node, "property": {"properties": {"a": node}}, "unknown keyword": {"mine": node}}[where]
    assert refusal(schema) == "external $ref is not supported"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["id"]},
        {
            "$ref": "#/$defs/n",
            "$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}}, "required": ["id"]}},
        },
        {
            "$ref": "#n",
            "$defs": {"x": {"$anchor": "n", "properties": {"next": {"$ref": "#n"}}, "required": ["id"]}},
        },
        {
            "$id": "https://example.com/root",
            "$ref": "node",
            "$defs": {"n": {"$id": "node", "properties": {"next": {"$ref": "node"}}, "required": ["id"]}},
        },
        {
            "$dynamicRef": "#n",
            "$defs": {
                "x": {
                    "$dynamicAnchor": "n",
                    "properties": {"next": {"$dynamicRef": "#n"}},
                    "required": ["id"],
                }
            },
        },
        {
            "$schema": DRAFT_7,
            "$ref": "#/definitions/n",
            "definitions": {"n": {"properties": {"next": {"$ref": "#/definitions/n"}}, "required": ["id"]}},
        },
        {
            "$schema": DRAFT_7,
            "allOf": [{"$ref": "#n"}],
            "definitions": {"x": {"$id": "#n", "properties": {"next": {"$ref": "#n"}}, "required": ["id"]}},
        },
    ],
)
def test_s4_local_references_validate_recursively(schema: Any) -> None:
    check_schema(schema)
    validator = compile_schema(schema)
    assert validator.accepts({"id": 1, "next": {"id": 2, "next": {"id": 3}}})
    complaint = validator.complaint({"id": 1, "next": {"id": 2, "next": {}}})
    assert complaint is not None
    assert "/next/next" in complaint


def test_a_property_or_value_that_is_called_ref_is_no_reference() -> None:
    schema = {
        "properties": {"$ref": {"type": "string"}},
        "enum": [{"$ref": "http://example.com"}],
        "default": {"$ref": "http://example.com"},
    }
    assert compile_schema(schema).accepts({"$ref": "http://example.com"})


def test_references_lead_to_places() -> None:
    document = SchemaDocument(
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"$ref": "#x"}, "c": {"$anchor": "x"}}}
    )
    assert document.target(()) == ("$defs", "a/b")
    assert document.target(("$defs", "a/b")) == ("$defs", "c")


def test_what_is_wrong_with_a_record_is_told_by_place_at_most_five_things() -> None:
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in "abcdefg"}}
    validator = compile_schema(schema)
    assert validator.complaint({"a": 1}) is None
    assert validator.complaint(5) == '(root) value is not of type "object"'
    complaint = validator.complaint(dict.fromkeys("abcdefg", "x"))
    assert complaint is not None
    assert complaint.split("; ") == [f'/{name} value is not of type "integer"' for name in "abcde"]
    assert "secret" not in str(validator.complaint({"a": "secret"}))


def test_boolean_schemas_and_odd_records() -> None:
    for value in (1, "x", [], None, {}, {"a": "\ud800"}, 10**40):
        assert compile_schema(True).accepts(value)
        assert compile_schema({}).accepts(value)
        assert not compile_schema(False).accepts(value)
    assert compile_schema({"type": "string"}).accepts("\ud800")
    assert compile_schema({"type": "integer"}).complaint("\udc00x") == '(root) value is not of type "integer"'
    assert compile_schema({"type": "integer"}).accepts(5.0)
    deep: Any = 1
    for _ in range(512):
        deep = [deep]
    assert compile_schema({"items": {"$ref": "#"}}).accepts(deep)


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("1970-01-01T00:00:00.123456789Z", 123),
        ("1970-01-01T01:00:00+01:00", 0),
        ("1969-12-31T23:59:59.999Z", -1),
        ("2024-02-29T23:59:59-23:59", 1709337539000),
        ("0000-01-01T00:00:00Z", -62167219200000),
        ("9999-12-31T23:59:59.999Z", 253402300799999),
    ],
)
def test_instants_of_the_calendar(text: str, ms: int) -> None:
    assert is_date_time(text)
    assert to_unix_ms(text) == ms


@pytest.mark.parametrize(
    "text",
    [
        "2023-02-29T00:00:00Z",
        "1900-02-29T00:00:00Z",
        "2024-04-31T00:00:00Z",
        "2024-13-01T00:00:00Z",
        "2024-00-01T00:00:00Z",
        "2024-01-00T00:00:00Z",
        "2024-01-01T24:00:00Z",
        "2024-01-01T00:60:00Z",
        "2024-01-01T00:00:60Z",
        "2024-01-01T00:00:00",
        "2024-01-01t00:00:00z",
        "2024-01-01 00:00:00Z",
        "2024-01-01T00:00:00.Z",
        "2024-01-01T00:00:00.1234567890Z",
        "2024-01-01T00:00:00+24:00",
        "2024-01-01T00:00:00+0100",
        "2024-01-01T00:00:00Z\n",
        "",
    ],
)
def test_texts_that_are_no_instant(text: str) -> None:
    assert not is_date_time(text)
    assert to_unix_ms(text) is None
    assert not compile_schema({"format": "date-time"}).accepts(text)


def test_only_date_time_is_asserted() -> None:
    assert compile_schema({"format": "email"}).accepts("no address")
    assert compile_schema({"format": "uuid"}).accepts("no id")
    assert compile_schema({"format": "date-time"}).accepts(5)
    assert compile_schema({"format": "date-time"}).accepts("2024-01-01T00:00:00Z")


def test_milliseconds_as_text_stay_inside_the_calendar() -> None:
    assert from_unix_ms(0) == "1970-01-01T00:00:00.000Z"
    assert from_unix_ms(-1) == "1969-12-31T23:59:59.999Z"
    assert from_unix_ms(-(10**30)) == "0001-01-01T00:00:00.000Z"
    assert from_unix_ms(10**30) == "9999-12-31T23:59:59.999Z"
    assert is_date_time(from_unix_ms(-(10**30)))


def test_records_come_back_as_they_were() -> None:
    for payload in (b'{"a":123456789012345678901234567890}', b'["\\ud800"]', b"-0.5", b'"\xc3\xa9"', b"null"):
        assert encode_json_record(decode_json_record(payload)) == payload
    for payload in (b"1e400", b"1" * 5000):
        with pytest.raises(UnusableRecordError):
            decode_json_record(payload)
