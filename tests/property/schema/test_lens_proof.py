"""A lens that passes the proof never fails on a record of the old version, and gives one of the new."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from tailrace.common.errors import TailraceError
from tailrace.schema.json_schema import SchemaDocument, compile_schema
from tailrace.schema.json_values import decode_json_record, encode_json_record
from tailrace.schema.lens_proof import prove_lens, resolve_lens_defaults
from tailrace.schema.lenses import LensFailureError, apply_ops, parse_lens
from tailrace.schema.registry import Promoter, Registry, VersionBoundary

NAMES = ("a", "b", "c", "h", "l")
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([0.5, 2.0, "", "x", "7", "2024-01-01T00:00:00Z"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=2),
    max_leaves=4,
)
LEAVES = st.one_of(
    st.sampled_from(["string", "integer", "number", "boolean", "null"]).map(lambda kind: {"type": kind}),
    st.just({"type": ["string", "null"]}),
    st.just({"type": "string", "format": "date-time"}),
    st.builds(lambda low: {"type": "integer", "minimum": low}, st.integers(-2, 1)),
    st.builds(lambda values: {"enum": values}, st.lists(SCALARS, min_size=1, max_size=3)),
    st.just({"anyOf": [{"type": "string"}, {"type": "integer"}]}),
    st.just({}),
)


@st.composite
def objects(draw: st.DrawFn, depth: int = 1) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True))
    properties = {name: draw(schemas(depth - 1)) for name in names}
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    schema["required"] = [name for name in names if draw(st.integers(0, 3))]
    if draw(st.integers(0, 3)):
        schema["additionalProperties"] = False
    return schema


def schemas(depth: int) -> st.SearchStrategy[dict[str, Any]]:
    if depth < 0:
        return LEAVES
    arrays = st.builds(
        lambda items, least: {"type": "array", "items": items, "minItems": least},
        schemas(depth - 1),
        st.integers(0, 2),
    )
    return LEAVES | objects(depth) | arrays


def records_of(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Mostly records the schema allows; the test looks again."""
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema.get("type")
    if kind == "object":
        required = {name: records_of(schema["properties"][name]) for name in schema["required"]}
        optional = {
            name: records_of(inner) for name, inner in schema["properties"].items() if name not in required
        }
        known = st.fixed_dictionaries(required, optional=optional)
        if schema.get("additionalProperties") is False:
            return known
        more = st.dictionaries(st.sampled_from((*NAMES, "z")), VALUES, max_size=2)
        return st.builds(lambda extra, given: {**extra, **given}, more, known)
    if kind == "array":
        return st.lists(records_of(schema["items"]), min_size=schema["minItems"], max_size=3)
    if kind == "integer":
        return st.integers(schema.get("minimum", -3), 10**20) | st.sampled_from([3.0, 10**40])
    return SCALARS | VALUES


# -- operations, and what they make of a schema as its author would write it


def _drop(schema: dict[str, Any], name: str) -> Any:
    schema["required"] = [one for one in schema["required"] if one != name]
    return schema["properties"].pop(name, {})


def _set(schema: dict[str, Any], name: str, inner: Any) -> None:
    schema["properties"][name] = inner
    schema["required"] = [*(one for one in schema["required"] if one != name), name]


@st.composite
def steps(draw: st.DrawFn, schema: dict[str, Any], depth: int = 0) -> dict[str, Any]:
    """An operation on the object that the schema describes; the schema is changed to what comes out."""
    source, target = draw(st.sampled_from(list(schema["properties"]) or ["a"])), draw(st.sampled_from(NAMES))
    inner = schema["properties"].get(source, {})
    kinds = ["rename", "copy", "add", "remove", "plunge", "wrap", "convert"]
    if inner.get("type") == "array":
        kinds += ["head", "map", "map"]
    if inner.get("type") == "object":
        kinds += ["hoist", "hoist", "in", "in"]
    kind = draw(st.sampled_from(kinds))
    path = f"/{source}"
    if kind in ("rename", "copy"):
        moved = _drop(schema, source) if kind == "rename" else copy.deepcopy(inner)
        _set(schema, target, moved)
        return {"op": kind, "from": path, "to": f"/{target}"}
    if kind == "add":
        default = draw(VALUES)
        _set(schema, target, {} if draw(st.booleans()) else {"const": default})
        return {"op": "add", "path": f"/{target}", "schema": True, "default": default}
    if kind == "remove":
        _drop(schema, source)
        return {"op": "remove", "path": path, "schema": True}
    if kind == "plunge":
        creates, removes = draw(st.booleans()), draw(st.booleans())
        moved = _drop(schema, source) if removes else copy.deepcopy(inner)
        host = schema["properties"].get(target)
        if host is None or host.get("type") != "object":
            host = {"type": "object", "properties": {}, "required": []}
        elif target not in schema["required"]:
            host["required"] = []
        _set(host, "c", moved)
        _set(schema, target, host)
        flags = {"createHost": creates, "removeFromSource": removes}
        return {"op": "plunge", "from": path, "host": f"/{target}", "name": "c", **flags}
    return draw(_in_place(schema, source, kind, depth))


@st.composite
def _in_place(draw: st.DrawFn, schema: dict[str, Any], source: str, kind: str, depth: int) -> dict[str, Any]:
    inner, path = schema["properties"].get(source, {}), f"/{source}"
    if kind == "hoist":
        name = draw(st.sampled_from(list(inner["properties"]) or ["a"]))
        removes = draw(st.booleans())
        moved = copy.deepcopy(inner["properties"].get(name, {}))
        if removes:
            _drop(inner, name)
        target = draw(st.sampled_from(NAMES))
        _set(schema, target, moved)
        return {"op": "hoist", "host": path, "name": name, "to": f"/{target}", "removeFromHost": removes}
    if kind == "wrap":
        _set(schema, source, {"type": "array", "items": inner, "minItems": 1})
        return {"op": "wrap", "path": path, "mode": "singleton"}
    if kind == "head":
        _set(schema, source, inner["items"])
        return {"op": "head", "path": path}
    if kind == "convert":
        return draw(conversions(schema, source))
    owner = inner if kind == "in" else inner["items"]
    if owner.get("type") != "object" or depth > 1:
        owner = {"type": "object", "properties": {}, "required": []}
    return {"op": kind, "path": path, "ops": [draw(steps(owner, depth + 1))]}


@st.composite
def conversions(draw: st.DrawFn, schema: dict[str, Any], source: str) -> dict[str, Any]:
    kinds = st.sampled_from(["string", "integer", "number", "boolean", "null"])
    table: dict[str, Any] = {"map": {"x": "y", "7": "8", "true": "x"}}
    if draw(st.booleans()):
        table["default"] = "none"
    builtins = ["lowercase", "uppercase", "string_to_int", "int_to_string"]
    builtins += ["rfc3339_to_unix_millis", "unix_millis_to_rfc3339"]
    forward = draw(st.just(table) | st.sampled_from(builtins).map(lambda name: {"builtin": name}))
    takes, gives = draw(kinds), "string"
    known = schema["properties"].get(source, {}).get("type")
    if isinstance(known, str) and draw(st.integers(0, 3)):
        takes = known if known in ("string", "integer", "number", "boolean", "null") else takes
    if forward.get("builtin") in ("string_to_int", "rfc3339_to_unix_millis"):
        gives = "integer"
    _set(schema, source, {"type": gives})
    types = {"fromType": takes, "toType": gives}
    return {"op": "convert", "path": f"/{source}", **types, "forward": forward, "backward": {"map": {}}}


@st.composite
def mutated(draw: st.DrawFn, schema: dict[str, Any]) -> dict[str, Any]:
    """Sometimes the author asks for a little more or less than that."""
    choice = draw(st.integers(0, 9))
    name = draw(st.sampled_from(NAMES))
    if choice == 0:
        schema["additionalProperties"] = False
    elif choice == 1:
        schema.pop("additionalProperties", None)
    elif choice == 2:
        schema["required"] = [one for one in schema["required"] if one != name]
    elif choice == 3:
        schema["properties"][name] = draw(LEAVES)
    elif choice == 4:
        schema["properties"].pop(name, None)
    elif choice == 5:
        schema = {"$ref": "#/$defs/one", "$defs": {"one": schema}}
    return schema


@st.composite
def evolutions(draw: st.DrawFn, old: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    new = copy.deepcopy(old)
    ops = [draw(steps(new)) for _ in range(draw(st.integers(1, 3)))]
    return ops, draw(mutated(new))


def envelope(ops: list[Any]) -> dict[str, Any]:
    return {"apiVersion": "durable.lens/v1", "schema": "s", "from": 1, "to": 2, "ops": ops}


def proven(old: Any, new: Any, ops: list[Any]) -> dict[str, Any] | None:
    body = envelope(ops)
    lens = parse_lens(body)
    try:
        prove_lens(resolve_lens_defaults(lens.ops, body["ops"]), SchemaDocument(old), SchemaDocument(new))
    except TailraceError as refusal:
        assume(refusal.message.startswith("lens proof: "))
        return None
    return body


def check_l1(data: st.DataObject) -> None:
    old = data.draw(objects())
    ops, new = data.draw(evolutions(old))
    body = proven(old, new, ops)
    event("proven" if body else "refused")
    if body is None:
        return
    lens = parse_lens(body)
    before, after = compile_schema(old), compile_schema(new)
    for record in data.draw(st.lists(records_of(old), min_size=1, max_size=6)):
        if before.accepts(record):
            result = apply_ops(lens.ops, decode_json_record(encode_json_record(record)))
            assert after.complaint(result) is None, (old, new, ops, record, result)


def check_l2(data: st.DataObject) -> None:
    """Three versions, with lenses that may fail: each record is stored under one and read at the last."""
    schema = data.draw(objects(0))
    record = data.draw(records_of(schema))
    lenses = {version: envelope(data.draw(evolutions(schema))[0]) for version in (1, 2)}
    boundaries = (VersionBoundary(5, 1), VersionBoundary(10, 2), VersionBoundary(20, 3))
    promoter = Promoter(Registry(name="s", version=3, boundaries=boundaries, lenses=lenses))
    payload = encode_json_record(record)
    assert promoter.promote_payload(payload, 4) is payload
    assert promoter.promote_payload(payload, 20) is payload
    for sequence, version in ((5, 1), (9, 1), (10, 2), (19, 2)):
        try:
            stored = payload
            for step in range(version, 3):
                stored = encode_json_record(
                    apply_ops(parse_lens(lenses[step]).ops, decode_json_record(stored))
                )
            expected: bytes | str = stored
        except LensFailureError as failure:
            expected = str(failure)
        try:
            promoted: bytes | memoryview | str = promoter.promote_payload(payload, sequence)
        except LensFailureError as failure:
            promoted = str(failure)
        assert promoted == expected


MANY = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    derandomize=True,
    max_examples=25,
    database=None,
)
LAWS = [pytest.param(check_l1, id="l1"), pytest.param(check_l2, id="l2")]


@pytest.mark.parametrize("check", LAWS)
def test_l1_l2_proven_lenses_never_fail_and_compose(check: Callable[[st.DataObject], None]) -> None:
    @MANY
    @given(st.data())
    def law(data: st.DataObject) -> None:
        check(data)

    law()


@pytest.mark.nightly
@pytest.mark.parametrize("check", LAWS)
def test_l1_l2_at_length(check: Callable[[st.DataObject], None]) -> None:
    @settings(MANY, max_examples=20_000, derandomize=False)
    @given(st.data())
    def law(data: st.DataObject) -> None:
        check(data)

    law()
