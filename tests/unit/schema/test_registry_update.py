"""Registry updates: what is installed, what evolves, and every refusal."""

from __future__ import annotations

from typing import Any

import pytest

from support.schema_versions import V1, V2
from tailrace.common.errors import TailraceError
from tailrace.schema.lenses import LensFailureError
from tailrace.schema.registry import (
    Promoter,
    Registry,
    RoutingKey,
    RoutingKeyReader,
    VersionBoundary,
    fork_registry,
    read_registry,
)
from tailrace.schema.registry_update import decide_update, prepare_update

EMPTY = Registry(name="orders")
V3 = {
    "type": "object",
    "properties": {"at": {"type": "string"}, "n": {"type": "array"}},
    "required": ["at", "n"],
}
SEARCH = {
    "fields": {"at": {"kind": "date", "bindings": [{"version": 1, "jsonPointer": "/at"}], "exact": True}}
}
KEY = {"jsonPointer": "/user", "required": False}


def lens(source: int, *ops: Any, name: str = "orders") -> dict[str, Any]:
    return {
        "apiVersion": "durable.lens/v1",
        "schema": name,
        "from": source,
        "to": source + 1,
        "ops": list(ops),
    }


RENAME = lens(1, {"op": "rename", "from": "/ts", "to": "/at"})
ADD = lens(2, {"op": "add", "path": "/n", "schema": {"type": "array"}})


def update(registry: Registry, body: Any, next_sequence: int = 0) -> Registry:
    return decide_update(registry, prepare_update(registry, body), next_sequence)


def refused(registry: Registry, body: Any, next_sequence: int = 0) -> TailraceError:
    before = registry.to_json()
    with pytest.raises(TailraceError) as caught:
        update(registry, body, next_sequence)
    assert registry.to_json() == before
    return caught.value


FIRST = update(EMPTY, {"schema": V1})
SECOND = update(FIRST, {"schema": V2, "lens": RENAME}, 150)


@pytest.mark.parametrize(
    ("registry", "body", "next_sequence", "message"),
    [
        (EMPTY, [], 0, "schema update must be an object"),
        (EMPTY, {}, 0, "schema update must include schema, routingKey, or search"),
        (
            EMPTY,
            {"apiVersion": "durable.streams/schema-registry/v1"},
            0,
            "schema update must include schema,",
        ),
        (EMPTY, {"apiVersion": "v1", "schema": V1}, 0, "invalid schema apiVersion"),
        *(
            (EMPTY, {key: {}, "schema": V1}, 0, f"schemaUpdate.{key} is not supported")
            for key in (
                "schemas",
                "lenses",
                "boundaries",
                "indexes",
                "routing_key",
                "routingKeyPointer",
                "json_pointer",
                "profile",
                "touch",
            )
        ),
        (EMPTY, {"lens": RENAME}, 0, "schema update lens requires schema"),
        (FIRST, {"lens": RENAME, "search": None}, 0, "schema update lens requires schema"),
        (EMPTY, {"search": SEARCH}, 0, "search config requires an installed schema version"),
        (EMPTY, {"search": None, "routingKey": KEY}, 0, "search config requires an installed schema version"),
        (EMPTY, {"schema": V1}, 1, "first schema requires empty stream"),
        (EMPTY, {"schema": V1, "routingKey": None}, 0, "routingKey must be an object"),
        (EMPTY, {"routingKey": {"jsonPointer": "/a"}}, 0, "routingKey.required must be a boolean"),
        (
            EMPTY,
            {"routingKey": {"jsonPointer": "/a", "required": 1}},
            0,
            "routingKey.required must be a boolean",
        ),
        (EMPTY, {"routingKey": {**KEY, "x": 1}}, 0, "routingKey.x is not supported"),
        (
            EMPTY,
            {"routingKey": {**KEY, "jsonPointer": "a"}},
            0,
            "routingKey.jsonPointer must be a JSON pointer",
        ),
        (EMPTY, {"routingKey": {**KEY, "jsonPointer": 5}}, 0, "routingKey.jsonPointer must be a string"),
        (EMPTY, {"schema": {"type": "x"}}, 0, "invalid schema: "),
        (FIRST, {"schema": V2}, 0, "lens required"),
        (SECOND, {"schema": V2}, 0, "lens required"),
        (FIRST, {"schema": V1, "routingKey": KEY}, 0, "lens required"),
        (FIRST, {"schema": V2, "lens": {**RENAME, "schema": "x"}}, 0, "lens schema mismatch"),
        (
            FIRST,
            {"schema": V2, "lens": {**RENAME, "ops": []}},
            0,
            "invalid lens: ops must be a non-empty array",
        ),
        (FIRST, {"schema": V3, "lens": RENAME}, 0, "lens proof: 0 /n is required by the new schema"),
        (FIRST, {"schema": V2, "lens": RENAME, "search": {}}, 0, "search.fields must be an object"),
    ],
)
def test_refusals(registry: Registry, body: Any, next_sequence: int, message: str) -> None:
    error = refused(registry, body, next_sequence)
    assert error.code == "invalid_request"
    assert error.message.startswith(message)


@pytest.mark.parametrize(
    ("registry", "body"),
    [
        (FIRST, {"schema": V2, "lens": {**RENAME, "from": 0, "to": 1}}),
        (FIRST, {"schema": V2, "lens": {**RENAME, "from": 1, "to": 3}}),
        (SECOND, {"schema": V3, "lens": RENAME}),
        (EMPTY, {"schema": V1, "lens": RENAME}),
    ],
)
def test_a_lens_between_other_versions_is_a_conflict(registry: Registry, body: Any) -> None:
    error = refused(registry, body)
    assert (error.code, error.message) == ("conflict", "lens version mismatch")


def test_the_first_version_and_the_next() -> None:
    assert (FIRST.version, FIRST.boundaries, FIRST.schemas) == (1, (VersionBoundary(0, 1),), {1: V1})
    assert (SECOND.version, SECOND.lenses) == (2, {1: RENAME})
    assert SECOND.boundaries == (VersionBoundary(0, 1), VersionBoundary(150, 2))
    assert [SECOND.version_at(sequence) for sequence in (0, 149, 150, 10**9)] == [1, 1, 2, 2]
    assert EMPTY.version_at(0) == 0
    third = update(SECOND, {"schema": V3, "lens": ADD}, 150)
    assert third.lenses[2] == lens(2, {"op": "add", "path": "/n", "schema": {"type": "array"}, "default": []})
    assert third.version_at(150) == 3


def test_a_lens_to_the_first_version_may_be_given() -> None:
    first = update(EMPTY, {"schema": V1, "lens": lens(0, {"op": "wrap", "path": "", "mode": "singleton"})})
    assert set(first.lenses) == {0}
    assert Promoter(first).promote_payload(b"1", 5) == b"1"


def test_routing_key_and_search_alone() -> None:
    keyed = update(EMPTY, {"routingKey": KEY}, 7)
    assert keyed.routing_key == RoutingKey("/user", False)
    assert (keyed.version, keyed.boundaries) == (0, ())
    assert update(keyed, {"routingKey": None}, 7) == EMPTY
    both = update(FIRST, {"routingKey": KEY, "search": SEARCH}, 7)
    assert both.search is not None
    evolved = update(both, {"schema": V2, "lens": RENAME}, 7)
    assert (evolved.search, evolved.routing_key) == (both.search, both.routing_key)
    assert update(both, {"search": None, "routingKey": None}, 7) == FIRST


@pytest.mark.parametrize(
    ("registry", "body"),
    [
        (FIRST, {"schema": V1}),
        (FIRST, {"schema": dict(reversed(V1.items())), "apiVersion": "durable.streams/schema-registry/v1"}),
        (SECOND, {"schema": V2, "lens": RENAME}),
        (
            update(FIRST, {"routingKey": KEY, "search": SEARCH}),
            {"schema": V1, "routingKey": KEY, "search": SEARCH},
        ),
        (update(EMPTY, {"routingKey": KEY}), {"routingKey": KEY}),
        (update(SECOND, {"schema": V3, "lens": ADD}), {"schema": V3, "lens": ADD}),
    ],
)
def test_saying_it_again_changes_nothing(registry: Registry, body: Any) -> None:
    assert update(registry, body, 1000).to_json() == registry.to_json()


def test_equal_means_equal_as_json() -> None:
    first = update(EMPTY, {"schema": {"const": 1}})
    assert refused(first, {"schema": {"const": True}}).message == "lens required"


def test_a_registry_comes_back_from_its_stored_form() -> None:
    full = update(SECOND, {"routingKey": KEY, "search": SEARCH}, 200)
    for registry in (EMPTY, FIRST, SECOND, full):
        document = registry.to_json()
        assert read_registry(document).to_json() == document
        assert read_registry(document) == registry
    assert EMPTY.to_json() == (
        b'{"apiVersion":"durable.streams/schema-registry/v1","schema":"orders","currentVersion":0,'
        b'"boundaries":[],"schemas":{},"lenses":{}}'
    )


def test_the_number_of_versions_has_a_bound() -> None:
    crowded = Registry(name="orders", version=1000, schemas={1000: V1})
    body = {"schema": V2, "lens": {**RENAME, "from": 1000, "to": 1001}}
    assert refused(crowded, body).message == "a stream can have at most 1000 schema versions"


def test_a_fork_goes_on_with_what_its_source_had() -> None:
    fork = fork_registry(SECOND, "copy", 100)
    assert fork.boundaries == (VersionBoundary(0, 1), VersionBoundary(100, 2))
    assert (fork.name, fork.lenses[1]["schema"]) == ("copy", "copy")
    assert read_registry(fork.to_json()) == fork


def test_l2_promotion_is_each_step_in_order() -> None:
    third = update(SECOND, {"schema": V3, "lens": ADD}, 200)
    promoter = Promoter(third)
    assert promoter.promote_payload(b'{"ts": "x"}', 149) == b'{"at":"x","n":[]}'
    assert promoter.promote_payload(b'{"at": "x"}', 150) == b'{"at":"x","n":[]}'
    assert promoter.promote_payload(b'{"at": "x", "n": [1]}', 200) == b'{"at": "x", "n": [1]}'
    assert promoter.needed(199)
    assert not promoter.needed(200)
    assert not Promoter(FIRST).needed(0)
    with pytest.raises(LensFailureError, match="/ts is absent"):
        promoter.promote_payload(b"{}", 0)
    with pytest.raises(LensFailureError, match="number out of range"):
        promoter.promote_payload(b"1e999", 0)


@pytest.mark.parametrize(
    ("record", "required", "outcome"),
    [
        ({"user": {"id": "ü"}}, True, "ü".encode()),
        ({"user": {"id": "x"}}, False, b"x"),
        ({"user": {"id": ""}}, False, None),
        ({"user": {"id": None}}, False, None),
        ({"user": {}}, False, None),
        (5, False, None),
        ({"user": {"id": ""}}, True, "routing key missing"),
        ({"user": {"id": None}}, True, "routing key missing"),
        ([], True, "routing key missing"),
        ({"user": {"id": 5}}, False, "routing key must be string"),
        ({"user": {"id": False}}, True, "routing key must be string"),
        ({"user": {"id": "x" * 1025}}, True, "routing key must have at most 1024 bytes"),
        ({"user": {"id": "\ud800"}}, True, "routing key must be valid Unicode"),
    ],
)
def test_routing_keys(record: Any, required: bool, outcome: bytes | str | None) -> None:
    rule = RoutingKeyReader(RoutingKey("/user/id", required), 1024)
    if isinstance(outcome, str):
        with pytest.raises(TailraceError) as caught:
            rule.key_of(record)
        assert (caught.value.code, caught.value.message) == ("invalid_request", outcome)
    else:
        assert rule.key_of(record) == outcome
