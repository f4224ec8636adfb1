"""Companions for tests: segments in, files out and read back, and what should be in them."""

from __future__ import annotations

import hashlib
import io
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tailrace.common.timestamps import TIMESTAMP_MS_MAX, TIMESTAMP_MS_MIN
from tailrace.schema.lenses import value_text
from tailrace.schema.registry import Registry
from tailrace.schema.search_config import parse_interval_ms
from tailrace.search.aggregates.measures import Summary, SummaryPartsReader
from tailrace.search.index_files.format import decode_value, encode_value
from tailrace.search.index_files.index_plan import BuildPlan, index_plan
from tailrace.search.matching import evaluate_record
from tailrace.search.query_language import SEARCH_DIALECT, bind_query
from tailrace.search.records import RecordView, field_values, tokenize_text, truncate_token
from tailrace.spark.index.file_writer import BuiltIndexFile
from tailrace.spark.index.segment_build import BuildRequest, build_segment, verify_built_file

STREAM_ID = "ab" * 16


class Stored(NamedTuple):
    entry: int
    payload: bytes
    key: bytes | None = None


def segment_of(rows: Sequence[Stored], group_rows: int = 7) -> bytes:
    """A segment with whatever entry numbers the rows have."""
    table = pa.table(
        {
            "entry": pa.array([row.entry for row in rows], pa.int64()),
            "append_time": pa.array([0] * len(rows), pa.timestamp("us", "UTC")),
            "append_ns": pa.array([0] * len(rows), pa.int16()),
            "key": pa.array([row.key for row in rows], pa.binary()),
            "payload": pa.array([row.payload for row in rows], pa.binary()),
        }
    )
    out = io.BytesIO()
    pq.write_table(table, out, row_group_size=group_rows, compression="zstd")
    return out.getvalue()


def plan_of(registry: Registry, profile: str = "generic") -> BuildPlan:
    return BuildPlan(index_plan(registry, profile, keyed=True), registry, {"kind": profile})


def build(
    rows: Sequence[Stored],
    plan: BuildPlan,
    *,
    reference: bool = False,
    memory_bytes: int = 400 << 20,
    families: Sequence[str] | None = None,
    group_rows: int = 7,
) -> dict[str, BuiltIndexFile]:
    """All families of a plan, checked and by name."""
    raw = segment_of(rows, group_rows)
    with tempfile.TemporaryDirectory() as directory:
        request = BuildRequest(
            STREAM_ID,
            rows[0].entry,
            rows[-1].entry,
            len(rows),
            hashlib.sha256(raw).hexdigest(),
            frozenset(plan.families if families is None else families),
            plan,
            Path(directory),
            memory_bytes,
            reference,
        )
        with pytest.MonkeyPatch.context() as patch:
            # Several batches, and several row groups in each.
            patch.setattr("tailrace.spark.index.segment_batches.BATCH_ROWS_MAX", 2 * group_rows)
            built = build_segment(raw, request)
        assert not list(Path(directory).iterdir()), "nothing is left behind"
    for one in built:
        verify_built_file(one)
    return {one.family: one for one in built}


def rows_in(data: bytes) -> list[dict[str, Any]]:
    return pq.read_table(io.BytesIO(data)).to_pylist()


class Split:
    """A text split, opened with the libraries anybody has, and asked without any."""

    def __init__(self, data: bytes) -> None:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.namelist() == ["split.json", "terms.parquet"]
            self.facts = msgspec.json.decode(archive.read("split.json"))
            self.terms = archive.read("terms.parquet")

    def with_phrase(self, field: str, tokens: Sequence[str]) -> list[int]:
        """The entries with the tokens one after the other, as the table says where each of them stands."""
        standing: dict[str, set[tuple[int, int]]] = {}
        for row in rows_in(self.terms):
            if row["field"] == field and row["term"] is not None:
                places = iter(row["positions"])
                for entry, often in zip(row["entries"], row["frequencies"], strict=True):
                    standing.setdefault(row["term"], set()).update(
                        (entry, next(places)) for _ in range(often)
                    )
        return sorted(
            {
                entry
                for entry, place in standing.get(tokens[0], set())
                if all((entry, place + at) in standing.get(token, ()) for at, token in enumerate(tokens))
            }
        )


class Oracle:
    """What each family of some rows has to say, one record after the other."""

    def __init__(self, rows: Sequence[Stored], view: RecordView) -> None:
        self.rows = rows
        self.view = view
        self.records = {row.entry: view.record(row.entry, row.payload) for row in rows}

    def values(self, entry: int, name: str) -> list[Any]:
        return list(field_values(self.records[entry], self.view.config.fields[name], self.view.version))

    def exact(self, names: Sequence[str]) -> list[dict[str, Any]]:
        found: dict[tuple[str, bool, bytes], list[int]] = {}
        for row in self.rows:
            for name in names:
                values = self.values(row.entry, name)
                stored = (
                    set() if self.view.config.fields[name].kind == "text" else set(map(encode_value, values))
                )
                keys = [(name, False, b"")] if values else []
                for key in [*keys, *((name, True, value) for value in stored)]:
                    found.setdefault(key, []).append(row.entry)
        return [
            {"field": name, "value": value if some else None, "entries": entries}
            for (name, some, value), entries in sorted(found.items())
        ]

    def col(self, names: Sequence[str]) -> list[dict[str, Any]]:
        return [
            {"_entry": row.entry} | {name: self.values(row.entry, name) for name in names}
            for row in self.rows
        ]

    def terms(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Rows of the table of terms: texts by their tokens, keywords as they are."""
        found: dict[tuple[str, bool, str], dict[int, list[int]]] = {}
        for row in self.rows:
            for name in names:
                values = [self._tokens(name, value) for value in self.values(row.entry, name)]
                if values:
                    found.setdefault((name, False, ""), {})[row.entry] = [0] * sum(map(len, values))
                place = 0
                for tokens in values:
                    for token in tokens:
                        found.setdefault((name, True, token), {}).setdefault(row.entry, []).append(place)
                        place += 1
                    place += 1
        return [
            {
                "field": name,
                "term": term if some else None,
                "documents": len(of),
                "entries": list(of),
                "frequencies": list(map(len, of.values())),
                "positions": [place for places in of.values() for place in places]
                if some and self.view.config.fields[name].positions
                else [],
            }
            for (name, some, term), of in sorted(found.items())
        ]

    def _tokens(self, name: str, value: str) -> list[str]:
        return (
            tokenize_text(value) if self.view.config.fields[name].kind == "text" else [truncate_token(value)]
        )

    def keys(self, group_rows: int = 7) -> dict[bytes, dict[str, Any]]:
        found: dict[bytes, dict[str, Any]] = {}
        for index, row in enumerate(self.rows):
            if row.key is None:
                continue
            fact = found.setdefault(row.key, {"first": row.entry, "count": 0, "spans": {}})
            fact["last"] = row.entry
            fact["count"] += 1
            span = fact["spans"].setdefault(index // group_rows, [row.entry, row.entry])
            span[1] = row.entry
        for fact in found.values():
            fact["spans"] = list(fact["spans"].values())
        return found

    def agg(self) -> dict[tuple[Any, ...], Any]:
        """By rollup, interval, window, dimensions and measure: a count or a summary."""
        config = self.view.config
        states: dict[tuple[Any, ...], Any] = {}
        for name, rollup in config.rollups.items():
            stamp = rollup.timestamp_field or config.primary_timestamp_field
            assert stamp is not None
            for row in self.rows:
                record, entry = self.records[row.entry], row.entry
                times = self.values(entry, stamp)
                dims = [self.values(entry, dimension) for dimension in rollup.dimensions]
                if not isinstance(record, dict) or len(times) != 1 or any(len(set(dim)) > 1 for dim in dims):
                    continue
                if not TIMESTAMP_MS_MIN <= times[0] <= TIMESTAMP_MS_MAX or not self._holds(
                    rollup.include, record
                ):
                    continue
                texts = tuple(value_text(dim[0]) if dim else None for dim in dims)
                for interval in rollup.intervals:
                    span = parse_interval_ms(interval)
                    assert span is not None
                    start = times[0] // span * span
                    for stored, kept in _cuts(name, texts):
                        for called, measure in rollup.measures.items():
                            self._measure(states, (stored, span, start, kept, called), measure, entry)
        return states

    def _holds(self, text: str | None, record: object) -> bool:
        config = self.view.config
        return text is None or evaluate_record(
            bind_query(text, config, SEARCH_DIALECT), record, config, self.view.version
        )

    def _measure(
        self, states: dict[tuple[Any, ...], Any], key: tuple[Any, ...], measure: Any, entry: int
    ) -> None:
        record = self.records[entry]
        if measure.kind == "count":
            states[key] = states.get(key, 0) + self._holds(measure.include, record)
            return
        declared = measure.histogram if measure.kind == "summary" else measure.histogram_json_pointer
        summary = states.setdefault(key, Summary(histogram=declared is not None, whole=False))
        if measure.kind == "summary":
            summary.add_all(self.values(entry, measure.field))
        elif (parts := SummaryPartsReader(measure).read(record)) is not None:
            summary.add_parts(parts)


def _cuts(rollup: str, texts: tuple[Any, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Under which names a record counts: with all dimensions, with none, and with each alone."""
    yield rollup, texts
    if texts:
        yield f"{rollup}/", ()
    if len(texts) > 1:
        yield from ((f"{rollup}/{place}", (text,)) for place, text in enumerate(texts))


def parts_of(summary: Summary) -> tuple[Any, ...]:
    """All there is to know of a state, to be compared."""
    histogram = None if summary.histogram is None else summary.histogram.counts
    edges = (summary.smallest, type(summary.smallest), summary.largest, type(summary.largest))
    return summary.count, summary.total, edges, histogram, summary.unplaced, summary.sketch.to_bytes()


def plain(kind: str, stored: bytes | None) -> Any:
    return None if stored is None else decode_value(stored, kind)
