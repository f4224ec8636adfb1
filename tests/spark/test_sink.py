"""The sink inside Spark: batches, queries that are stopped and killed, and what it refuses."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException

from conftest import StartServer
from support.calls import Caller
from support.sealing import SEALING_ENV, wait_until
from support.server import ServerProcess
from support.spark_rows import served
from support.wire import Wire, fresh
from tailrace.client import Client
from tailrace.protocol.offsets import parse_offset

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

JSON = "application/json"
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "support" / "spark_query.py"


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
    with pytest.raises(Exception, match="column value is required"):
        writer.mode("append").save(fresh("to"))
    texts = spark.range(3).selectExpr("cast(id as string) as value")
    with pytest.raises(Exception, match="streams are append-only"):
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


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A directory with our package as users get it: installed from a wheel."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*install, str(wheel)], capture_output=True, check=True)
    return target


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_p13_a_query_that_is_killed_ten_times(start_server: StartServer, tmp_path: Path, site: Path) -> None:
    """The driver, its JVM and its workers die at once, at random moments. No row is lost, none doubled.

    Meanwhile somebody writes, and what was written is sealed under the query's eyes.
    """
    server = start_server(env={**SEALING_ENV, "TAILRACE_SEAL_ENTRIES": "20"})
    source, target = fresh("from"), fresh("to")
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    generator = random.Random(seed)
    run = [sys.executable, str(SCRIPT), server.base_url, source, target, str(tmp_path)]
    env, said = {**os.environ, "PYTHONPATH": str(site)}, tmp_path / "said.log"
    for attempt in range(10):
        numbers = range(110 * attempt, 110 * attempt + 110)
        fill(server, source, numbers[:20])
        with said.open("wb") as log:
            process = subprocess.Popen(
                run, stdout=subprocess.PIPE, stderr=log, env=env, text=True, start_new_session=True
            )
        assert process.stdout is not None
        assert process.stdout.readline() == f"running {site / 'tailrace' / '__init__.py'}\n"
        writer = threading.Thread(target=fill_slowly, args=(server, source, numbers[20:]))
        writer.start()
        least = _count(server, target) + generator.randrange(0, 60)
        wait_until(
            lambda: process.poll() is not None or _count(server, target) >= least,  # noqa: B023
            "rows",
            300,
        )
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        writer.join()

    def ended_well() -> bool:
        """A query whose worker was too slow to come up has ended, and is begun again."""
        with said.open("wb") as log:
            done = subprocess.run([*run, "once"], stdout=subprocess.PIPE, stderr=log, env=env, check=False)
        return done.returncode == 0 and done.stdout.endswith(b"done\n")

    assert any(ended_well() for _ in range(5)), said.read_text(errors="replace")[-6000:]
    assert sorted(value["n"] for value in values(server, target)) == list(range(1100))
    storage = Caller(server)("GET", f"{source}/_details").body["storage"]
    assert storage["object_storage"]["segment_object_count"] > 10


def fill_slowly(server: ServerProcess, stream: str, numbers: range) -> None:
    """A few entries at a time, so that a query and the sealing have something to do in between."""
    for first in range(0, len(numbers), 5):
        fill(server, stream, numbers[first : first + 5])
        time.sleep(0.1)


def _count(server: ServerProcess, stream: str) -> int:
    http = Wire(server.port)
    try:
        head = http.head(stream)
        return 0 if head.status != 200 else parse_offset(head["stream-next-offset"])[1]
    finally:
        http.close()
