"""P-10: history by native scans, by the source and over HTTP is the same, row for row."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from support.sealing import SEALING_ENV, wait_sealed
from support.server import ServerProcess
from support.spark_rows import Filled, served
from support.wire import Wire
from tailrace.protocol import offsets
from tailrace.spark import read_stream_history
from tailrace.spark.sql import SqlSession

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

JSON = "application/json"
Found = list[tuple[Any, ...]]


def rows(frame: DataFrame) -> Found:
    collected = frame.select("entry", "offset", "value", "key", "timestamp", "epoch", "stream").collect()
    return sorted(
        (row.entry, row.offset, row.value, row.key, row.timestamp.timestamp(), row.epoch, row.stream)
        for row in collected
    )


def told(server_rows: list[dict[str, Any]], stream: str) -> Found:
    return [
        (
            row["entry"],
            offsets.encode_offset(row["epoch"], row["entry"]),
            row["payload"],
            row["key"],
            row["append_time"].timestamp(),
            row["epoch"],
            stream,
        )
        for row in server_rows
    ]


def test_p10_history_is_the_source_is_http(spark: SparkSession, seamed: Filled) -> None:
    for stream in ("ev", "by"):
        truth = told(served(seamed.server, stream), stream)
        source = spark.read.format("tailrace").options(endpoint=seamed.url, sealedEntriesMin="1").load(stream)
        native = read_stream_history(spark, stream, endpoint=seamed.url)
        assert rows(native) == rows(source) == truth
    truth = told(served(seamed.server, "ev"), "ev")
    middle = truth[len(truth) // 2]
    bounded = read_stream_history(spark, "ev", endpoint=seamed.url, from_entry=9, to_entry=130, key="k3")
    assert rows(bounded) == [row for row in truth if 9 <= row[0] <= 130 and row[3] == b"k3"]
    early = read_stream_history(spark, "ev", endpoint=seamed.url, to_time=int(middle[4] * 1000) + 1)
    assert rows(early) == [row for row in truth if row[4] * 1000 < int(middle[4] * 1000) + 1]
    sealed = read_stream_history(spark, "ev", endpoint=seamed.url, include_tail=False)
    assert 0 < sealed.count() < len(truth)
    plan = io.StringIO()
    with contextlib.redirect_stdout(plan):
        sealed.select("entry").where("entry > 5").explain()
    assert "FileScan parquet" in plan.getvalue()
    assert "ReadSchema: struct<entry:bigint>" in plan.getvalue()  # no column that nobody asked for


def test_p10_history_is_promoted_as_every_reader_gets_it(
    spark: SparkSession, start_server: Callable[..., ServerProcess]
) -> None:
    """Segments hold what was written; a lens makes old records new, wherever they are read."""
    server = start_server(env=SEALING_ENV)
    http = Wire(server.port)
    http.put("ev", JSON)
    number = {"type": "integer"}
    shapes = [
        {"type": "object", "required": [name], "properties": {name: number}, "additionalProperties": False}
        for name in ("a", "b")
    ]
    assert http.post("ev/_schema", JSON, json.dumps({"schema": shapes[0]})).status == 200
    http.post("ev", JSON, json.dumps([{"a": number} for number in range(7)]))
    lens = {
        "apiVersion": "durable.lens/v1", "schema": "ev", "from": 1, "to": 2,
        "ops": [{"op": "rename", "from": "/a", "to": "/b"}],
    }  # fmt: skip
    assert http.post("ev/_schema", JSON, json.dumps({"schema": shapes[1], "lens": lens})).status == 200
    http.post("ev", JSON, json.dumps([{"b": number} for number in range(7, 12)]))
    wait_sealed(server.data_dir)
    http.post("ev", JSON, b'{"b":12}')
    http.close()
    truth = told(served(server, "ev"), "ev")
    assert [json.loads(row[2]) for row in truth] == [{"b": number} for number in range(13)]
    assert rows(read_stream_history(spark, "ev", endpoint=server.base_url)) == truth
    source = spark.read.format("tailrace").options(
        endpoint=server.base_url, sealedEntriesMin="1", includeHeaders="true"
    )
    assert rows(source.load("ev")) == truth
    versions = source.load("ev").selectExpr("entry", "headers['schema-version'] as version").collect()
    assert {row.version for row in versions if row.entry <= 7} == {"1"}
    assert {row.version for row in versions if row.entry > 7} == {"2"}


ODD = (
    *('{"a":1,"a":2}', '{"x":"\\ud800"}', '{"\\udc00":1}'),
    *('{"n":1e400}', f'{{"n":{"7" * 60}}}', "[" * 200 + "]" * 200, "null", "-0", '{"":{"a b":[]}}'),
)


def test_p10_entries_that_are_no_variant_are_null_everywhere(
    spark: SparkSession, start_server: Callable[..., ServerProcess]
) -> None:
    """JSON that Spark has no variant for does not fail a read: not by the source, natively or in SQL."""
    server = start_server(env=SEALING_ENV)
    http = Wire(server.port)
    http.put("odd", JSON)
    for text in ODD:
        assert http.post("odd", JSON, f"[{text}]".encode()).status == 204
    wait_sealed(server.data_dir)
    assert http.post("odd", JSON, ODD[0].encode()).status == 204
    http.close()
    source = spark.read.format("tailrace").options(
        endpoint=server.base_url, valueFormat="json", sealedEntriesMin="1"
    )
    frames = {
        "value": [
            source.load("odd"),
            read_stream_history(spark, "odd", endpoint=server.base_url, value_format="json"),
        ],
        "json": [SqlSession(spark, {"endpoint": server.base_url}).query("select * from odd")],
    }
    found = [
        [row.text for row in frame.selectExpr("entry", f"to_json({name}) as text").orderBy("entry").collect()]
        for name, made in frames.items()
        for frame in made
    ]
    assert found[0] == found[1] == found[2]
    assert [number for number, text in enumerate(found[0]) if text is None] == [0, 1, 2, len(ODD)]
