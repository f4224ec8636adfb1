"""Merges on a real Spark: the merged companion is the one that would have been built all at once."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.aggregate_model import rollup_view
from support.companions import STREAM_ID, Split, Stored, build, plan_of, rows_in
from support.pipeline import Shelf
from support.queries import payload_of
from tailrace.search.index_files.format import key_hash
from tailrace.spark.index import routing_keys
from tailrace.spark.index.aggregate_merge import merge_states
from tailrace.spark.index.aggregates import AGGREGATE_SCHEMA
from tailrace.spark.index.file_writer import WRITER, IndexedRange
from tailrace.spark.index.full_text import MERGE_POSTINGS, merge_splits
from tailrace.spark.index.routing_keys import INDEX_SCHEMA, LEXICON_SCHEMA
from tailrace.spark.index.segment_build import build_described_segment
from tailrace.spark.jobs.index_merge import IndexMergeJob
from tailrace.spark.jobs.messages import IndexMergeWork, StreamPlan

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
        for built in build_described_segment(row):
            assert built["status"] == "built", built
            found.setdefault(built["family"], []).append(built)
    return found


def _work(family: str, level: int, first: int, last: int, inputs: list[dict[str, Any]]) -> IndexMergeWork:
    objects, digests = [one["companion"] for one in inputs], [one["sha256"] for one in inputs]
    return IndexMergeWork(family, level, first, last, tuple(objects), tuple(digests))


def test_merged_is_what_all_at_once_would_be(spark: SparkSession, shelf: Shelf) -> None:
    companions = _companions(shelf, 3)
    whole = build(_rows(1, 42), shelf.plan)
    stream = StreamPlan("s", STREAM_ID, 0, shelf.ref)
    job = IndexMergeJob(spark, shelf.url)
    for family in ("routing_key_index", "routing_key_lexicon", "exact", "agg", "fts"):
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


@pytest.mark.parametrize("piece_postings", [1, 7, MERGE_POSTINGS])
def test_many_splits_become_one(shelf: Shelf, piece_postings: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many postings are put in order at once."""
    monkeypatch.setattr("tailrace.spark.index.full_text.MERGE_POSTINGS", piece_postings)
    data = [build(_rows(1 + 7 * number, 7), shelf.plan, families=["fts"])["fts"].data for number in range(10)]
    built = merge_splits(data, IndexedRange(STREAM_ID, 1, 70, 70, shelf.ref.hash))
    assert built.data == build(_rows(1, 70), shelf.plan, families=["fts"])["fts"].data
    assert Split(built.data).with_phrase("message", ["word1", "word1"]) == list(range(1, 71))


runs = st.lists(
    st.dictionaries(
        st.sampled_from([b"", b"a", b"b", "😀".encode(), b"\0", b"\xff", b"a\0"]),
        st.lists(st.integers(0, 2), min_size=1, max_size=3),
        max_size=7,
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=300)
@given(runs, st.integers(1, 4), st.booleans())
def test_key_runs_against_an_oracle(runs: list[dict[bytes, list[int]]], group_rows: int, same: bool) -> None:
    """However runs are cut into row groups, and whether hashes tell keys apart or do not."""
    expected: dict[bytes, list[tuple[int, int]]] = {}
    index_files: list[Any] = []
    lexicon_files: list[Any] = []
    for at, run in enumerate(runs):
        rows: list[dict[str, Any]] = []
        for key, gaps in run.items():
            spans = [(at * 100 + 10 * place, at * 100 + 10 * place + gap) for place, gap in enumerate(gaps)]
            expected.setdefault(key, []).extend(spans)
            rows.append(_key_row(key, spans, same))
        rows.sort(key=lambda row: (row["key_hash"], row["key"]))
        index_files.append(_file_of(rows, INDEX_SCHEMA, group_rows))
        rows.sort(key=lambda row: row["key"])
        lexicon_files.append(_file_of(rows, LEXICON_SCHEMA, group_rows))
    whole = [_key_row(key, spans, same) for key, spans in expected.items()]
    index = [
        row for table in routing_keys.merge_key_runs(index_files, INDEX_SCHEMA) for row in table.to_pylist()
    ]
    assert index == sorted(whole, key=lambda row: (row["key_hash"], row["key"]))
    lexicon = [
        row
        for table in routing_keys.merge_key_runs(lexicon_files, LEXICON_SCHEMA)
        for row in table.to_pylist()
    ]
    kept = [{name: row[name] for name in LEXICON_SCHEMA.names} for row in whole]
    assert lexicon == sorted(kept, key=lambda row: row["key"])


def _key_row(key: bytes, spans: list[tuple[int, int]], same: bool) -> dict[str, Any]:
    firsts, lasts = [list(side) for side in zip(*spans, strict=True)]
    return {
        "key_hash": 1 if same else key_hash(key),
        "key": key,
        "first_entry": firsts[0],
        "last_entry": lasts[-1],
        "entry_count": len(spans),
        "span_firsts": firsts,
        "span_lasts": lasts,
    }


def _file_of(rows: list[dict[str, Any]], schema: pa.Schema, group_rows: int) -> Any:
    kept = [{name: row[name] for name in schema.names} for row in rows]
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(kept, schema=schema), out, row_group_size=group_rows)
    return pq.ParquetFile(pa.BufferReader(out.getvalue()))


@pytest.mark.parametrize(("runs", "batch_rows"), [(2, 5), (6, 1), (6, 2), (3, 10_000)])
def test_states_are_merged_without_spark(shelf: Shelf, runs: int, batch_rows: int) -> None:
    """However the sorted rows are cut: groups in one run, in several, and across the edges of batches."""
    size = 42 // runs
    parts = [build(_rows(1 + size * run, size), shelf.plan, families=["agg"])["agg"] for run in range(runs)]
    rows = sorted((row for part in parts for row in rows_in(part.data)), key=_place)
    whole = rows_in(build(_rows(1, 42), shelf.plan, families=["agg"])["agg"].data)
    assert len(whole) < len(rows)
    assert _merged(rows, batch_rows) == whole


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


def _merged(rows: list[dict[str, Any]], batch_rows: int = 5) -> list[dict[str, Any]]:
    cuts = [rows[at : at + batch_rows] for at in range(0, len(rows), batch_rows)]
    tables = [pa.Table.from_pylist(cut, schema=AGGREGATE_SCHEMA) for cut in cuts]
    return [row for table in merge_states(tables) for row in table.to_pylist()]
