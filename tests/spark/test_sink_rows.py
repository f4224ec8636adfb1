"""Rows into appends: the same cuts each time, no row twice, none lost, order kept."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import LongType, StringType, StructField, StructType

from tailrace.spark.options import OptionError
from tailrace.spark.sink_options import WriteOptions, store_url, write_options
from tailrace.spark.sink_rows import (
    SinkError,
    SinkRow,
    appends_of,
    check_columns,
    rows_of,
    to_json,
)
from tailrace.spark.staging import decode_part, encode_parts

ROWS = st.lists(
    st.builds(
        SinkRow,
        st.sampled_from(["a", "b"]),
        st.sampled_from([None, "k", "ä"]),
        st.integers(0, 9999).map(lambda number: str(number).encode()),
    ),
    max_size=60,
)


def options(**more: str) -> WriteOptions:
    return write_options({"stream": "t", **more}, streaming=False)


@given(rows=ROWS, rows_max=st.integers(1, 9), bytes_max=st.integers(1, 40))
def test_p13_rows_are_cut_into_appends_without_loss(
    rows: list[SinkRow], rows_max: int, bytes_max: int
) -> None:
    limits = options(batchRows=str(rows_max), batchBytes=str(bytes_max))
    appends = list(appends_of(iter(rows), limits, lambda _: True))
    assert appends == list(appends_of(iter(rows), limits, lambda _: True))
    assert all(len(append.values) <= rows_max for append in appends)
    for stream in ("a", "b"):
        sent = [
            (append.key, value) for append in appends if append.stream == stream for value in append.values
        ]
        given_rows = [(row.key, row.value) for row in rows if row.stream == stream]
        assert sorted(sent, key=str) == sorted(given_rows, key=str)
        for key in (None, "k", "ä"):
            assert [v for k, v in sent if k == key] == [v for k, v in given_rows if k == key]
        if all(key is None for key, _ in given_rows):
            assert sent == given_rows
    staged = [append for _, data in encode_parts(appends) for append in decode_part(data)]
    assert staged == appends


@pytest.mark.parametrize("value", [b"1,2", b"1],[2", b"", b"{", b"nope", b'{"a":1} 2'])
def test_a_value_that_is_not_one_json_text_is_refused(value: bytes) -> None:
    with pytest.raises(SinkError, match="not one JSON text"):
        list(appends_of(iter([SinkRow("t", None, value)]), options(), lambda _: True))
    assert list(appends_of(iter([SinkRow("t", None, value)]), options(), lambda _: False))


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
    assert list(rows_of(iter([batch]), options())) == [SinkRow("x", "k", b"1"), SinkRow("t", None, b"2")]
    with pytest.raises(SinkError, match="has no value"):
        list(rows_of(iter([pa.record_batch({"value": pa.array([None], pa.string())})]), options()))
    with pytest.raises(SinkError, match="UTF-8"):
        list(rows_of(iter([pa.record_batch({"value": ["1"], "key": [b"\xff"]})]), options()))


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"key": StringType()}, "a column value is written"),
        ({"value": StringType(), "id": LongType()}, "only value, key and stream"),
        ({"value": LongType()}, "value is string"),
        ({"value": StringType(), "key": LongType()}, "key is string"),
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
        ({}, "needs a place"),
        ({"delivery": "soon"}, "delivery"),
        ({"batchBytes": "10485760", "delivery": "direct"}, "batchBytes"),
        ({"producerId": "a/b", "delivery": "direct"}, "producerId"),
        ({"checkpointLocation": "hdfs://there/x"}, "stagingLocation"),
        ({"Stream": "t", "path": "u", "delivery": "direct"}, "twice"),
    ],
)
def test_options_that_are_refused(given: dict[str, str], word: str) -> None:
    with pytest.raises(OptionError, match=word):
        write_options({"stream": "t", **given}, streaming=True)


def test_where_rows_are_staged() -> None:
    found = write_options({"stream": "t", "checkpointLocation": "/c/d/"}, streaming=True)
    assert found.staging == "file:///c/d/tailrace-staging"
    assert store_url("file:/c/d") == store_url("file:///c/d") == "file:///c/d"
    assert store_url("s3://bucket/x") == "s3://bucket/x"
