"""The source inside Spark: batch, streaming, restarts, and what the pinned version promises."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.functions import col

from support.sealing import wait_until
from support.server import ServerProcess
from support.spark_rows import Filled, fill, served
from support.wire import Wire, fresh
from tailrace.client import Client, Stream
from tailrace.spark import lag, register

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

JSON = "application/json"


def read(spark: SparkSession, url: str, **options: str) -> DataFrame:
    return spark.read.format("tailrace").options(endpoint=url, **options).load()


def follow(spark: SparkSession, url: str, **options: str) -> DataFrame:
    return spark.readStream.format("tailrace").options(endpoint=url, **options).load()


def into_memory(frame: DataFrame, name: str, checkpoint: Path, *, once: bool = True) -> StreamingQuery:
    writer = frame.writeStream.format("memory").queryName(name).option("checkpointLocation", str(checkpoint))
    return (writer.trigger(availableNow=True) if once else writer).start()


def run_once(frame: DataFrame, checkpoint: Path, files: Path) -> list[Any]:
    """Everything that is there now goes to files; the progress of each batch."""
    query = (
        frame.writeStream.format("json")
        .option("checkpointLocation", str(checkpoint))
        .option("path", str(files))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(100)
    return [progress for progress in query.recentProgress if progress.numInputRows]


def entries_in(files: Path) -> list[int]:
    return sorted(
        json.loads(line)["entry"] for path in files.glob("*.json") for line in path.read_text().splitlines()
    )


def test_p9_spark_reads_what_http_reads(spark: SparkSession, seamed: Filled) -> None:
    truth = served(seamed.server, "ev")
    # No registration: PySpark finds the source by the name of its module.
    frame = read(spark, seamed.url, stream="ev", sealedEntriesMin="1", minPartitions="3")
    assert frame.columns == ["stream", "key", "value", "offset", "entry", "timestamp", "epoch"]
    rows = sorted(frame.collect(), key=lambda row: row.entry)
    assert [(row.entry, row.value, row.key) for row in rows] == [
        (row["entry"], row["payload"], row["key"]) for row in truth
    ]
    assert [row.timestamp.timestamp() for row in rows] == [row["append_time"].timestamp() for row in truth]
    variant = read(spark, seamed.url, stream="ev", valueFormat="json", includeHeaders="true")
    first = (
        variant.orderBy("entry").selectExpr("value:n::int as n", "headers['content-type'] as type").first()
    )
    assert first is not None
    assert (first.n, first.type) == (0, JSON)
    slim = spark.read.format("tailrace").schema("entry bigint, timestamp_ns bigint")
    newest = slim.options(endpoint=seamed.url).load("ev").orderBy(col("entry").desc()).first()
    assert newest is not None
    assert newest.timestamp_ns % 1000 == truth[-1]["append_ns"]


def test_p11_pushdown_changes_no_result(spark: SparkSession, seamed: Filled) -> None:
    conditions = [
        "entry > 20 and entry <= 130 and key = X'6b31'",
        "key in (X'6b32', X'6b33') and entry % 2 = 0",
        "timestamp >= (select max(timestamp) from plain where entry < 100) and stream = 'ev'",
        "key is null or entry = 7",
    ]
    plain = read(spark, seamed.url, stream="ev")
    plain.createOrReplaceTempView("plain")
    pushed = read(spark, seamed.url, stream="ev", pushdown="true", sealedEntriesMin="1")
    pushed.createOrReplaceTempView("pushed")
    for condition in conditions:
        found = [
            sorted(row.entry for row in spark.sql(f"select entry from {view} where {condition}").collect())
            for view in ("plain", "pushed")
        ]
        assert found[0] == found[1]
        assert found[0]


def test_pushdown_has_to_be_switched_on(spark: SparkSession, seamed: Filled) -> None:
    """Spark refuses a source that takes filters while it does not give any: hence the option."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    try:
        with pytest.raises(Exception, match="DATA_SOURCE_PUSHDOWN_DISABLED"):
            read(spark, seamed.url, stream="ev", pushdown="true").where("entry = 1").collect()
        assert read(spark, seamed.url, stream="ev").where("entry = 1").count() == 1
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")


def test_errors_say_what_is_wrong(spark: SparkSession, seamed: Filled) -> None:
    with pytest.raises(Exception, match="stream not found: nothing"):
        read(spark, seamed.url, stream="nothing")
    with pytest.raises(Exception, match="unknown option startingoffset"):
        read(spark, seamed.url, stream="ev", startingOffset="latest")
    register(spark)  # for engines that do not look by themselves; once more does no harm
    assert read(spark, seamed.url, stream="ev").limit(1).count() == 1


def test_p20_neither_plans_nor_errors_nor_checkpoints_tell_a_token(
    spark: SparkSession, seamed: Filled, tmp_path: Path
) -> None:
    """Nor what an entry holds."""
    secret = {"token": "the-token-of-this-test"}
    told = StringIO()
    frame = read(spark, seamed.url, stream="ev", pushdown="true", **secret).where("entry > 3")
    with redirect_stdout(told):
        for kind in ("extended", "formatted", "cost"):
            frame.explain(kind)
    assert "entry" in told.getvalue(), "plans are told"
    for broken in ({"stream": "nothing"}, {"stream": "ev", "startingOffsets": '{"ev":"zz"}'}):
        with pytest.raises(Exception, match=r"nothing|offset") as caught:
            read(spark, seamed.url, **broken, **secret).collect()
        told.write(str(caught.value))
    batches = run_once(
        follow(spark, seamed.url, stream="ev", startingOffsets="earliest", **secret).select("entry"),
        tmp_path / "checkpoint",
        tmp_path / "files",
    )
    told.writelines(progress.json for progress in batches)
    kept = [
        path.read_text(errors="replace") for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()
    ]
    assert batches
    assert kept
    told.writelines(kept)
    assert secret["token"] not in told.getvalue()
    assert '"n":' not in told.getvalue()


def append(stream: Stream, numbers: range) -> None:
    for number in numbers:
        stream.append([{"n": number}, {"n": -number}])


def test_p12_available_now_reads_what_was_there(
    spark: SparkSession, server: ServerProcess, tmp_path: Path
) -> None:
    """Also while appends go on; a second run takes the rest, and each entry comes once over all runs."""
    name = fresh("now")
    with Client(server.base_url) as client:
        stream = client.stream(name, content_type=JSON)
        stream.create()
        append(stream, range(20))
        frame = follow(
            spark, server.base_url, stream=name, startingOffsets="earliest", maxOffsetsPerTrigger="11"
        )
        files = tmp_path / "out"
        written: list[int] = []

        def go_on(batch: DataFrame, number: int) -> None:
            append(stream, range(100 + 2 * number, 102 + 2 * number))
            written.extend(row.entry for row in batch.select("entry").collect())

        query = (
            frame.writeStream.foreachBatch(go_on)
            .option("checkpointLocation", str(tmp_path / "a"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(100)
        assert query.exception() is None
        assert written == list(range(1, 41))
        sizes = [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]
        assert sizes == [10, 10, 10, 10]  # an append is never cut in two
        progress = run_once(frame, tmp_path / "b", files)
        tail = len(served(server, name))
        assert entries_in(files) == list(range(1, tail + 1))
        assert progress[-1].sources[0].latestOffset == progress[-1].sources[0].endOffset
        assert run_once(frame, tmp_path / "b", files) == []
        append(stream, range(3))
        run_once(frame, tmp_path / "b", files)
        assert entries_in(files) == list(range(1, tail + 7))


def test_a_query_follows_and_lags(spark: SparkSession, server: ServerProcess, tmp_path: Path) -> None:
    """From the end of the streams on; a stream that comes to the pattern is read from its first entry."""
    place = fresh("follow")
    with Client(server.base_url) as client:
        first = client.stream(f"{place}/a", content_type=JSON)
        first.create()
        append(first, range(5))
        frame = follow(spark, server.base_url, streamPattern=f"{place}/*", maxOffsetsPerTrigger="4")
        query = into_memory(frame.select("stream", "entry"), "followed", tmp_path / "c", once=False)

        def seen() -> list[tuple[str, int]]:
            return sorted(
                (row.stream[len(place) + 1 :], row.entry) for row in spark.table("followed").collect()
            )

        wait_until(lambda: query.lastProgress is not None, "the first progress", 120)
        append(first, range(5, 8))
        second = client.stream(f"{place}/b", content_type=JSON)
        second.create()
        append(second, range(2))
        wanted = [("a", entry) for entry in range(11, 17)] + [("b", entry) for entry in range(1, 5)]
        wait_until(lambda: len(seen()) >= len(wanted), "all rows", 120)
        assert seen() == wanted
        behind = [progress for progress in query.recentProgress if progress.numInputRows]
        found = lag(behind[0], endpoint=server.base_url)
        assert set(found) <= {f"{place}/a", f"{place}/b"}
        assert all(one.seconds >= 0 for one in found.values())
        query.stop()


def test_what_retention_took_fails_the_query_or_not(
    spark: SparkSession, server: ServerProcess, tmp_path: Path
) -> None:
    name = fresh("loss")
    http = Wire(server.port)
    http.put(name, JSON)
    http.post(name, JSON, b"[1,2,3]")
    files = tmp_path / "out"
    frame = follow(spark, server.base_url, stream=name, startingOffsets="earliest")
    run_once(frame, tmp_path / "cp", files)
    # The stream goes and comes again: offsets of the old one mean nothing in the new one.
    http.delete(name)
    http.put(name, JSON)
    http.post(name, JSON, b"[4,5]")
    http.close()
    with pytest.raises(Exception, match="failOnDataLoss"):
        run_once(frame, tmp_path / "cp", files)
    lenient = follow(spark, server.base_url, stream=name, startingOffsets="earliest", failOnDataLoss="false")
    run_once(lenient, tmp_path / "cp", files)
    assert entries_in(files) == [1, 1, 2, 2, 3]


def test_streams_that_were_sealed_meanwhile(spark: SparkSession, seamed: Filled, tmp_path: Path) -> None:
    """One query over segments and the tail, in batches that do not care where the boundary is."""
    files = tmp_path / "out"
    frame = follow(
        spark,
        seamed.url,
        stream="ev",
        startingOffsets="earliest",
        maxBytesPerTrigger="1500",
        sealedEntriesMin="1",
    )
    batches = run_once(frame, tmp_path / "cp", files)
    assert len(batches) > 1
    fill(seamed.server, range(200, 210))
    run_once(frame, tmp_path / "cp", files)
    assert entries_in(files) == [row["entry"] for row in served(seamed.server, "ev")]
