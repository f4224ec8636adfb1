"""Micro-batches below Spark: what is planned, again and again, over restarts."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows

from support.server import ServerProcess
from support.spark_rows import Filled, columns, served
from support.wire import Wire, fresh
from tailrace.protocol import offsets
from tailrace.spark.catalogue import Position, StreamState
from tailrace.spark.options import parse_read_options
from tailrace.spark.partitions import DataLossError
from tailrace.spark.stream_reader import StreamBacklog, StreamReader, share_rows

JSON = "application/json"
EVERYTHING = ReadAllAvailable()


def reader_of(url: str, **options: str) -> StreamReader:
    return StreamReader(
        parse_read_options({"endpoint": url, **options}, streaming=True), columns("stream entry")
    )


def rows_of(reader: StreamReader, start: dict[str, str], end: dict[str, str]) -> list[tuple[str, int]]:
    """What a batch reads, on executors that got the reader in a pickle."""
    sent: StreamReader = pickle.loads(pickle.dumps(reader))
    return [
        (row["stream"], row["entry"])
        for partition in reader.partitions(start, end)
        for batch in sent.read(pickle.loads(pickle.dumps(partition)))
        for row in batch.to_pylist()
    ]


def test_p9_batches_of_any_size_are_the_whole(seamed: Filled) -> None:
    truth = sorted((name, row["entry"]) for name in ("ev", "by") for row in served(seamed.server, name))

    @settings(max_examples=8)
    @given(
        limit=st.one_of(
            st.just(EVERYTHING),
            st.integers(20, 80).map(ReadMaxRows),
            st.integers(700, 3000).map(ReadMaxBytes),
        ),
        sealed_min=st.sampled_from(["1", "100000"]),
    )
    def holds(limit: Any, sealed_min: str) -> None:
        reader = reader_of(
            seamed.url, stream="ev,by", startingOffsets="earliest", sealedEntriesMin=sealed_min
        )
        reader.prepareForTriggerAvailableNow()
        at = reader.initialOffset()
        found: list[tuple[str, int]] = []
        while (end := reader.latestOffset(at, limit)) != at:
            assert all(isinstance(value, str) for value in end.values())
            batch = rows_of(reader, at, end)
            assert batch
            found += batch
            at = json.loads(json.dumps(end))
        assert len(found) == len(truth)
        assert sorted(found) == truth
        for name in ("ev", "by"):
            assert [entry for stream, entry in found if stream == name] == sorted(
                entry for stream, entry in found if stream == name
            )

    holds()


def test_a_first_batch_that_was_not_finished_begins_where_it_began(server: ServerProcess) -> None:
    """A restarted query is asked again where to begin, and `latest` is another place by then."""
    name = fresh("began")
    http = Wire(server.port)
    http.put(name, JSON)
    http.post(name, JSON, b"[1,2,3]")
    first = reader_of(server.base_url, stream=name)
    start = first.initialOffset()
    http.post(name, JSON, b"[4,5]")
    end = first.latestOffset(start, EVERYTHING)
    assert rows_of(first, start, end) == [(name, 4), (name, 5)]
    http.post(name, JSON, b"[6,7]")
    second = reader_of(server.base_url, stream=name)
    assert rows_of(second, second.initialOffset(), end) == [(name, 4), (name, 5)]
    following = second.latestOffset(end, EVERYTHING)
    assert rows_of(second, end, following) == [(name, 6), (name, 7)]
    assert set(following) == {name}
    http.close()


def test_streams_come_and_go(server: ServerProcess) -> None:
    place = fresh("come")
    http = Wire(server.port)
    reader = reader_of(server.base_url, streamPattern=f"{place}/**")
    at = reader.initialOffset()
    assert at == {}
    http.put(f"{place}/a", JSON)
    http.post(f"{place}/a", JSON, b"[1]")
    end = reader.latestOffset(at, EVERYTHING)
    assert rows_of(reader, at, end) == [(f"{place}/a", 1)]
    http.put(f"{place}/b/c", JSON)
    http.post(f"{place}/b/c", JSON, b"[1,2]")
    http.delete(f"{place}/a")
    at, end = end, reader.latestOffset(end, EVERYTHING)
    assert rows_of(reader, at, end) == [(f"{place}/b/c", 1), (f"{place}/b/c", 2)]
    assert set(end) == {f"{place}/b/c"}
    assert reader.reportLatestOffset() == {f"{place}/b/c": offsets.encode_offset(0, 2)}
    http.close()


def test_a_named_stream_that_was_deleted_is_a_loss(server: ServerProcess) -> None:
    name = fresh("lost")
    http = Wire(server.port)
    http.put(name, JSON)
    http.post(name, JSON, b"[1,2]")
    strict = reader_of(server.base_url, stream=name, startingOffsets="earliest")
    lenient = reader_of(server.base_url, stream=name, startingOffsets="earliest", failOnDataLoss="false")
    start = strict.initialOffset()
    end = strict.latestOffset(start, EVERYTHING)
    http.delete(name)
    with pytest.raises(DataLossError, match="failOnDataLoss"):
        strict.latestOffset(end, EVERYTHING)
    assert lenient.latestOffset(end, EVERYTHING) == end
    http.put(name, JSON)
    http.post(name, JSON, b"[3]")
    with pytest.raises(DataLossError):
        strict.latestOffset(end, EVERYTHING)
    again = lenient.latestOffset(end, EVERYTHING)
    assert rows_of(lenient, end, again) == [(name, 1)]
    assert again[name] > end[name]
    http.close()


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(1, 80))
def test_rows_are_shared_in_proportion(lags: list[int], most: int) -> None:
    zero = Position(0, 0)
    given_lags = [
        StreamBacklog(StreamState(str(index), JSON, zero, Position(0, lag)), zero, Position(0, lag))
        for index, lag in enumerate(lags)
    ]
    shares = share_rows(given_lags, most)
    assert sum(shares.values()) == min(most, sum(lags))
    for index, lag in enumerate(lags):
        assert 0 <= shares[str(index)] <= lag
        if sum(lags) > most:
            assert abs(shares[str(index)] - most * lag / sum(lags)) <= 1
