"""Predicates as columns of Spark: they say what the closures and the library say, or nothing at all."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any, NamedTuple

import msgspec
import orjson
import pytest
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from support.watch_language import Maker
from tailrace.common.errors import TailraceError
from tailrace.spark import matching
from tailrace.spark.live_queries.column_predicates import (
    LoweredPredicate,
    document_image,
    lower_predicate,
    variant_path,
)
from tailrace.watch.cel import CelProgram, Node, compile_cel
from tailrace.watch.collection import encode_control_entry
from tailrace.watch.document import ChangeEntry, ChangeImages, PreviousVersion, decode_change, encode_change
from tailrace.watch.evaluator import NotCompilableError
from tailrace.watch.predicate import Predicate, PredicatePart
from tailrace.watch.query import read_query

TOGETHER = 6  # predicates in one query: each becomes a few hundred lines of Java


class Case(NamedTuple):
    source: str
    node: Node
    program: CelProgram
    column: LoweredPredicate


def field(name: str) -> Column:
    return f.try_variant_get(f.col("doc"), variant_path(name), "variant")


def case_of(source: str) -> Case | None:
    """None if it is no expression, or not one for columns."""
    try:
        node, program = compile_cel(source)
        return Case(source, node, program, lower_predicate(node, field))
    except (TailraceError, NotCompilableError):
        return None


def frame_of(spark: SparkSession, documents: list[dict[str, Any]]) -> DataFrame:
    rows = [(number, json.dumps(one)) for number, one in enumerate(documents)]
    return spark.createDataFrame(rows, "number int, raw string").select(
        "number", f.parse_json("raw").alias("doc")
    )


def compared(spark: SparkSession, cases: list[Case], documents: list[dict[str, Any]]) -> int:
    """Decides every pair in three ways; gives how many there were."""
    frame, pairs = frame_of(spark, documents).cache(), 0
    for some in [cases[at : at + TOGETHER] for at in range(0, len(cases), TOGETHER)]:
        columns = [case.column.holds.alias(f"c{place}") for place, case in enumerate(some)]
        for row in frame.select("number", *columns).collect():
            document = documents[row["number"]]
            for place, case in enumerate(some):
                expected = case.program.holds(doc=document)
                assert row[f"c{place}"] is expected, (case.source, document)
                assert Predicate([PredicatePart(case.node, case.program)]).matches(document) is expected
                pairs += 1
    return pairs


def generated(seeds: range, wanted: int) -> list[Case]:
    found = (case for seed in seeds if (case := case_of(Maker(seed).truth())) is not None)
    return list(islice(found, wanted))


def test_w14_columns_equal_closures_and_the_library(spark: SparkSession) -> None:
    maker = Maker(3)
    documents = [maker.document() for _ in range(50)]
    assert compared(spark, generated(range(1, 400), 60), documents) == 3000


@pytest.mark.nightly
def test_w14_columns_equal_closures_and_the_library_on_many(spark: SparkSession) -> None:
    maker = Maker(4)
    documents = [maker.document() for _ in range(100)]
    assert compared(spark, generated(range(20_000, 24_000), 220), documents) > 20_000


PLAIN = (
    "doc.a == 1",
    "doc.a != 1",
    "doc.n > 1.5 && doc.flag",
    "!(doc.n > 1.5) || doc.text == 'abc'",
    "doc.text.startsWith('a') || doc.text.endsWith('c')",
    "doc.text in ['a', 'b', 1, null]",
    "'a' in doc.list || 'a' in doc.map",
    "has(doc.map.a) && !has(doc.b)",
    'doc["x-y"] == doc["with space"] + 1',
    "doc['quote\\'d'] == \"a'b\"",
    "doc.list[1] == 'a' || doc.list[0] > 2",
    "size(doc.text) > 1 || size(doc.list) == 0 || size(doc.map) == 1",
    "doc.n * 2 - 1 >= 3",
    "doc.a % 3 == -1 || doc.a / 2 == 0 || -doc.a < 0",
    "doc.list.exists(x, x == 1) || doc.list.all(x, x > 0)",
    "doc.list.exists_one(x, x == 'a')",
    "doc.map.exists(x, x == 'a')",
    "(doc.flag ? doc.a : doc.b) == 2",
    "doc.n == 9007199254740993",
    "doc.flag < true",
)


def test_w14_what_subscriptions_are_made_of_is_lowered(spark: SparkSession) -> None:
    cases = [case for source in PLAIN if (case := case_of(source)) is not None]
    assert [case.source for case in cases] == list(PLAIN)
    maker = Maker(11)
    documents = [maker.document() for _ in range(60)]
    documents += [
        {"a": a, "n": n, "list": [1, a], "text": "abc"} for a in (-7, 0, 3, 2**63 - 1) for n in (2, 2.5)
    ]
    compared(spark, cases, documents)


@pytest.mark.usefixtures("spark")  # columns are made in a session
@pytest.mark.parametrize(
    "source",
    [
        "doc.a == doc.b",  # both may be lists
        "doc.a in doc.list",
        "doc.n / doc.a > 1",
        "doc.list[doc.n] == 1",
        "int(doc.text) == 10",
        "doc.a == 1u",
        "doc == {'a': 1}",
        "size(doc) == 1",
        "doc.list + doc.list == []",
    ],
)
def test_what_cannot_be_said_exactly_is_left_to_the_matcher(source: str) -> None:
    node, _ = compile_cel(source)
    with pytest.raises(NotCompilableError):
        lower_predicate(node, field)


def test_what_takes_too_many_steps_is_not_decided(spark: SparkSession) -> None:
    documents = [{"l": list(range(size))} for size in (3, 10_000, 10_001)]
    for source in ("-1 in doc.l", "doc.l.exists(x, x < 0)"):
        case = case_of(source)
        assert case is not None
        rows = frame_of(spark, documents).select(case.column.undecided.alias("undecided")).collect()
        at_most = 10_000 if " in " in source else 3333
        assert [row["undecided"] for row in rows] == [len(one["l"]) > at_most for one in documents], source


def entry_of(version: int, before: dict[str, Any] | None, after: dict[str, Any] | None) -> bytes:
    return encode_change(
        ChangeEntry(
            database="d",
            collection="c",
            documentKey=f"k{version}",
            op="insert" if before is None else "delete" if after is None else "replace",
            before=msgspec.Raw(orjson.dumps(before)),
            after=msgspec.Raw(orjson.dumps(after)),
            images=ChangeImages("full", "full"),
            version=version,
            createdAt=5,
            prev=None if before is None else PreviousVersion(version - 1, 6),
            txn=None,
            commitTime="",
        )
    )


def test_w17_both_images_of_a_change_are_the_documents_that_predicates_see(spark: SparkSession) -> None:
    time_ns = 1_794_876_199_097_999_999
    images: list[dict[str, Any] | None] = [{"n": 1, "version": 9, "_x": 1}, {"n": None}, None]
    entries = [
        entry_of(number + 2, before, after) for number in range(3) for before in images for after in images
    ]
    entries = [raw for raw in entries if b'"before":null,"after":null' not in raw]
    sources = [
        "doc.n == 1",
        "has(doc.n)",
        "doc.version == 3 && doc.id == 'k3'",
        "doc.version < 3",
        f"doc.updatedAt == {time_ns // 1_000_000}",
        "doc.updatedAt == 6 && doc.createdAt == 5",
        "doc.collection == 'c'",
        "has(doc.deleted) || has(doc._x)",
    ]
    frame = spark.createDataFrame(list(enumerate(map(bytearray, entries))), "number int, value binary")
    entry, updated_ms = f.parse_json(f.col("value").cast("string")), f.lit(time_ns // 1_000_000)
    for which in ("before", "after"):
        nodes = [compile_cel(source) for source in sources]
        columns = [lower_predicate(node, document_image(entry, updated_ms, which)).holds for node, _ in nodes]
        named = [column.alias(f"c{place}") for place, column in enumerate(columns)]
        for row in frame.select("number", *named).collect():
            change = decode_change(entries[row["number"]], 0, 1, time_ns)
            assert change is not None
            image = change.before if which == "before" else change.after
            for place, (node, program) in enumerate(nodes):
                expected = image is not None and Predicate([PredicatePart(node, program)]).matches(image)
                assert row[f"c{place}"] is expected, (which, sources[place], image)


def test_w17_changes_are_chosen_by_the_query_of_a_subscription(spark: SparkSession) -> None:
    maker = Maker(21)
    images = [(maker.document(), maker.document()) for _ in range(120)]
    entries = [entry_of(number + 2, *pair) for number, pair in enumerate(images)]
    entries += [encode_control_entry("live", 1), entry_of(200, {"a": 1}, None)]
    rows = [(seq, seq * 10**9, bytearray(raw)) for seq, raw in enumerate(entries)]
    frame = spark.createDataFrame(rows, "entry bigint, timestamp_ns bigint, value binary")
    queries: list[dict[str, Any]] = [
        {"filters": [{"field": "a", "op": "==", "value": 1}]},
        {"where": "doc.text.startsWith('a') || doc.flag", "filters": [{"field": "n", "op": ">", "value": 0}]},
        {"where": "true", "documents": ["k7", "k200", "nowhere"]},
    ]
    for query in queries:
        asked = read_query({"collection": "c", **query}, live=True)
        predicate = Predicate(asked.parts, asked.documents)
        for which in ("before", "after"):
            expected: list[int] = []
            for seq, raw in enumerate(entries):
                change = decode_change(raw, 0, seq, seq * 10**9)
                image = None if change is None else change.before if which == "before" else change.after
                expected += [seq] if image is not None and predicate.matches(image) else []
            chosen = matching(frame, {"collection": "c", **query}, which)
            assert sorted(row["entry"] for row in chosen.collect()) == expected, (query, which)
    with pytest.raises(NotCompilableError):
        matching(frame, {"collection": "c", "where": "doc.a == doc.b"})
