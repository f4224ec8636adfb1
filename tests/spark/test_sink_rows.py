"""Rows into appends: the same cuts each time, no row twice, none lost, order kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import pairwise

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import LongType, StringType, StructField, StructType

from tailrace.spark.options import OptionError, WriteOptions, parse_write_options, store_url
from tailrace.spark.sink import decode_part, encode_parts
from tailrace.spark.sink_rows import (
    SinkAppend,
    SinkError,
    check_columns,
    json_array,
    split_into_appends,
    to_json,
    to_sink_rows,
)

Row = tuple[str, str | None, bytes]

ROWS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]),
        st.sampled_from([None, "k", "ä"]),
        st.integers(0, 9999).map(lambda number: str(number).encode()),
    ),
    max_size=60,
)


def options(**more: str) -> WriteOptions:
    return parse_write_options({"stream": "t", **more}, streaming=False)


def columns_of(rows: Sequence[Row], cuts: Sequence[int] = ()) -> Iterator[pa.RecordBatch]:
    """Rows as Spark hands them over: in batches that end anywhere."""
    for start, stop in pairwise(sorted({0, len(rows), *(cut % (len(rows) + 1) for cut in cuts)})):
        streams, keys, values = zip(*rows[start:stop], strict=True)
        yield pa.record_batch(
            {
                "stream": pa.array(streams, pa.string()),
                "key": pa.array(keys, pa.string()),
                "value": pa.array(values, pa.binary()),
            }
        )


def cut_row_by_row(rows: Sequence[Row], rows_max: int, bytes_max: int) -> dict[str, list[Row]]:
    """The rule in plain words, for each stream: a row that does not fit begins a new chunk."""
    chunks: dict[str, list[list[Row]]] = {}
    for row in rows:
        mine = chunks.setdefault(row[0], [[]])
        size = sum(len(value) + 1 for _, _, value in mine[-1]) + len(row[2])
        if mine[-1] and (len(mine[-1]) >= rows_max or size > bytes_max):
            mine.append([])
        mine[-1].append(row)
    return {
        stream: [
            (stream, key, b",".join(value for _, one, value in chunk if one == key))
            for chunk in found
            for key in dict.fromkeys(key for _, key, _ in chunk)
        ]
        for stream, found in chunks.items()
    }


@given(
    rows=ROWS,
    rows_max=st.integers(1, 9),
    bytes_max=st.integers(1, 40),
    cuts=st.lists(st.integers(0, 60), max_size=4),
)
def test_p13_rows_are_cut_into_appends_without_loss(
    rows: list[Row], rows_max: int, bytes_max: int, cuts: list[int]
) -> None:
    """However they arrive, the appends are those of the rule: a repeated batch gives the same ones."""
    limits = options(batchRows=str(rows_max), batchBytes=str(bytes_max))
    appends = list(split_into_appends(to_sink_rows(columns_of(rows, cuts), limits), limits, lambda _: True))
    expected = cut_row_by_row(rows, rows_max, bytes_max)
    for stream in ("a", "b"):
        found = [(one.stream, one.key, b",".join(one.values.to_pylist())) for one in appends]
        assert [one for one in found if one[0] == stream] == expected.get(stream, [])
    staged = [append for _, data in encode_parts(appends) for append in decode_part(data)]
    assert staged == appends


def appends_from(values: list[bytes], *, json: bool) -> list[SinkAppend]:
    rows = to_sink_rows(iter([pa.record_batch({"value": pa.array(values, pa.binary())})]), options())
    return list(split_into_appends(rows, options(), lambda _: json))


@pytest.mark.parametrize("value", [b"1,2", b"1],[2", b"", b"{", b"nope", b'{"a":1} 2'])
def test_a_value_that_is_not_one_json_text_is_refused(value: bytes) -> None:
    with pytest.raises(SinkError, match="not one JSON text"):
        appends_from([value], json=True)
    with pytest.raises(SinkError, match="not one JSON text"):
        appends_from([b"1", value, b"2"], json=True)
    assert appends_from([value], json=False)


@pytest.mark.parametrize(
    "values", [[b"[1", b"2]"], [b"1,2", b"[3", b"4]"], [b'"a', b'b"'], [b"   [1", b"2]", b"42,9", b"7"]]
)
def test_values_that_are_json_only_together_are_refused(values: list[bytes]) -> None:
    with pytest.raises(SinkError, match="not one JSON text"):
        appends_from(values, json=True)


@given(
    values=st.lists(st.sampled_from([b"1", b" 1", b"[1", b"2]", b"3,4", b"{}", b' "a" ', b""]), max_size=6)
)
def test_values_are_checked_together_as_they_are_one_by_one(values: list[bytes]) -> None:
    try:
        for value in values:
            msgspec.json.decode(value, type=msgspec.Raw)
    except msgspec.DecodeError:
        with pytest.raises(SinkError, match="not one JSON text"):
            appends_from(values, json=True)
    else:
        found = appends_from(values, json=True)
        assert [value for append in found for value in append.values.to_pylist()] == values
        for append in found:
            assert msgspec.json.decode(json_array(append.values)) == [msgspec.json.decode(v) for v in values]


def test_structs_become_json() -> None:
    kind = pa.struct(
        [
            ("n", pa.int64()),
            ("none", pa.string()),
            ("list", pa.list_(pa.struct([("x", pa.float64())]))),
            ("map", pa.map_(pa.string(), pa.int32())),
            ("empty", pa.map_(pa.string(), pa.int32())),
            ("at", pa.timestamp("us", "UTC")),
            ("day", pa.date32()),
            ("cost", pa.decimal128(10, 2)),
            ("raw", pa.binary()),
        ]
    )
    value = {
        "n": 1,
        "none": None,
        "list": [{"x": 0.5}, {"x": None}],
        "map": [("a", 1)],
        "empty": [],
        "at": datetime(2026, 1, 2, 3, 4, 5, 678900, UTC),
        "day": date(2026, 1, 2),
        "cost": Decimal("1.50"),
        "raw": b"\x00\xff",
    }
    text = to_json(value, kind)
    assert b'"cost":1.50' in text
    assert msgspec.json.decode(text) == {
        "n": 1,
        "list": [{"x": 0.5}, {}],
        "map": {"a": 1},
        "empty": {},
        "at": "2026-01-02T03:04:05.678Z",
        "day": "2026-01-02",
        "cost": 1.5,
        "raw": "AP8=",
    }


def test_columns_of_a_batch() -> None:
    batch = pa.record_batch({"value": ["1", "2"], "key": [b"k", b""], "stream": ["x", None]})
    assert [
        (some.stream, some.keys and some.keys.to_pylist(), some.values.to_pylist())
        for some in to_sink_rows(iter([batch, batch.slice(1)]), options())
    ] == [("x", ["k"], [b"1"]), ("t", [None], [b"2"]), ("t", None, [b"2"])]
    with pytest.raises(SinkError, match="has no value"):
        list(to_sink_rows(iter([pa.record_batch({"value": pa.array([None], pa.string())})]), options()))
    with pytest.raises(SinkError, match="UTF-8"):
        list(to_sink_rows(iter([pa.record_batch({"value": ["1"], "key": [b"\xff"]})]), options()))


def test_rows_whose_stream_is_named_in_two_ways_keep_their_order() -> None:
    batch = pa.record_batch(
        {"value": ["1", "2", "3", "4"], "stream": ["t", None, "u", ""], "key": [None, "k", "k", None]}
    )
    found = [(one.stream, one.values.to_pylist()) for one in to_sink_rows(iter([batch]), options())]
    assert found == [("t", [b"1", b"2", b"4"]), ("u", [b"3"])]
    without = parse_write_options({}, streaming=False)
    with pytest.raises(SinkError, match="has no stream"):
        list(to_sink_rows(iter([batch]), without))


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"key": StringType()}, "column value is required"),
        ({"value": StringType(), "id": LongType()}, "unexpected column id"),
        ({"value": LongType()}, "value must be string"),
        ({"value": StringType(), "key": LongType()}, "key must be string"),
    ],
)
def test_tables_that_cannot_be_written(fields: dict[str, StringType | LongType], word: str) -> None:
    schema = StructType([StructField(name, kind) for name, kind in fields.items()])
    with pytest.raises(OptionError, match=word):
        check_columns(schema, options())


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"asyncProgressTrackingEnabled": "true", "stagingLocation": "/x"}, "asyncProgressTracking"),
        ({}, "needs a staging location"),
        ({"delivery": "soon"}, "delivery"),
        ({"batchBytes": "10485760", "delivery": "direct"}, "batchBytes"),
        ({"producerId": "a/b", "delivery": "direct"}, "producerId"),
        ({"checkpointLocation": "hdfs://there/x"}, "stagingLocation"),
        ({"Stream": "t", "path": "u", "delivery": "direct"}, "twice"),
    ],
)
def test_options_that_are_refused(given: dict[str, str], word: str) -> None:
    with pytest.raises(OptionError, match=word):
        parse_write_options({"stream": "t", **given}, streaming=True)


def test_where_rows_are_staged() -> None:
    found = parse_write_options({"stream": "t", "checkpointLocation": "/c/d/"}, streaming=True)
    assert found.staging == "file:///c/d/tailrace-staging"
    assert store_url("file:/c/d") == store_url("file:///c/d") == "file:///c/d"
    assert store_url("s3://bucket/x") == "s3://bucket/x"
