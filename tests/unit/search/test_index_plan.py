"""The index plan: its hash moves with what companions are made of, and with nothing else."""

from __future__ import annotations

import copy
import io
import zipfile
from typing import Any, cast

import msgspec
import pytest

from support.companions import Stored, build, plan_of, rows_in
from tailrace.schema.registry import Registry, RoutingKey, VersionBoundary
from tailrace.schema.search_config import parse_search_config
from tailrace.search.index_files.format import FTS
from tailrace.search.index_files.index_plan import (
    FAMILIES,
    BuildPlan,
    IndexPlan,
    index_plan,
    load_plan,
    store_plan,
)
from tailrace.storage.segments.index_files import (
    IndexFile,
    has_valid_name,
    index_file_name,
    index_file_range,
    plan_name,
)

SEARCH: dict[str, Any] = {
    "primaryTimestampField": "at",
    "defaultFields": [{"field": "message", "boost": 2}],
    "aliases": {"svc": "service"},
    "fields": {
        "at": {"kind": "date", "bindings": [{"version": 1, "jsonPointer": "/at"}], "column": True},
        "service": {
            "kind": "keyword",
            "normalizer": "lowercase_v1",
            "bindings": [{"version": 1, "jsonPointer": "/service"}],
            "exact": True,
            "prefix": True,
        },
        "ms": {
            "kind": "float",
            "bindings": [{"version": 1, "jsonPointer": "/ms"}],
            "column": True,
            "aggregatable": True,
        },
        "message": {
            "kind": "text",
            "analyzer": "unicode_word_v1",
            "bindings": [{"version": 1, "jsonPointer": "/message"}],
            "positions": True,
            "exists": True,
        },
    },
    "rollups": {
        "requests": {
            "include": "service:a AND ms:>5",
            "dimensions": ["service"],
            "intervals": ["1m", "1h"],
            "measures": {
                "n": {"kind": "count", "include": "has:message"},
                "lat": {"kind": "summary", "field": "ms", "histogram": "log2_v1"},
                "parts": {
                    "kind": "summary_parts",
                    "countJsonPointer": "/p/c",
                    "sumJsonPointer": "/p/s",
                    "minJsonPointer": "/p/lo",
                    "maxJsonPointer": "/p/hi",
                    "sketchJsonPointer": "/p/k",
                },
            },
        }
    },
}
# Every leaf that companions are made of, and another value for it.
CHANGES: list[tuple[list[str | int], object]] = [
    (["fields", "service", "bindings", 0, "jsonPointer"], "/svc"),
    (["fields", "service", "normalizer"], "identity_v1"),
    (["fields", "service", "prefix"], False),
    (["fields", "ms", "kind"], "integer"),
    (["fields", "ms", "sortable"], True),
    (["fields", "message", "positions"], False),
    (["primaryTimestampField"], None),
    (["rollups", "requests", "include"], "service:b AND ms:>5"),
    (["rollups", "requests", "timestampField"], "then"),
    (["rollups", "requests", "dimensions"], []),
    (["rollups", "requests", "intervals"], ["1m"]),
    (["rollups", "requests", "measures", "n", "include"], None),
    (["rollups", "requests", "measures", "lat", "histogram"], None),
    (["rollups", "requests", "measures", "parts", "countJsonPointer"], "/p/n"),
    (["rollups", "requests", "measures", "parts", "sumJsonPointer"], "/p/t"),
    (["rollups", "requests", "measures", "parts", "minJsonPointer"], "/p/a"),
    (["rollups", "requests", "measures", "parts", "maxJsonPointer"], "/p/z"),
    (["rollups", "requests", "measures", "parts", "sketchJsonPointer"], "/p/y"),
    (["rollups", "requests", "measures", "parts", "histogramJsonPointer"], "/p/h"),
]


def changed(path: list[str | int], value: object) -> dict[str, Any]:
    search = copy.deepcopy(SEARCH)
    search["fields"]["then"] = {"kind": "date", "bindings": [{"version": 1, "jsonPointer": "/then"}]}
    place: Any = search
    for step in path[:-1]:
        place = place[step]
    if value is None:
        place.pop(path[-1], None)
        if path == ["primaryTimestampField"]:
            search["rollups"]["requests"]["timestampField"] = "at"
    elif path:
        place[path[-1]] = value
    return search


def registry(search: dict[str, Any] | None = SEARCH, **other: Any) -> Registry:
    boundaries = (VersionBoundary(0, 1),)
    parsed = None if search is None else parse_search_config(search)
    return Registry(name="s", version=1, boundaries=boundaries, search=parsed, **other)


def plan(search: dict[str, Any]) -> IndexPlan:
    return index_plan(registry(search))


@pytest.mark.parametrize(("path", "value"), CHANGES, ids=str)
def test_i1_whatever_shapes_a_companion_changes_the_hash(path: list[str | int], value: object) -> None:
    base = plan(changed(["aliases", "svc"], None))
    assert plan(changed(path, value)).hash != base.hash


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["aliases", "svc"], "message"),
        (["defaultFields"], [{"field": "message", "boost": 9}]),
        (["rollups", "requests", "include"], "(svc:A) ms:>5"),
        (["rollups", "requests", "intervals"], ["1h", "1m"]),
    ],
    ids=str,
)
def test_i1_what_is_only_asked_about_does_not(path: list[str | int], value: object) -> None:
    assert plan(changed(path, value)).hash == plan(changed(["aliases", "other"], None)).hash


def test_fingerprints_of_what_stays_the_same_stay_the_same() -> None:
    before = plan(changed(["aliases", "svc"], None))
    after = plan(changed(["fields", "ms", "bindings", 0, "jsonPointer"], "/took"))
    same = {name for name, print_ in before.fingerprints.items() if after.fingerprints[name] == print_}
    assert same >= {"field:at", "field:service", "field:message", "family:exact", "family:fts"}
    assert not same & {"field:ms", "rollup:requests", "family:col", "family:agg"}


def test_families_are_those_that_are_needed() -> None:
    nothing = Registry(name="s")
    assert index_plan(nothing).families == ()
    assert index_plan(nothing, keyed=True).families == ("routing_key_index",)
    routed = registry(None, routing_key=RoutingKey("/k", False))
    assert index_plan(routed).families == ("routing_key_index", "routing_key_lexicon")
    assert index_plan(registry(), "metrics", keyed=True).families == tuple(
        name for name in FAMILIES if name != "routing_key_lexicon"
    )


def lens(*ops: dict[str, object]) -> dict[str, object]:
    return {"apiVersion": "durable.lens/v1", "schema": "s", "from": 1, "to": 2, "ops": list(ops)}


def test_a_lens_counts_as_far_as_it_touches_a_field() -> None:
    search = changed(["aliases", "svc"], None)
    one = index_plan(registry(search))
    two = msgspec.structs.replace(
        registry(search),
        version=2,
        boundaries=(VersionBoundary(0, 1), VersionBoundary(10, 2)),
        lenses={1: lens({"op": "rename", "from": "/took", "to": "/ms"})},
    )
    after = index_plan(two)
    assert after.fingerprints["field:ms"] != one.fingerprints["field:ms"]
    assert after.fingerprints["field:service"] == one.fingerprints["field:service"]
    # What the renamed value was made from counts as well.
    longer = lens(
        {"op": "copy", "from": "/raw", "to": "/took"}, {"op": "rename", "from": "/took", "to": "/ms"}
    )
    assert index_plan(msgspec.structs.replace(two, lenses={1: longer})).hash != after.hash


def test_a_plan_can_be_stored_and_built_from() -> None:
    source = registry()
    made = index_plan(source, "evlog", keyed=True)
    profile = msgspec.json.encode({"apiVersion": "durable.streams/profile/v1", "profile": {"kind": "evlog"}})
    loaded = load_plan(store_plan(made, source, profile))
    assert (loaded.plan.hash, loaded.registry) == (made.hash, source)
    assert loaded.profile_kind == "evlog"
    assert loaded.view is not None
    assert loaded.view.record(1, b'{"ms":1}') == {"ms": 1}
    assert loaded.members["fts"] == ("message", "service")
    again = index_plan(loaded.registry, loaded.profile_kind, keyed=True)
    assert again.hash == made.hash
    assert load_plan(store_plan(index_plan(Registry(name="s")), Registry(name="s"), None)).view is None


def test_names_of_companions() -> None:
    plan_hash = "sha256:" + "ab" * 32
    name = index_file_name(plan_hash, "col", 1, 20, "cd" * 32, "parquet")
    assert name == (
        "companions/abababababababab/col/00000000000000000001-00000000000000000020.cdcdcdcdcdcdcdcd.parquet"
    )
    companion = IndexFile("col", 1, 20, 20, name, 5, "cd" * 32, {}, plan_hash)
    assert has_valid_name(companion)
    assert not has_valid_name(msgspec.structs.replace(companion, first=2))
    assert index_file_range(name) == (1, 20)
    assert index_file_range("segments/x") is None
    assert plan_name(plan_hash) == f"plans/{'ab' * 32}.json"
    assert msgspec.json.decode(msgspec.json.encode(companion), type=IndexFile) == companion
    assert cast("list[object]", msgspec.json.decode(msgspec.json.encode(companion)))[4] == name


def _probe() -> list[Stored]:
    """Records in which every leaf of the configuration makes a difference."""
    rows: list[Stored] = []
    for number in range(1, 40):
        parts = {"c": 1 + number % 3, "n": 2, "s": number, "t": 7, "lo": 1, "a": 0, "hi": number, "z": 9}
        record: dict[str, Any] = {"at": number * 60_000, "then": number * 3_600_000, "ms": number / 2}
        record |= {"service": "aAbB"[number % 4], "svc": "x", "p": {**parts, "h": {"1": 1}}}
        if number % 5:
            record["message"] = f"word{number} Word more"
        rows.append(Stored(number, msgspec.json.encode(record)))
    return rows


def _contents(found: BuildPlan) -> dict[str, Any]:
    """What the files of a plan say, without what they say about the plan."""
    said: dict[str, Any] = {}
    for family, one in build(_probe(), found).items():
        if family == FTS:
            with zipfile.ZipFile(io.BytesIO(one.data)) as split:
                facts = msgspec.json.decode(split.read("split.json"))
                terms = rows_in(split.read("terms.parquet"))
            said[family] = {name: facts[name] for name in ("text", "keyword")}, terms
        else:
            said[family] = rows_in(one.data), one.stats
    return said


# Nothing in the records tells these: the one would be a sketch, and the other two say where to look.
UNSEEN = ["sketchJsonPointer", "prefix", "sortable"]


def test_i1_what_has_one_hash_has_one_content() -> None:
    """And every change of a leaf that companions are made of shows in what they say."""
    base, other = (plan_of(registry(changed(["aliases", "svc"], value))) for value in (None, "message"))
    contents = _contents(base)
    assert (base.plan.hash, contents) == (other.plan.hash, _contents(other))
    for path, value in CHANGES:
        seen = _contents(plan_of(registry(changed(path, value)))) != contents
        assert seen == (path[-1] not in UNSEEN), path
