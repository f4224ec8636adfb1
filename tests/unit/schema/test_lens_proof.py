"""The proof of a lens: what is shown to be safe is taken, everything else is refused with the operation."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.common.errors import TailraceError
from tailrace.schema.json_schema import SchemaDocument
from tailrace.schema.lens_proof import prove_lens, resolve_lens_defaults
from tailrace.schema.lenses import parse_lens

STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}


def closed(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def outcome(old: Any, new: Any, *ops: Any) -> str:
    body: dict[str, Any] = {
        "apiVersion": "durable.lens/v1",
        "schema": "s",
        "from": 1,
        "to": 2,
        "ops": list(ops),
    }
    lens = parse_lens(body)
    try:
        prove_lens(resolve_lens_defaults(lens.ops, body["ops"]), SchemaDocument(old), SchemaDocument(new))
    except TailraceError as refusal:
        code, _, reason = f"{refusal.code} {refusal.message}".partition(" lens proof: ")
        return reason if code == "invalid_request" else refusal.message
    return ""


def rename(source: str, target: str) -> dict[str, Any]:
    return {"op": "rename", "from": source, "to": target}


def copy(source: str, target: str) -> dict[str, Any]:
    return {"op": "copy", "from": source, "to": target}


def convert(kinds: tuple[str, str], forward: Any) -> dict[str, Any]:
    given = {"fromType": kinds[0], "toType": kinds[1], "forward": forward, "backward": {"map": {}}}
    return {"op": "convert", "path": "/a", **given}


A = closed(("a",), a=STRING)
B = closed(("b",), b=STRING)
HOST = closed(("h",), h=closed(("n",), n=STRING))
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
        }
    },
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}, "a": STRING},
    "required": ["root", "a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("old", "new", "ops"),
    [
        (A, B, [rename("/a", "/b")]),
        ({**A, "additionalProperties": True}, {**B, "additionalProperties": True}, [rename("/a", "/b")]),
        (A, closed(("a", "b"), a=STRING, b=STRING), [copy("/a", "/b")]),
        (A, closed(("b",), b={"type": ["string", "null"]}), [rename("/a", "/b")]),
        (closed(("a",), a=INTEGER), closed(("b",), b=NUMBER), [rename("/a", "/b")]),
        (A, B, [rename("/a", "/c"), rename("/c", "/b")]),
        (
            closed(("a",), a={"enum": ["x", 1]}),
            closed(("b",), b={"enum": [1, "x", None]}),
            [rename("/a", "/b")],
        ),
        (closed(("a",), a={"const": "x"}), B, [rename("/a", "/b")]),
        (
            closed(("a",), a={"type": "boolean"}),
            closed(("b",), b={"enum": [True, False]}),
            [rename("/a", "/b")],
        ),
        (
            A,
            closed(("a", "n"), a=STRING, n=INTEGER),
            [{"op": "add", "path": "/n", "schema": INTEGER, "default": 5}],
        ),
        (
            A,
            closed(("a", "n"), a=STRING, n=INTEGER),
            [{"op": "add", "path": "/n", "schema": {**INTEGER, "default": 1}}],
        ),
        (
            A,
            closed(("a", "n"), a=STRING, n={"type": "object"}),
            [{"op": "add", "path": "/n", "schema": {"type": "object"}}],
        ),
        (A, HOST, [{"op": "add", "path": "/h", "schema": {"type": "object"}}, rename("/a", "/h/n")]),
        (A, closed(), [{"op": "remove", "path": "/a", "schema": STRING}]),
        (
            HOST,
            closed(("h", "a"), h=closed(), a=STRING),
            [{"op": "hoist", "host": "/h", "name": "n", "to": "/a"}],
        ),
        (
            HOST,
            closed(("h", "a"), h=closed(("n",), n=STRING), a=STRING),
            [{"op": "hoist", "host": "/h", "name": "n", "to": "/a", "removeFromHost": False}],
        ),
        (A, HOST, [{"op": "plunge", "from": "/a", "host": "/h", "name": "n"}]),
        (
            closed(("a",), a=STRING, h=closed(("x",), x=STRING)),
            closed(("h",), h=closed(("n",), n=STRING, x=STRING)),
            [{"op": "plunge", "from": "/a", "host": "/h", "name": "n"}],
        ),
        (
            A,
            closed(("a",), a={"type": "array", "items": STRING, "minItems": 1, "maxItems": 1}),
            [{"op": "wrap", "path": "/a", "mode": "singleton"}],
        ),
        (
            closed(("a",), a={"type": "array", "items": STRING, "minItems": 1}),
            A,
            [{"op": "head", "path": "/a"}],
        ),
        (closed(("a",), a={"enum": [["x"], ["y", 1]]}), A, [{"op": "head", "path": "/a"}]),
        (A, A, [convert(("string", "string"), {"builtin": "lowercase"})]),
        (closed(("a",), a=INTEGER), A, [convert(("integer", "string"), {"builtin": "int_to_string"})]),
        (
            closed(("a",), a=INTEGER),
            closed(("a",), a={**STRING, "format": "date-time"}),
            [convert(("integer", "string"), {"builtin": "unix_millis_to_rfc3339"})],
        ),
        (
            closed(("a",), a={"enum": ["1", "-7"]}),
            closed(("a",), a={"enum": [1, -7]}),
            [convert(("string", "integer"), {"builtin": "string_to_int"})],
        ),
        (
            A,
            closed(("a",), a={"enum": [1, 2]}),
            [convert(("string", "integer"), {"map": {"x": 1}, "default": 2})],
        ),
        (
            closed(("a",), a={"type": "boolean"}),
            closed(("a",), a=INTEGER),
            [convert(("boolean", "integer"), {"map": {"true": 1, "false": 0}, "default": 0})],
        ),
        (closed(("h",), h=A), closed(("h",), h=B), [{"op": "in", "path": "/h", "ops": [rename("/a", "/b")]}]),
        (
            closed(("l",), l={"type": "array", "items": A, "maxItems": 3}),
            closed(("l",), l={"type": "array", "items": B, "maxItems": 4}),
            [{"op": "map", "path": "/l", "ops": [rename("/a", "/b")]}],
        ),
        (
            TREE,
            {
                **TREE,
                "properties": {"root": {"$ref": "#/$defs/node"}, "b": STRING},
                "required": ["root", "b"],
            },
            [rename("/a", "/b")],
        ),
        (
            closed(("a",), a={"type": "array", "items": STRING, "minItems": 2}),
            closed(("a", "b"), a={"type": "array", "items": STRING, "minItems": 2}, b=STRING),
            [copy("/a/1", "/b")],
        ),
        (
            closed(("a",), a={"anyOf": [STRING, INTEGER]}),
            closed(("b",), b={"anyOf": [STRING, INTEGER]}),
            [rename("/a", "/b")],
        ),
        (closed(("a",), a=STRING), closed(("b",), b={"anyOf": [INTEGER, STRING]}), [rename("/a", "/b")]),
        (
            closed(("a",), a={**INTEGER, "minimum": 5}),
            closed(("b",), b={**NUMBER, "minimum": 0}),
            [rename("/a", "/b")],
        ),
        (
            closed(("a",), a={**INTEGER, "exclusiveMaximum": 5}),
            closed(("b",), b={**NUMBER, "maximum": 5}),
            [rename("/a", "/b")],
        ),
        (
            closed(("a",), a={**STRING, "minLength": 2, "pattern": "^a"}),
            closed(("b",), b={**STRING, "minLength": 1, "pattern": "^a"}),
            [rename("/a", "/b")],
        ),
        (INTEGER, {"type": "array", "items": INTEGER}, [{"op": "wrap", "path": "", "mode": "singleton"}]),
    ],
)
def test_lenses_that_are_safe(old: Any, new: Any, ops: list[Any]) -> None:
    assert outcome(old, new, *ops) == ""


@pytest.mark.parametrize(
    ("old", "new", "ops", "reason"),
    [
        (closed(a=STRING), closed(b=STRING), [rename("/a", "/b")], "0 /a is not required by the old schema"),
        ({"required": ["a"]}, {}, [rename("/a", "/b")], "0 the record is not an object in every record"),
        (closed(("h",), h={"type": "object"}), closed(), [rename("/h/a", "/b")], "0 /h/a is not required"),
        (
            closed(a=STRING),
            closed(),
            [{"op": "remove", "path": "/a", "schema": True}],
            "0 /a is not required",
        ),
        (A, closed(("a",), a=STRING), [copy("/a", "/b")], "0 /b is not declared in the new schema"),
        (A, {"type": "object"}, [rename("/a", "/b")], "0 /b is not declared in the new schema"),
        (
            A,
            closed(("b",), b=INTEGER),
            [rename("/a", "/b")],
            "0 /b may be string, which the new schema does not allow",
        ),
        (closed(("a",), a=NUMBER), closed(("b",), b=INTEGER), [rename("/a", "/b")], "0 /b may be number"),
        (
            closed(("a",), a={"enum": [1, 2]}),
            closed(("b",), b={"enum": [1]}),
            [rename("/a", "/b")],
            "0 /b may have a value that the new schema rejects",
        ),
        (
            A,
            closed(("b",), b={"enum": ["x"]}),
            [rename("/a", "/b")],
            "0 /b may hold a value that is not among",
        ),
        (
            A,
            closed(("b",), b={**STRING, "maxLength": 5}),
            [rename("/a", "/b")],
            "0 /b is not proven to keep maxLength",
        ),
        (
            A,
            closed(("b",), b={**STRING, "format": "date-time"}),
            [rename("/a", "/b")],
            "0 /b is not always a date-time",
        ),
        (
            A,
            closed(("b",), b={"not": INTEGER}),
            [rename("/a", "/b")],
            "0 /b cannot be decided because of not",
        ),
        (A, closed(("h",), h=B), [rename("/a", "/h/b")], "0 /h is not required by the old schema"),
        (
            closed(("a", "h"), a=STRING, h=STRING),
            HOST,
            [rename("/a", "/h/n")],
            "0 /h is not a required object",
        ),
        (A, closed(("a",), a=STRING), [rename("/a", "/b"), copy("/b", "/c")], "0 /b is not declared"),
        (
            A,
            closed(("a", "n"), n=INTEGER, a=STRING),
            [{"op": "add", "path": "/n", "schema": INTEGER}],
            "0 add needs a default",
        ),
        (
            A,
            A,
            [{"op": "add", "path": "/n", "schema": INTEGER, "default": "x"}],
            "0 the default does not match the schema of the operation",
        ),
        (A, A, [{"op": "add", "path": "/n", "schema": {"type": "x"}, "default": "x"}], "0 invalid schema: "),
        (
            A,
            closed(("a", "n"), a=STRING, n=STRING),
            [{"op": "add", "path": "/n", "schema": {}, "default": 5}],
            "0 /n may have a value that the new schema rejects",
        ),
        (A, closed(("a",), a=STRING), [rename("/a", "/b")], "0 /b is not declared"),
        (
            A,
            closed(("a",), a=STRING),
            [{"op": "remove", "path": "/a", "schema": True}],
            "0 /a is required by the new schema and taken away",
        ),
        (
            A,
            closed(("a",), a={"type": "array", "items": INTEGER}),
            [{"op": "wrap", "path": "/a", "mode": "singleton"}],
            "0 /a/* may be string",
        ),
        (A, A, [{"op": "wrap", "path": "/a", "mode": "singleton"}], "0 /a may be array"),
        (
            closed(("a",), a={"type": "array", "items": STRING}),
            A,
            [{"op": "head", "path": "/a"}],
            "0 /a is not a non-empty array",
        ),
        (
            closed(("a",), a={"enum": [["x"], []]}),
            A,
            [{"op": "head", "path": "/a"}],
            "0 /a is not a non-empty array",
        ),
        (
            A,
            closed(("a",), a=INTEGER),
            [convert(("string", "integer"), {"builtin": "string_to_int"})],
            "0 string_to_int is not total",
        ),
        (
            A,
            closed(("a",), a=INTEGER),
            [convert(("string", "integer"), {"builtin": "rfc3339_to_unix_millis"})],
            "0 rfc3339_to_unix_millis is not total",
        ),
        (
            A,
            closed(("a",), a=INTEGER),
            [convert(("string", "integer"), {"map": {"x": 1}})],
            "0 a map without default is not total",
        ),
        (
            A,
            closed(("a",), a=INTEGER),
            [convert(("string", "integer"), {"map": {"x": "1"}, "default": 1})],
            "0 the map gives values that are not of type integer",
        ),
        (
            closed(("a",), a={"enum": ["1", "x"]}),
            closed(("a",), a=INTEGER),
            [convert(("string", "integer"), {"builtin": "string_to_int"})],
            "0 text is not an integer",
        ),
        (
            closed(("a",), a=NUMBER),
            A,
            [convert(("integer", "string"), {"builtin": "int_to_string"})],
            "0 /a is not of type integer",
        ),
        (
            closed(("a",), a=INTEGER),
            A,
            [convert(("integer", "string"), {"builtin": "lowercase"})],
            "0 lowercase takes string, not integer",
        ),
        (
            A,
            closed(("a",), a=INTEGER),
            [convert(("string", "integer"), {"builtin": "lowercase"})],
            "0 lowercase gives string, not integer",
        ),
        (
            closed(a=STRING),
            A,
            [convert(("string", "string"), {"builtin": "lowercase"})],
            "0 /a is not required",
        ),
        (A, A, [{"op": "in", "path": "/a", "ops": [rename("/x", "/y")]}], "0 /a is not an object"),
        (A, A, [{"op": "map", "path": "/a", "ops": [rename("/x", "/y")]}], "0 /a is not an array"),
        (
            closed(("h",), h=A),
            closed(("h",), h=B),
            [{"op": "in", "path": "/h", "ops": [rename("/a", "/b"), rename("/c", "/d")]}],
            "0 /c is not required",
        ),
        # An open old schema lets through what the new one refuses.
        (
            {**A, "additionalProperties": True},
            closed(("b",), b=STRING),
            [rename("/a", "/b")],
            "0 /* is not allowed by the new schema",
        ),
        (
            {"type": "object", "required": ["a"], "properties": {"a": STRING}},
            {"type": "object", "properties": {"b": STRING, "c": STRING}},
            [rename("/a", "/b")],
            "0 /c may be any value",
        ),
        (
            {"type": "object", "required": ["a"], "properties": {"a": STRING}},
            HOST,
            [{"op": "plunge", "from": "/a", "host": "/h", "name": "n"}],
            "0 /h may be there and not be an object",
        ),
        (
            closed(("a",), a=STRING, h=closed(("x",), x=STRING)),
            closed(("h",), h=closed(("n", "x"), n=STRING, x=STRING)),
            [{"op": "plunge", "from": "/a", "host": "/h", "name": "n"}],
            "0 /h/x is required by the new schema",
        ),
        (
            A,
            HOST,
            [{"op": "plunge", "from": "/a", "host": "/h", "name": "n", "createHost": False}],
            "0 /h is not required",
        ),
        (
            closed(("l", "a"), l={"type": "array", "items": A, "minItems": 2}, a=STRING),
            closed(),
            [rename("/a", "/l/0")],
            "0 /l is an array; use map",
        ),
        (A, False, [copy("/a", "/b")], "0 /b is not declared"),
        (
            A,
            {**B, "patternProperties": {"^x": INTEGER}},
            [rename("/a", "/b")],
            "0 the record cannot be decided because of patternProperties",
        ),
        (A, B, [copy("/a", "/b"), {"op": "remove", "path": "/zz", "schema": True}], "1 /zz is not required"),
    ],
)
def test_lenses_that_are_refused(old: Any, new: Any, ops: list[Any], reason: str) -> None:
    assert outcome(old, new, *ops).startswith(reason)
