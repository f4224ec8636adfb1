"""The source below Spark: whatever is asked for, each entry comes once, in order, and again the same."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
    Not,
)

from support.spark_rows import Filled, by_partition, reader_of, rows_of, served
from tailrace.protocol import offsets
from tailrace.spark.batch_reader import FilteringReader
from tailrace.spark.partitions import StreamPartition

SLIM = "entry offset value key timestamp epoch"


def expected(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "entry": row["entry"],
            "offset": offsets.encode_offset(row["epoch"], row["entry"]),
            "value": row["payload"],
            "key": row["key"],
            "timestamp": row["append_time"],
            "epoch": row["epoch"],
        }
        for row in rows
    ]


def test_p9_any_bounds_any_partitioning_each_entry_once(seamed: Filled) -> None:
    truth = expected(served(seamed.server, "ev"))
    last = len(truth)

    @settings(max_examples=60)
    @given(
        after=st.integers(0, last),
        length=st.integers(0, last),
        parts=st.integers(1, 9),
        sealed_min=st.sampled_from(["0", "1", "40", "100000"]),
        fetch=st.sampled_from(["1", "200", "4194304"]),
    )
    def holds(after: int, length: int, parts: int, sealed_min: str, fetch: str) -> None:
        through = min(last, after + length)
        reader = reader_of(
            seamed.url,
            SLIM,
            stream="ev",
            startingOffsets=f'{{"ev": "{offsets.encode_offset(0, after)}"}}',
            endingOffsets=f'{{"ev": "{offsets.encode_offset(0, through)}"}}',
            minPartitions=str(parts),
            sealedEntriesMin=sealed_min,
            fetchBytes=fetch,
        )
        found = by_partition(reader)
        assert [row for part in found for row in part] == truth[after:through]
        assert all(part == sorted(part, key=lambda row: row["entry"]) for part in found)
        assert by_partition(reader) == found

    holds()


def test_p9_segments_are_read_from_the_store(seamed: Filled) -> None:
    """What is sealed comes out of objects, and the rest from the server, without a gap between them."""
    reader = reader_of(seamed.url, stream="ev", sealedEntriesMin="1", minPartitions="1")
    parts = [part for part in reader.partitions() if isinstance(part, StreamPartition)]
    pieces = [piece for part in parts for piece in part.pieces]
    assert any(piece.is_sealed for piece in pieces)
    assert not pieces[-1].is_sealed
    assert [piece.after for piece in pieces[1:]] == [piece.through for piece in pieces[:-1]]
    assert pickle.loads(pickle.dumps(parts[0])).pieces == parts[0].pieces


def test_an_object_that_is_gone_is_read_through_the_server(seamed: Filled) -> None:
    truth = [row["entry"] for row in served(seamed.server, "ev")]
    reader = reader_of(seamed.url, stream="ev", sealedEntriesMin="1", names="entry")
    found: list[int] = []
    for part in reader.partitions():
        assert isinstance(part, StreamPartition)
        part.pieces = tuple(
            piece._replace(object="streams/gone.parquet") if piece.is_sealed else piece
            for piece in part.pieces
        )
        found += [row["entry"] for batch in reader.read(part) for row in batch.to_pylist()]
    assert found == truth


def test_bytes_have_their_ends(seamed: Filled) -> None:
    truth = [row["payload"] for row in served(seamed.server, "by")]
    for sealed_min in ("1", "100000"):
        reader = reader_of(seamed.url, stream="by", sealedEntriesMin=sealed_min)
        assert [row["value"] for row in rows_of(reader)] == truth
    with pytest.raises(ValueError, match="valueFormat=binary"):
        rows_of(reader_of(seamed.url, stream="by", valueFormat="string"))


def test_times_bound_a_read(seamed: Filled) -> None:
    truth = served(seamed.server, "ev")
    cut = truth[len(truth) // 2]["append_time"]
    instant = cut.isoformat().replace("+00:00", "Z")
    for sealed_min in ("1", "100000"):
        late = reader_of(seamed.url, stream="ev", startingTimestamp=instant, sealedEntriesMin=sealed_min)
        assert [row["entry"] for row in rows_of(late)] == [
            row["entry"] for row in truth if row["append_time"] >= cut
        ]
        early = reader_of(seamed.url, stream="ev", endingTimestamp=instant, sealedEntriesMin=sealed_min)
        assert [row["entry"] for row in rows_of(early)] == [
            row["entry"] for row in truth if row["append_time"] < cut
        ]
    assert rows_of(reader_of(seamed.url, stream="ev", startingTimestamp="2100-01-01T00:00:00Z")) == []


def test_one_key(seamed: Filled) -> None:
    truth = [row["entry"] for row in served(seamed.server, "ev") if row["key"] == b"k2"]
    reader = reader_of(seamed.url, stream="ev", key="k2", sealedEntriesMin="1", minPartitions="5")
    assert [row["entry"] for row in rows_of(reader)] == truth


def test_a_pattern_and_several_streams(seamed: Filled) -> None:
    counts = {name: len(served(seamed.server, name)) for name in ("ev", "by")}
    for options in ({"streamPattern": "*"}, {"stream": "ev,by"}):
        rows = rows_of(reader_of(seamed.url, "stream", **options))
        assert {name: sum(row["stream"] == name for row in rows) for name in counts} == counts
    assert rows_of(reader_of(seamed.url, streamPattern="nothing/**")) == []


def test_one_column_is_enough_to_count(seamed: Filled) -> None:
    reader = reader_of(seamed.url, "epoch", stream="ev")
    assert len(rows_of(reader)) == len(served(seamed.server, "ev"))


FILTERS = st.one_of(
    st.builds(
        lambda kind, value: kind(("entry",), value),
        st.sampled_from([EqualTo, LessThan, LessThanOrEqual, GreaterThan, GreaterThanOrEqual]),
        st.integers(-5, 400),
    ),
    st.builds(lambda values: In(("entry",), tuple(values)), st.lists(st.integers(0, 400), max_size=4)),
    st.builds(lambda key: EqualTo(("key",), key), st.sampled_from([b"k0", b"k1", b"zz", b"\xff"])),
    st.builds(
        lambda keys: In(("key",), tuple(keys)),
        st.lists(st.sampled_from([b"k0", b"k1", b"k3", b"zz", None]), max_size=3),
    ),
    st.builds(lambda kind: kind(("key",), b"k1"), st.sampled_from([LessThan, GreaterThanOrEqual])),
    st.builds(lambda name: EqualTo(("stream",), name), st.sampled_from(["ev", "by", "other"])),
    st.builds(
        lambda kind: kind(("stream",), "ev"), st.sampled_from([LessThan, LessThanOrEqual, GreaterThan])
    ),
    st.builds(lambda epoch: EqualTo(("epoch",), epoch), st.integers(0, 1)),
    st.builds(lambda value: Not(EqualTo(("entry",), value)), st.integers(1, 10)),
    st.builds(
        lambda kind, index: (kind, index),
        st.sampled_from([EqualTo, LessThan, LessThanOrEqual, GreaterThan, GreaterThanOrEqual]),
        st.integers(0, 1000),
    ),
)


def keeps(given: Filter, row: dict[str, Any]) -> bool:
    """What SQL says: only what is true is kept, and a comparison with nothing is not."""
    if isinstance(given, Not):
        return not keeps(given.child, row)
    value: Any = row[given.attribute[0]]  # type: ignore[attr-defined]
    wanted: Any = given.value  # type: ignore[attr-defined]
    if value is None:
        return False
    if isinstance(given, In):
        return value in wanted
    compare = {
        EqualTo: value.__eq__,
        LessThan: value.__lt__,
        LessThanOrEqual: value.__le__,
        GreaterThan: value.__gt__,
        GreaterThanOrEqual: value.__ge__,
    }[type(given)]
    return compare(wanted) is True


def test_p11_a_pushed_filter_drops_nothing_that_spark_would_keep(seamed: Filled) -> None:
    names = "stream key entry timestamp epoch"
    truth = rows_of(reader_of(seamed.url, names, stream="ev,by"))
    times = [row["timestamp"] for row in truth]

    @settings(max_examples=80)
    @given(chosen=st.lists(FILTERS, min_size=1, max_size=3), sealed_min=st.sampled_from(["1", "100000"]))
    def holds(chosen: list[Any], sealed_min: str) -> None:
        filters: list[Filter] = [
            one[0](("timestamp",), times[one[1] % len(times)]) if isinstance(one, tuple) else one
            for one in chosen
        ]
        reader = reader_of(seamed.url, names, stream="ev,by", pushdown="true", sealedEntriesMin=sealed_min)
        assert isinstance(reader, FilteringReader)
        back = list(reader.pushFilters(filters))
        assert all(any(one is given for given in filters) for one in back)
        taken = [one for one in filters if not any(one is given for given in back)]
        found = [row for row in rows_of(reader) if all(keeps(one, row) for one in back)]
        assert found == [row for row in truth if all(keeps(one, row) for one in taken + back)]

    holds()
