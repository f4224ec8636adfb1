"""The sink inside Spark: batches, queries that are stopped and killed, and what it refuses."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException

from support.sealing import wait_until
from support.server import ServerProcess
from support.spark_rows import served
from support.wire import Wire, fresh
from tailrace.client import Client
from tailrace.protocol.offsets import parse_position

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

JSON = "application/json"
SCRIPT = Path(__file__).resolve().parents[1] / "support" / "spark_query.py"


def values(server: ServerProcess, stream: str) -> list[Any]:
    with Client(server.base_url) as client:
        return list(client.stream(stream).entries())


def fill(server: ServerProcess, stream: str, numbers: range) -> None:
    with Client(server.base_url) as client:
        made = client.stream(stream, content_type=JSON)
        made.create()
        made.append_many([{"n": number} for number in numbers])


def test_p13_a_batch_write_counts_once(spark: SparkSession, server: ServerProcess) -> None:
    first, second = fresh("to"), fresh("to")
    frame = spark.range(100).selectExpr(
        "struct(id as n, cast(null as string) as none) as value",
        f"if(id % 2 = 0, '{first}', '{second}') as stream",
        "if(id % 3 = 0, 'three', null) as key",
    )
    for _ in range(2):  # the second time has no effect
        writer = frame.write.format("tailrace").option("endpoint", server.base_url)
        writer.option("producerId", "job-1").option("batchRows", "9").mode("append").save()
    rows = served(server, first)
    assert sorted(json.loads(row["payload"])["n"] for row in rows) == list(range(0, 100, 2))
    assert all(row["payload"] == f'{{"n":{json.loads(row["payload"])["n"]}}}' for row in rows)
    assert {json.loads(row["payload"])["n"] for row in rows if row["key"] == b"three"} == set(
        range(0, 100, 6)
    )
    assert sorted(value["n"] for value in values(server, second)) == list(range(1, 100, 2))


def test_what_the_sink_refuses(spark: SparkSession, server: ServerProcess, tmp_path: Path) -> None:
    writer = spark.range(3).selectExpr("id").write.format("tailrace").option("endpoint", server.base_url)
    with pytest.raises(Exception, match="a column value is written"):
        writer.mode("append").save(fresh("to"))
    texts = spark.range(3).selectExpr("cast(id as string) as value")
    with pytest.raises(Exception, match="streams only grow"):
        texts.write.format("tailrace").option("endpoint", server.base_url).mode("overwrite").save(fresh("to"))
    with pytest.raises(Exception, match="not one JSON text"):
        spark.sql("select 'no json' as value").write.format("tailrace").option(
            "endpoint", server.base_url
        ).mode("append").save(fresh("to"))


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_p13_a_query_that_is_stopped_again_and_again(
    spark: SparkSession, server: ServerProcess, tmp_path: Path
) -> None:
    """Stopped at random, in the midst of batches too, with other partitions on each attempt."""
    source, target = fresh("from"), fresh("to")
    fill(server, source, range(200))
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    generator = random.Random(seed)

    def start(once: bool = False) -> Any:
        frame: DataFrame = (
            spark.readStream.format("tailrace")
            .options(endpoint=server.base_url, stream=source, startingOffsets="earliest")
            .option("maxOffsetsPerTrigger", "20")
            .load()
            .select("value")
            .repartition(generator.choice([1, 2, 3]))
        )
        writer = (
            frame.writeStream.format("tailrace")
            .options(endpoint=server.base_url, stream=target, batchRows="7")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
        )
        return (writer.trigger(availableNow=True) if once else writer).start()

    for attempt in range(4):
        before = _count(server, target)
        least = min(before + generator.randrange(1, 40), 200 + 10 * attempt)
        while _count(server, target) < least:
            # One whose worker was too slow to come up has ended, and is begun again.
            query = start()
            wait_until(lambda: not query.isActive or _count(server, target) >= least, "rows", 300)  # noqa: B023
            query.stop()
        fill(server, source, range(200 + 10 * attempt, 210 + 10 * attempt))
    wait_until(lambda: _finished(start(once=True)), "a run to the end", 600)
    assert sorted(value["n"] for value in values(server, target)) == list(range(240))


def _finished(query: StreamingQuery) -> bool:
    try:
        return bool(query.awaitTermination(300))
    except StreamingQueryException:
        return False


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_p13_a_query_that_is_killed_ten_times(server: ServerProcess, tmp_path: Path) -> None:
    """The driver, its JVM and its workers die at once, at random moments. No row is lost, none doubled."""
    source, target = fresh("from"), fresh("to")
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    generator = random.Random(seed)
    for attempt in range(11):
        fill(server, source, range(100 * attempt, 100 * attempt + 100))
        last = attempt == 10
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), server.base_url, source, target, str(tmp_path), *(["once"] * last)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        if last:
            assert process.stdout.readline() == "done\n"
            assert process.wait() == 0
        else:
            before = _count(server, target)
            least = before + generator.randrange(0, 60)
            wait_until(
                lambda: process.poll() is not None or _count(server, target) >= least,  # noqa: B023
                "rows",
                120,
            )
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()
    assert sorted(value["n"] for value in values(server, target)) == list(range(1100))


def _count(server: ServerProcess, stream: str) -> int:
    http = Wire(server.port)
    try:
        head = http.head(stream)
        return 0 if head.status != 200 else parse_position(head["stream-next-offset"])[1]
    finally:
        http.close()
