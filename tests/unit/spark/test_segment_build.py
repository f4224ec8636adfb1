"""Kernels against the reference: whatever the records, both paths build the same, right files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.aggregate_model import rollup_search
from support.companions import (
    Oracle,
    Split,
    Stored,
    build,
    parts_of,
    plan_of,
    rows_in,
)
from support.queries import LEAVES, payload_of, records
from support.search_model import registry_of
from tailrace.schema.profiles.profile import GENERIC, MetricsProfile, install_profile
from tailrace.schema.registry import Registry, VersionBoundary
from tailrace.schema.search_config import parse_search_config
from tailrace.search.index_files.format import key_hash
from tailrace.search.records import RecordView, tokenize_text
from tailrace.spark.index.aggregate_states import summary_from_row
from tailrace.spark.index.file_writer import BuiltIndexFile
from tailrace.spark.index.full_text import is_indexed_elsewhere
from tailrace.spark.index.segment_build import column_fields


def rollup_view(evolved_at: int | None = None) -> RecordView:
    """Every kind of field, one of them a keyword that only the text index has."""
    body = rollup_search()
    bindings = [{"version": 1, "jsonPointer": "/service"}]
    body["fields"]["loose"] = {"kind": "keyword", "bindings": bindings, "prefix": True}
    return RecordView(msgspec.structs.replace(registry_of(evolved_at), search=parse_search_config(body)))


PARTS = st.sampled_from([None, 0, 1, 3, 2**63 - 1, -1, 2.5, "7", "x"])
HISTOGRAMS = st.sampled_from([None, {}, {"1": 1}, {"1": 2, "4": 1}, {"0.5": "3"}, {"x": 1}, []])
KEYS = st.one_of(st.none(), st.sampled_from([b"", b"a", b"b", "😀".encode(), b"\0\xff"]))


def _with_parts(record: Any, parts: dict[str, Any]) -> Any:
    return (
        record | {name: value for name, value in parts.items() if value is not None}
        if isinstance(record, dict)
        else record
    )


payloads = st.one_of(
    st.builds(
        _with_parts,
        records,
        st.fixed_dictionaries(
            {"count": PARTS, "sum": PARTS, "min": PARTS, "max": PARTS, "buckets": HISTOGRAMS}
        ),
    ).map(payload_of),
    st.sampled_from([b"not json", b"[1,2", b'{"id":1e999}', b'{"user":[{"plan":"x"}],"id":"a"}', b"\xff"]),
)


@st.composite
def stored(draw: st.DrawFn) -> list[Stored]:
    """Rows of one segment; there may be gaps between their entries."""
    entry = draw(st.integers(1, 40))
    rows: list[Stored] = []
    for payload in draw(st.lists(payloads, min_size=1, max_size=30)):
        rows.append(Stored(entry, payload, draw(KEYS)))
        entry += draw(st.sampled_from([1, 1, 1, 5]))
    return rows


def _check(rows: Sequence[Stored], view: RecordView, built: dict[str, BuiltIndexFile]) -> None:
    oracle, members = Oracle(rows, view), plan_of(view.registry).members
    assert rows_in(built["exact"].data) == oracle.exact(members["exact"])
    columns = column_fields(members["col"], view.primary)
    assert rows_in(built["col"].data) == oracle.col(columns)
    _check_keys(oracle, built)
    _check_agg(oracle, built["agg"])
    _check_split(oracle, built["fts"], members["fts"])


def _check_keys(oracle: Oracle, built: dict[str, BuiltIndexFile]) -> None:
    expected = oracle.keys()
    found = rows_in(built["routing_key_index"].data)
    assert [(row["key_hash"], row["key"]) for row in found] == sorted(
        (key_hash(key), key) for key in expected
    )
    for row in found:
        fact = expected[row["key"]]
        assert (row["first_entry"], row["last_entry"], row["entry_count"]) == (
            fact["first"],
            fact["last"],
            fact["count"],
        )
        assert [list(span) for span in zip(row["span_firsts"], row["span_lasts"], strict=True)] == fact[
            "spans"
        ]


def _check_agg(oracle: Oracle, built: BuiltIndexFile) -> None:
    expected = oracle.agg()
    found: dict[tuple[Any, ...], Any] = {}
    order: list[Any] = []
    for row in rows_in(built.data):
        key = (
            row["rollup"],
            row["interval_ms"],
            row["window_start"],
            tuple(row["dimensions"]),
            row["measure"],
        )
        order.append((*key[:3], [(text is not None, text or "") for text in key[3]], key[4]))
        state = row["count"] if row["sketch"] is None else summary_from_row(row)
        if key in found:
            found[key].merge(state)
        else:
            found[key] = state
    assert order == sorted(order)
    assert found.keys() == expected.keys()
    for key, state in expected.items():
        assert found[key] == state if isinstance(state, int) else parts_of(found[key]) == parts_of(state), key


def _check_split(oracle: Oracle, built: BuiltIndexFile, names: Sequence[str]) -> None:
    fields = oracle.view.config.fields
    texts = [name for name in names if fields[name].kind == "text"]
    keywords = [name for name in names if name not in texts and not is_indexed_elsewhere(fields[name])]
    expected = oracle.terms([*texts, *keywords])
    split = Split(built.data)
    assert rows_in(split.terms) == expected
    assert split.facts["keyword"] == keywords
    for place, name in enumerate(texts):
        lengths: list[int] = next((row["frequencies"] for row in expected if row["field"] == name), [])
        facts = split.facts["text"][place]
        assert facts["field"] == name
        assert facts["documents"] == sum(length > 0 for length in lengths)
        assert facts["tokens"] == sum(lengths)


@settings(max_examples=60)
@given(stored(), st.sampled_from([None, 3, 20]))
def test_p7_i2_both_paths_build_what_the_records_say(rows: list[Stored], evolved_at: int | None) -> None:
    view = rollup_view(evolved_at)
    plan = plan_of(view.registry)
    fast, slow = build(rows, plan), build(rows, plan, reference=True)
    for family, one in fast.items():
        assert one == slow[family], family
    _check(rows, view, fast)


@settings(max_examples=20)
@given(stored())
def test_p18_little_memory_gives_the_same_bytes(rows: list[Stored]) -> None:
    plan = plan_of(rollup_view().registry)
    families = ("exact", "agg", "col", "routing_key_index")
    assert build(rows, plan, families=families) == build(rows, plan, families=families, memory_bytes=64)


def _objects(values: Sequence[Any], **more: Any) -> list[Stored]:
    return [
        Stored(entry, payload_of({"at": entry, **more, **value}), b"k%d" % (entry % 3))
        for entry, value in enumerate(values, 1)
    ]


NASTY: dict[str, list[Stored]] = {
    "emoji and zero bytes": _objects([{"id": "😀" * 9, "message": "a\0b 😀 ünïcödé ǅ İ ß"}, {"id": "\0"}]),
    "long strings": _objects(
        [{"id": "é" * 1_000_000, "message": "w" * 5000 + " x" * 1000}, {"id": "é" * 999_999}]
    ),
    "edges of integers": _objects(
        [{"status": number} for number in (2**63 - 1, -(2**63), 2**63, 5.0, "5", True)]
    ),
    "a field that changes its type": _objects(
        [{"id": leaf, "status": leaf, "ratio": leaf, "message": leaf} for leaf in LEAVES]
    ),
    "many keys": _objects([{f"key{index}": index for index in range(10_000)} | {"id": "x"}] * 3),
    "no objects at all": [Stored(entry, b"[1]") for entry in range(5, 9)],
    "long arrays": _objects([{"status": list(range(3000)), "id": ["a", "a", ["b", ["a"]]]}] * 5),
    "deep": [*_objects([{"id": "x"}]), Stored(2, b'{"a":' * 400 + b"1" + b"}" * 400)],
}


@pytest.mark.parametrize("name", NASTY)
@pytest.mark.parametrize("evolved_at", [None, 2])
def test_p7_nasty_records(name: str, evolved_at: int | None) -> None:
    rows, view = NASTY[name], rollup_view(evolved_at)
    plan = plan_of(view.registry)
    fast, slow = build(rows, plan), build(rows, plan, reference=True)
    assert fast == slow
    _check(rows, view, fast)


def test_phrases_stay_within_a_value() -> None:
    view = rollup_view()
    rows = _objects([{"message": ["one two", "three"]}, {"message": "two three"}])
    split = Split(build(rows, plan_of(view.registry))["fts"].data)
    assert split.with_phrase("message", tokenize_text("Two Three")) == [2]
    assert split.with_phrase("message", tokenize_text("one two")) == [1]


def test_lists_that_are_too_long_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    view = rollup_view()
    rows = _objects([{"id": "same" if entry % 5 else "other", "message": "word"} for entry in range(40)])
    whole = build(rows, plan_of(view.registry))
    for module in ("exact", "full_text"):
        monkeypatch.setattr(f"tailrace.spark.index.{module}.LIST_ENTRIES_MAX", 3)
    cut = build(rows, plan_of(view.registry))
    spilled = build(rows, plan_of(view.registry), families=["exact"], memory_bytes=64)
    assert cut["exact"] == spilled["exact"]
    joined: dict[tuple[str, Any], list[int]] = {}
    for row in rows_in(cut["exact"].data):
        assert len(row["entries"]) <= 3
        joined.setdefault((row["field"], row["value"]), []).extend(row["entries"])
    assert joined == {(row["field"], row["value"]): row["entries"] for row in rows_in(whole["exact"].data)}
    terms = rows_in(Split(cut["fts"].data).terms)
    assert {row["documents"] for row in terms if row["term"] == "word"} == {40}
    assert [entry for row in terms if row["term"] == "word" for entry in row["entries"]] == list(range(1, 41))


def test_metrics_blocks() -> None:
    profile = MetricsProfile()
    registry = install_profile(profile, GENERIC, Registry(name="m"), 0)
    given = [
        {
            "metric": "cpu",
            "unit": "%",
            "windowStart": 20 - at,
            "windowEnd": 30,
            "count": at,
            "sum": total,
            "tags": {"h": at},
        }
        for at, total in enumerate([0, 2.5, 2**60 + 1])
    ]
    rows = [Stored(entry, json.dumps(profile.accept(one, 0)).encode()) for entry, one in enumerate(given, 3)]
    rows.append(Stored(9, b"7"))
    plan = plan_of(registry, "metrics")
    fast, slow = build(rows, plan), build(rows, plan, reference=True)
    assert fast["mblk"] == slow["mblk"]
    found = rows_in(fast["mblk"].data)
    assert [row["_entry"] for row in found] == [5, 4, 3, 9]
    assert [row["windowStart"] for row in found] == [18, 19, 20, None]
    assert [(row["count"], row["sum"], row["sum_whole"]) for row in found] == [
        (2, float(2**60), 2**60 + 1),
        (1, 2.5, None),
        (None, None, None),
        (None, None, None),
    ]
    assert found[0]["dimensionPairs"] == ["h=2"]
    _check_agg(Oracle(rows, RecordView(registry)), fast["agg"])


def test_metrics_without_a_search_configuration() -> None:
    registry = Registry(name="m", version=1, boundaries=(VersionBoundary(0, 1),), schemas={1: {}})
    built = build([Stored(1, b'{"metric":"cpu","count":1,"sum":2}')], plan_of(registry, "metrics"))
    assert rows_in(built["mblk"].data)[0]["metric"] == "cpu"


def test_pointers_into_arrays_and_through_leaves() -> None:
    fields = {
        "first": {"kind": "keyword", "bindings": [{"version": 1, "jsonPointer": "/a/0"}], "exact": True},
        "inner": {"kind": "keyword", "bindings": [{"version": 1, "jsonPointer": "/a/0/b"}], "exact": True},
        "whole": {"kind": "keyword", "bindings": [{"version": 1, "jsonPointer": "/a"}], "exact": True},
        "below": {"kind": "keyword", "bindings": [{"version": 1, "jsonPointer": "/a/b/c"}], "exact": True},
        "root": {"kind": "keyword", "bindings": [{"version": 1, "jsonPointer": ""}], "exact": True},
        "digit": {"kind": "keyword", "bindings": [{"version": 1, "jsonPointer": "/7"}], "exact": True},
    }
    search = parse_search_config({"fields": fields})
    registry = Registry(
        name="s", version=1, boundaries=(VersionBoundary(0, 1),), schemas={1: {}}, search=search
    )
    found: list[Any] = [
        {"a": ["x", "y"]},
        {"a": [{"b": "z"}]},
        {"a": {"b": {"c": "d"}, "0": "e"}},
        {"a": "f", "7": "g"},
    ]
    rows = [Stored(entry, payload_of(record)) for entry, record in enumerate(found, 1)]
    plan = plan_of(registry)
    fast = build(rows, plan)
    assert fast == build(rows, plan, reference=True)
    assert rows_in(fast["exact"].data) == Oracle(rows, RecordView(registry)).exact(sorted(fields))


def test_facts() -> None:
    plan = plan_of(rollup_view().registry)
    built = build(_objects([{"id": "x"}]), plan)
    facts = Split(built["fts"].data).facts
    assert facts["plan_hash"] == plan.plan.hash
    assert (facts["first"], facts["last"], facts["rows"]) == ("1", "1", "1")
    assert built["col"].stats == {"ts_min": 1, "ts_max": 1}
    assert msgspec.json.encode({family: one.stats for family, one in built.items()})
