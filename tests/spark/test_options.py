"""Options of the source: what they mean, and what is refused before anything is read."""

from __future__ import annotations

import pickle

import pytest
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from support.spark_rows import columns
from tailrace.spark.columns import check_schema
from tailrace.spark.options import OptionError, parse_read_options


def test_defaults() -> None:
    found = parse_read_options({"stream": "a"}, streaming=False)
    assert found.streams == ("a",)
    assert found.connection.endpoint == "http://127.0.0.1:4437"
    assert (found.starting, found.ending, found.key) == (None, None, None)
    assert found.fail_on_data_loss
    assert not found.pushdown
    assert found.connection.fetch_bytes == 4 << 20
    assert found.connection.retries == 5


def test_the_endpoint_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILRACE_ENDPOINT", "http://there:1/")
    assert parse_read_options({"stream": "a"}, streaming=True).connection.endpoint == "http://there:1"
    given = {"stream": "a", "endpoint": "http://here:2"}
    assert parse_read_options(given, streaming=True).connection.endpoint == "http://here:2"


def test_names_have_no_case() -> None:
    """Spark's own object ignores case; a plain copy of it has lower names, and means the same."""
    given = CaseInsensitiveDict({"StreamPattern": "a/*", "MAXOFFSETSPERTRIGGER": "7"})
    for options in (given, dict(given)):
        found = parse_read_options(options, streaming=True)
        assert found.pattern == "a/*"
        assert found.rows_per_trigger == 7


def test_several_streams_and_load() -> None:
    assert parse_read_options({"stream": "a, b/c,a"}, streaming=True).streams == ("a", "b/c")
    assert parse_read_options({"path": "a"}, streaming=True).streams == ("a",)


def test_times_are_instants_or_milliseconds() -> None:
    given = {"stream": "a", "startingTimestamp": "2026-01-01T00:00:00.5Z", "endingTimestamp": "1767225600000"}
    found = parse_read_options(given, streaming=False)
    assert found.starting_ns == 1767225600_500_000_000
    assert found.ending_ns == 1767225600_000_000_000


@pytest.mark.parametrize(
    ("given", "streaming", "word"),
    [
        ({}, False, "exactly one"),
        ({"stream": "a", "streamPattern": "b"}, False, "exactly one"),
        ({"stream": "a", "path": "b"}, False, "twice"),
        ({"stream": " , "}, False, "stream is empty"),
        ({"stream": "a", "endpoint": "there"}, False, "endpoint"),
        ({"stream": "a", "startingOffsets": "first"}, False, "startingOffsets"),
        ({"stream": "a", "startingOffsets": '{"b": "x"}'}, False, "not read"),
        ({"stream": "a", "startingOffsets": '{"a": 1}'}, False, "startingOffsets"),
        ({"stream": "a", "endingOffsets": "earliest"}, False, "endingOffsets"),
        ({"stream": "a", "endingOffsets": "latest"}, True, "no end"),
        ({"stream": "a", "startingOffsets": "latest", "startingTimestamp": "1"}, False, "mutually exclusive"),
        ({"stream": "a", "startingTimestamp": "yesterday"}, False, "RFC 3339"),
        ({"stream": "a", "maxOffsetsPerTrigger": "1", "maxBytesPerTrigger": "1"}, True, "mutually exclusive"),
        ({"stream": "a", "maxOffsetsPerTrigger": "1"}, False, "streaming"),
        ({"stream": "a", "maxOffsetsPerTrigger": "0"}, True, "integer >= 1"),
        ({"stream": "a", "failOnDataLoss": "no"}, True, "true or false"),
        ({"stream": "a", "valueFormat": "avro"}, True, "string, binary, json"),
        ({"stream": "a", "requestTimeout": "soon"}, True, "seconds"),
        ({"stream": "a", "token": "x", "tokenFile": "y"}, True, "mutually exclusive"),
        ({"stream": "a", "startingOffset": "latest"}, True, "unknown option startingoffset"),
    ],
)
def test_what_is_refused(given: dict[str, str], streaming: bool, word: str) -> None:
    with pytest.raises(OptionError, match=word):
        parse_read_options(given, streaming=streaming)


def test_p20_a_token_is_never_printed() -> None:
    found = parse_read_options({"stream": "a", "token": "s3cret"}, streaming=True)
    assert "s3cret" not in repr(found) + str(found.connection)
    assert pickle.loads(pickle.dumps(found)).connection.token == "s3cret"


def test_a_schema_of_ones_own_names_columns_that_there_are() -> None:
    assert check_schema(columns("entry value", "binary")) == "binary"
    assert check_schema(columns("timestamp_ns headers")) is None
    for name, kind in (("offsets", StringType()), ("entry", IntegerType()), ("value", LongType())):
        with pytest.raises(OptionError):
            check_schema(StructType([StructField(name, kind)]))
