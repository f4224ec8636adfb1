"""Whatever is posted to a registry: it is taken and can be used, or it is refused and nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.common.errors import TailraceError
from tailrace.log.decide import AppendRequest
from tailrace.schema.registry import Registry, read_registry
from tailrace.schema.registry_update import decide_update, prepare_update
from tailrace.schema.stream_schema import StreamSchema

T = TypeVar("T")
WORDS = st.sampled_from(
    [
        "",
        "/a",
        "/a/0",
        "#",
        "#/$defs/a",
        "http://[",
        "http://x/y",
        "a",
        "object",
        "string",
        "(?=a)",
        "^a",
        "\u0000",
    ]
)
KEYS = st.sampled_from(
    """schema lens routingKey search apiVersion from to ops op path type properties required items $ref $id
    $anchor $defs $schema enum const default additionalProperties anyOf not pattern format jsonPointer fields
    a""".split()  # noqa: SIM905
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.5, 1e308, 10**30]) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)
V1: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "h": {"type": "object", "properties": {"b": {"enum": [1, "x"]}}}},
    "required": ["a"],
    "additionalProperties": False,
}
FIRST = decide_update(Registry(name="s"), prepare_update(Registry(name="s"), {"schema": V1}), 0)
GOOD: list[dict[str, Any]] = [
    {"schema": V1},
    {"routingKey": {"jsonPointer": "/a", "required": False}},
    {"search": {"fields": {"a": {"kind": "keyword", "bindings": [{"version": 1, "jsonPointer": "/a"}]}}}},
    {
        "schema": {**V1, "properties": {"b": {"type": "string"}, "h": True}, "required": ["b"]},
        "lens": {
            "apiVersion": "durable.lens/v1",
            "schema": "s",
            "from": 1,
            "to": 2,
            "ops": [{"op": "rename", "from": "/a", "to": "/b"}],
        },
    },
]


@st.composite
def bodies(draw: st.DrawFn) -> Any:
    """Something arbitrary, or something good with one place changed."""
    if not draw(st.integers(0, 3)):
        return draw(VALUES)
    body = msgspec.json.decode(msgspec.json.encode(draw(st.sampled_from(GOOD))))
    node: Any = body
    while True:
        places = list(node) if isinstance(node, dict) else list(range(len(node)))
        place = draw(st.sampled_from(places))
        if isinstance(node[place], dict | list) and node[place] and draw(st.booleans()):
            node = node[place]
            continue
        change = draw(st.integers(0, 2))
        if change == 0:
            del node[place]
        elif change == 1:
            node[place] = draw(VALUES)
        elif isinstance(node, dict):
            node[draw(KEYS)] = draw(VALUES)
        return body


def attempt(work: Callable[[], T]) -> T | TailraceError:
    try:
        return work()
    except TailraceError as refusal:
        return refusal


def check(registry: Registry, body: Any, records: list[Any]) -> None:
    before = registry.to_json()
    updated = attempt(lambda: decide_update(registry, prepare_update(registry, body), 0))
    assert registry.to_json() == before
    if isinstance(updated, TailraceError):
        assert updated.code in ("invalid_request", "conflict")
        assert updated.message
        assert updated.body()
        return
    document = updated.to_json()
    assert read_registry(document).to_json() == document
    contract = StreamSchema(document, 1024)
    for record in records:
        request = AppendRequest(msgspec.json.encode(record), "application/json")
        checked = attempt(lambda request=request: contract.validate(request))
        assert not isinstance(checked, TailraceError) or checked.code == "invalid_request"


ARGUMENTS = (st.sampled_from([Registry(name="s"), FIRST]), bodies(), st.lists(VALUES, max_size=3))


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(*ARGUMENTS)
def test_s2_any_update_is_taken_or_refused(registry: Registry, body: Any, records: list[Any]) -> None:
    check(registry, body, records)


@pytest.mark.nightly
@settings(max_examples=20_000, database=None, deadline=None)
@given(*ARGUMENTS)
def test_s2_any_update_at_length(registry: Registry, body: Any, records: list[Any]) -> None:
    check(registry, body, records)
