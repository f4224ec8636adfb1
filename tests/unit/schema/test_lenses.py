"""Lenses: every operation on real records, every failure, and every shape that is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.common.errors import TailraceError
from tailrace.schema.lenses import LensFailureError, apply_ops, parse_lens


def lens(*ops: Any) -> dict[str, Any]:
    return {"apiVersion": "durable.lens/v1", "schema": "s", "from": 1, "to": 2, "ops": list(ops)}


def applied(record: Any, *ops: Any) -> Any:
    return apply_ops(parse_lens(lens(*ops)).ops, record)


def convert(path: str, kinds: tuple[str, str], forward: Any) -> dict[str, Any]:
    back = {"builtin": "lowercase"}
    return {
        "op": "convert",
        "path": path,
        "fromType": kinds[0],
        "toType": kinds[1],
        "forward": forward,
        "backward": back,
    }


def builtin(name: str, kinds: tuple[str, str]) -> dict[str, Any]:
    return convert("/a", kinds, {"builtin": name})


@pytest.mark.parametrize(
    ("record", "op", "result"),
    [
        ({"a": 1}, {"op": "rename", "from": "/a", "to": "/b"}, {"b": 1}),
        ({"a": 1, "b": 2}, {"op": "rename", "from": "/a", "to": "/b"}, {"b": 1}),
        ({"a~/": 1, "c": {}}, {"op": "rename", "from": "/a~0~1", "to": "/c/"}, {"c": {"": 1}}),
        ({"a": [1, 2, 3]}, {"op": "rename", "from": "/a/1", "to": "/b"}, {"a": [1, 3], "b": 2}),
        ({"a": [1]}, {"op": "copy", "from": "/a", "to": "/a/1"}, {"a": [1, [1]]}),
        ({"a": [1]}, {"op": "copy", "from": "", "to": "/b"}, {"a": [1], "b": {"a": [1]}}),
        ({"a": [0]}, {"op": "copy", "from": "/a", "to": "/a/0"}, {"a": [[0]]}),
        ({"a": 1}, {"op": "add", "path": "/b", "schema": True, "default": {"x": 1}}, {"a": 1, "b": {"x": 1}}),
        ({"a": 1, "b": None}, {"op": "remove", "path": "/b", "schema": {}}, {"a": 1}),
        (
            {"h": {"n": 1, "m": 2}},
            {"op": "hoist", "host": "/h", "name": "n", "to": "/n"},
            {"h": {"m": 2}, "n": 1},
        ),
        (
            {"h": {"n": [1]}},
            {"op": "hoist", "host": "/h", "name": "n", "to": "/n", "removeFromHost": False},
            {"h": {"n": [1]}, "n": [1]},
        ),
        ({"a": 1}, {"op": "plunge", "from": "/a", "host": "/h/i", "name": "n"}, {"h": {"i": {"n": 1}}}),
        (
            {"a": 1, "h": {"x": 2}},
            {"op": "plunge", "from": "/a", "host": "/h", "name": "n", "removeFromSource": False},
            {"a": 1, "h": {"x": 2, "n": 1}},
        ),
        ({"a": 1}, {"op": "wrap", "path": "/a", "mode": "singleton", "reverseMode": "first"}, {"a": [1]}),
        (1, {"op": "wrap", "path": "", "mode": "singleton"}, [1]),
        ({"a": [1, 2]}, {"op": "head", "path": "/a", "reverseMode": "singleton"}, {"a": 1}),
        ({"a": "Ä"}, builtin("lowercase", ("string", "string")), {"a": "ä"}),
        ({"a": "ß"}, builtin("uppercase", ("string", "string")), {"a": "SS"}),
        ({"a": "-12"}, builtin("string_to_int", ("string", "integer")), {"a": -12}),
        ({"a": 5.0}, builtin("int_to_string", ("integer", "string")), {"a": "5"}),
        (
            {"a": "1970-01-01T00:00:01Z"},
            builtin("rfc3339_to_unix_millis", ("string", "integer")),
            {"a": 1000},
        ),
        (
            {"a": 1000},
            builtin("unix_millis_to_rfc3339", ("integer", "string")),
            {"a": "1970-01-01T00:00:01.000Z"},
        ),
        ({"a": 0.5}, convert("/a", ("number", "string"), {"map": {"0.5": "half"}}), {"a": "half"}),
        ({"a": 2.0}, convert("/a", ("number", "string"), {"map": {"2": "two"}}), {"a": "two"}),
        ({"a": 1e25}, convert("/a", ("number", "integer"), {"map": {"1e25": 1}}), {"a": 1}),
        ({"a": True}, convert("/a", ("boolean", "integer"), {"map": {"true": 1, "false": 0}}), {"a": 1}),
        ({"a": None}, convert("/a", ("null", "string"), {"map": {"null": "none"}}), {"a": "none"}),
        ({"a": "x"}, convert("/a", ("string", "null"), {"map": {}, "default": None}), {"a": None}),
        ({"a": 1}, convert("/a", ("number", "number"), {"map": {"1": 2}}), {"a": 2}),
        (
            {"o": {"a": 1}},
            {"op": "in", "path": "/o", "ops": [{"op": "rename", "from": "/a", "to": "/b"}]},
            {"o": {"b": 1}},
        ),
        (
            {"l": [{"a": 1}, {"a": 2}]},
            {"op": "map", "path": "/l", "ops": [{"op": "rename", "from": "/a", "to": "/b"}]},
            {"l": [{"b": 1}, {"b": 2}]},
        ),
        (
            {"l": []},
            {"op": "map", "path": "/l", "ops": [{"op": "wrap", "path": "", "mode": "singleton"}]},
            {"l": []},
        ),
        (
            {"l": [1]},
            {"op": "map", "path": "/l", "ops": [{"op": "wrap", "path": "", "mode": "singleton"}]},
            {"l": [[1]]},
        ),
    ],
)
def test_what_an_operation_does(record: Any, op: Any, result: Any) -> None:
    assert applied(record, op) == result


@pytest.mark.parametrize(
    ("record", "op", "reason"),
    [
        ({}, {"op": "rename", "from": "/a", "to": "/b"}, "/a is absent"),
        ({"a": 1}, {"op": "rename", "from": "/a", "to": "/x/b"}, "the parent of /x/b is absent"),
        (
            {"a": 1, "x": 5},
            {"op": "copy", "from": "/a", "to": "/x/b"},
            "the parent of /x/b is not a container",
        ),
        ({"a": 1, "x": []}, {"op": "copy", "from": "/a", "to": "/x/1"}, "/x/1 is outside its array"),
        ({"a": 1}, {"op": "rename", "from": "/a", "to": "/a/b"}, "the parent of /a/b is absent"),
        ({"a": {"b": 1}}, {"op": "rename", "from": "/a/c", "to": "/c"}, "/a/c is absent"),
        (5, {"op": "add", "path": "/a", "schema": True, "default": 1}, "the parent of /a is not a container"),
        ({}, {"op": "remove", "path": "/a", "schema": True}, "/a is absent"),
        ({"h": []}, {"op": "hoist", "host": "/h", "name": "n", "to": "/n"}, "/h is not an object"),
        ({"h": {}}, {"op": "hoist", "host": "/h", "name": "n", "to": "/n"}, "/h/n is absent"),
        ({}, {"op": "plunge", "from": "/a", "host": "/h", "name": "n"}, "/a is absent"),
        ({"a": 1, "h": 2}, {"op": "plunge", "from": "/a", "host": "/h", "name": "n"}, "/h is not an object"),
        (
            {"a": 1, "h": 2},
            {"op": "plunge", "from": "/a", "host": "/h/i", "name": "n"},
            "/h is not an object",
        ),
        (
            {"a": 1},
            {"op": "plunge", "from": "/a", "host": "/h", "name": "n", "createHost": False},
            "/h is not an object",
        ),
        ({}, {"op": "wrap", "path": "/a", "mode": "singleton"}, "/a is absent"),
        ({"a": []}, {"op": "head", "path": "/a"}, "/a is not a non-empty array"),
        ({"a": 1}, {"op": "head", "path": "/a"}, "/a is not a non-empty array"),
        ({"a": 1.5}, builtin("int_to_string", ("integer", "string")), "/a is not of type integer"),
        ({"a": 1}, builtin("lowercase", ("integer", "string")), "value is not a string"),
        ({"a": "x"}, builtin("int_to_string", ("string", "string")), "value is not an integer"),
        ({"a": "x"}, builtin("string_to_int", ("string", "integer")), "text is not an integer"),
        (
            {"a": "x"},
            builtin("rfc3339_to_unix_millis", ("string", "integer")),
            "text is not an RFC 3339 timestamp",
        ),
        (
            {"a": "x"},
            builtin("lowercase", ("string", "integer")),
            "/a does not become a value of type integer",
        ),
        ({"a": "x"}, convert("/a", ("string", "string"), {"map": {"y": "z"}}), "value is not in the map"),
        ({"a": "x"}, convert("/a", ("string", "integer"), {"map": {"x": 0.5}}), "/a does not become a value"),
        ({"a": 1}, {"op": "in", "path": "/a", "ops": [{"op": "head", "path": ""}]}, "/a is not an object"),
        ({"a": 1}, {"op": "map", "path": "/a", "ops": [{"op": "head", "path": ""}]}, "/a is not an array"),
    ],
)
def test_when_an_operation_fails(record: Any, op: Any, reason: str) -> None:
    with pytest.raises(LensFailureError) as caught:
        applied(record, op)
    assert str(caught.value).startswith(reason)


RENAME = {"op": "rename", "from": "/a", "to": "/b"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "lens must be an object"),
        ({**lens(RENAME), "apiVersion": "v2"}, "apiVersion must be durable.lens/v1"),
        ({**lens(RENAME), "extra": 1}, "extra is not supported"),
        ({**lens(RENAME), "schema": 1}, "schema must be a string"),
        ({**lens(RENAME), "from": "1"}, "from must be a version number"),
        ({**lens(RENAME), "from": True}, "from must be a version number"),
        ({**lens(RENAME), "to": -1}, "to must be a version number"),
        ({**lens(RENAME), "description": 5}, "description must be a string"),
        (lens(), "ops must be a non-empty array"),
        ({**lens(), "ops": {}}, "ops must be a non-empty array"),
        (lens(5), "ops[0] must be an object"),
        (lens(RENAME, {"op": "move"}), "ops[1].op must be one of rename, copy"),
        (lens({"op": "rename", "from": "/a"}), "ops[0].to is missing"),
        (lens({**RENAME, "path": "/a"}), "ops[0].path is not supported"),
        (lens({**RENAME, "from": "a"}), "ops[0].from must be a JSON pointer"),
        (lens({**RENAME, "from": "/a~2"}), "ops[0].from must be a JSON pointer"),
        (lens({**RENAME, "to": "/a/-"}), "ops[0].to must be a JSON pointer"),
        (lens({**RENAME, "to": 5}), "ops[0].to must be a JSON pointer"),
        (lens({**RENAME, "from": ""}), "ops[0].from must not be the root"),
        (lens({"op": "add", "path": "/a", "schema": 5}), "ops[0].schema must be a schema"),
        (lens({"op": "hoist", "host": "/h", "name": 5, "to": "/n"}), "ops[0].name must be a string"),
        (
            lens({"op": "hoist", "host": "/h", "name": "n", "to": "/n", "removeFromHost": 1}),
            "ops[0].removeFromHost must be a boolean",
        ),
        (lens({"op": "wrap", "path": "/a", "mode": "all"}), 'ops[0].mode must be "singleton"'),
        (lens({"op": "head", "path": "/a", "reverseMode": "last"}), 'ops[0].reverseMode must be "singleton"'),
        (lens(convert("/a", ("text", "string"), {"map": {}})), "ops[0].fromType must be one of"),
        (lens(convert("/a", ("string", "string"), {})), "ops[0].forward must have either map or builtin"),
        (
            lens(convert("/a", ("string", "string"), {"builtin": "trim"})),
            "ops[0].forward.builtin must be one of",
        ),
        (
            lens(convert("/a", ("string", "string"), {"builtin": "lowercase", "default": 1})),
            "ops[0].forward.default is not supported",
        ),
        (
            lens(convert("/a", ("string", "string"), {"map": {"x": []}})),
            "ops[0].forward.map.x must be a scalar",
        ),
        (
            lens(convert("/a", ("string", "string"), {"map": {}, "default": {}})),
            "ops[0].forward.default must be a scalar",
        ),
        (
            lens({**convert("/a", ("string", "string"), {"map": {}}), "backward": {"builtin": "x"}}),
            "ops[0].backward.builtin must be one of",
        ),
        (lens({"op": "in", "path": "/a", "ops": []}), "ops[0].ops must be a non-empty array"),
        (lens({"op": "map", "path": "/a", "ops": [{"op": "head"}]}), "ops[0].ops[0].path is missing"),
    ],
)
def test_shapes_that_are_refused(body: Any, message: str) -> None:
    with pytest.raises(TailraceError) as caught:
        parse_lens(body)
    assert caught.value.code == "invalid_request"
    assert caught.value.message.startswith(f"invalid lens: {message}")


def test_lenses_within_lenses_have_a_bound() -> None:
    op: dict[str, Any] = RENAME
    for _ in range(20):
        op = {"op": "in", "path": "/a", "ops": [op]}
    with pytest.raises(TailraceError, match="must not be nested deeper than 16 levels"):
        parse_lens(lens(op))
