"""Merges on a real Spark: the merged companion is the one that would have been built all at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.aggregate_model import rollup_view
from support.companions import STREAM_ID, Split, Stored, build, plan_of, rows_in
from support.pipeline import Shelf
from support.queries import payload_of
from tailrace.pipeline.kernels.agg import SCHEMA
from tailrace.pipeline.kernels.parquet import WRITER, Range
from tailrace.pipeline.kernels.splits import merge_splits
from tailrace.pipeline.merge import MergeJob
from tailrace.pipeline.model import MergeWork, StreamPlan
from tailrace.pipeline.transforms import exact, keys
from tailrace.pipeline.transforms.agg import merge_states
from tailrace.pipeline.worker import build_one

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WORDS = ["checkout", "failed", "😀", "a\0b", "Straße", "x"]


def _rows(first: int, count: int) -> list[Stored]:
    """Whole row groups, so that spans are the same however the entries are cut into segments."""
    return [
        Stored(
            entry,
            payload_of(
                {
                    "id": WORDS[entry % 5],
                    "service": f"svc{entry % 3}",
                    "at": entry * 300,
                    "ratio": entry / 7,
                    "status": 2**62 if entry % 4 else None,
                    "message": [f"{WORDS[entry % 6]} word{entry % 11}", "word1 word1"],
                    "count": 3,
                    "sum": entry,
                }
            ),
            None if entry % 5 == 0 else WORDS[entry % 6].encode(),
        )
        for entry in range(first, first + count)
    ]


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "store", plan_of(rollup_view().registry))


def _companions(shelf: Shelf, count: int) -> dict[str, list[dict[str, Any]]]:
    """Companions of segments one after the other, by family."""
    found: dict[str, list[dict[str, Any]]] = {}
    for number in range(count):
        segment = shelf.seal(_rows(1 + 14 * number, 14))
        row = {
            "object": segment.object,
            "store": shelf.url,
            "stream_id": STREAM_ID,
            "first": segment.first,
            "last": segment.last,
            "rows": segment.rows,
            "sha256": segment.sha256,
            "plan_object": shelf.ref.object,
            "families": list(shelf.plan.families),
            "memory_bytes": 400 << 20,
            "reference": False,
            "writer": WRITER,
        }
        for built in build_one(row):
            assert built["status"] == "built", built
            found.setdefault(built["family"], []).append(built)
    return found


def _work(family: str, level: int, first: int, last: int, inputs: list[dict[str, Any]]) -> MergeWork:
    objects, digests = [one["companion"] for one in inputs], [one["sha256"] for one in inputs]
    return MergeWork(family, level, first, last, tuple(objects), tuple(digests))


@pytest.mark.parametrize("native", [True, False])
def test_merged_is_what_all_at_once_would_be(
    spark: SparkSession, shelf: Shelf, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    companions = _companions(shelf, 3)
    whole = build(_rows(1, 42), shelf.plan)
    stream = StreamPlan("s", STREAM_ID, 0, shelf.ref)
    job = MergeJob(spark, shelf.url)
    if not native:
        monkeypatch.setattr("tailrace.pipeline.merge.NATIVE", ())
    families = ("routing_key_index", "routing_key_lexicon", "exact", "agg", "fts")
    for family in families if native else families[:1]:
        if family not in companions:
            continue
        publication = job.run(stream, _work(family, 1, 1, 42, companions[family]))
        (added,) = publication.add
        assert (added.first, added.last, added.rows) == (1, 42, 42)
        assert publication.replace == [one["companion"] for one in companions[family]]
        data = shelf.get(added.object)
        if family == "routing_key_index":
            assert rows_in(data) == rows_in(whole[family].data)
        else:
            assert data == whole[family].data, family


def test_many_splits_become_one(shelf: Shelf) -> None:
    data = [build(_rows(1 + 7 * number, 7), shelf.plan, families=["fts"])["fts"].data for number in range(10)]
    built = merge_splits(data, Range(STREAM_ID, 1, 70, 70, shelf.ref.hash))
    assert built.data == build(_rows(1, 70), shelf.plan, families=["fts"])["fts"].data
    assert Split(built.data).with_phrase("message", ["word1", "word1"]) == list(range(1, 71))


runs = st.lists(
    st.lists(
        st.tuples(
            st.sampled_from([b"", b"a", b"b", "😀".encode(), b"\0"]), st.integers(1, 3), st.integers(0, 2)
        ),
        max_size=6,
        unique_by=lambda row: row[0],
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=4)
@given(st.lists(runs, min_size=3, max_size=3))
def test_key_runs_against_an_oracle(spark_session: SparkSession, examples: list[Any]) -> None:
    """Several examples in one frame, kept apart by a byte of their keys: a job costs more than rows."""
    rows: list[tuple[Any, ...]] = []
    expected: dict[bytes, list[tuple[int, int]]] = {}
    for number, example in enumerate(examples):
        for at, run in enumerate(example):
            for key, count, gap in run:
                key = bytes([number]) + key
                spans = [(at * 100 + place * 10, at * 100 + place * 10 + gap) for place in range(count)]
                firsts, lasts = [list(side) for side in zip(*spans, strict=True)]
                rows.append((1, key, firsts[0], lasts[-1], count, firsts, lasts))
                expected.setdefault(key, []).extend(spans)
    found = keys.merge_key_runs(spark_session.createDataFrame(rows, keys.INDEX_DDL)).collect()
    assert {
        bytes(row["key"]): list(zip(row["span_firsts"], row["span_lasts"], strict=True)) for row in found
    } == expected
    assert {bytes(row["key"]): row["entry_count"] for row in found} == {
        key: len(spans) for key, spans in expected.items()
    }
    for row in found:
        spans = expected[bytes(row["key"])]
        assert (row["first_entry"], row["last_entry"]) == (spans[0][0], spans[-1][1])


def test_retention_takes_keys_and_values(spark: SparkSession) -> None:
    runs = spark.createDataFrame([(b"old", 1, 4), (b"new", 1, 5)], keys.LEXICON_DDL)
    assert [bytes(row["key"]) for row in keys.from_entry(runs, 5).collect()] == [b"new"]
    values = spark.createDataFrame([("f", b"a", [1, 4]), ("f", b"b", [4, 5, 6]), ("f", None, [5])], exact.DDL)
    assert sorted(row["entries"] for row in exact.from_entry(values, 5).collect()) == [[5], [5, 6]]


def test_states_are_merged_without_spark(shelf: Shelf) -> None:
    halves = [build(_rows(first, 21), shelf.plan, families=["agg"])["agg"].data for first in (1, 22)]
    rows = [row for half in halves for row in rows_in(half)]
    rows.sort(key=_place)
    assert _merged(rows) == rows_in(build(_rows(1, 42), shelf.plan, families=["agg"])["agg"].data)


def test_counts_that_do_not_fit_stay_apart(shelf: Shelf) -> None:
    rows = [
        Stored(entry, payload_of({"at": 1, "id": "y", "count": 2**62 + entry, "sum": entry}))
        for entry in (1, 2, 3)
    ]
    found = [row for row in rows_in(build(rows, shelf.plan)["agg"].data) if row["measure"] == "value"]
    assert {row["count"] for row in found} == {2**62 + entry for entry in (1, 2, 3)}
    merged = _merged(found)
    assert sorted(merged, key=str) == sorted(found, key=str)
    assert merged == _merged([row for at in range(0, len(found), 3) for row in found[at : at + 3][::-1]])


def _place(row: dict[str, Any]) -> Any:
    dimensions = [(text is not None, text or "") for text in row["dimensions"]]
    return row["rollup"], row["interval_ms"], row["window_start"], dimensions, row["measure"]


def _merged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    batches = [pa.RecordBatch.from_pylist(rows[at : at + 5], schema=SCHEMA) for at in range(0, len(rows), 5)]
    return [row for batch in merge_states(iter(batches)) for row in batch.to_pylist()]
