"""`python -m bench.pipeline.io`: rows per second into and out of Spark, beside Spark's own Parquet reader.

    python -m bench.pipeline.io --rows 1000000

One server, one stream of JSON records, sealed; each reading is of all rows, counted in the result. The first
one of each kind is thrown away: it pays for classes and workers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.server import ServerProcess  # pyright: ignore[reportMissingImports]
from support.spark import open_session  # pyright: ignore[reportMissingImports]
from tailrace.client import Client
from tailrace.spark import read_stream_history

BATCH = 2000


def fill(server: ServerProcess, rows: int, row_bytes: int) -> None:
    generator = random.Random(7)
    words = ["checkout", "cart", "login", "search", "timeout", "payment", "retry", "ok"]
    with Client(server.base_url, timeout_s=60) as client:
        stream = client.stream("bench", content_type="application/json")
        stream.create()
        for first in range(0, rows, BATCH):
            records: list[dict[str, Any]] = []
            for number in range(first, min(rows, first + BATCH)):
                text = " ".join(generator.choices(words, k=row_bytes // 8))
                records.append({"n": number, "service": words[number % 8], "text": text[: row_bytes - 60]})
            stream.append(records, key=f"k{first % 100}")


def seal(server: ServerProcess) -> None:
    import httpx2

    while httpx2.post(f"{server.base_url}/v1/server/_seal", timeout=120).status_code == 202:
        time.sleep(0.5)


def timed(what: str, rows: int, work: Callable[[], int], times: int) -> None:
    work()
    best = 0.0
    for _ in range(times):
        started = time.perf_counter()
        found = work()
        assert found == rows, f"{what}: {found} rows of {rows}"
        best = max(best, rows / (time.perf_counter() - started))
    print(f"{what:40} {best:12,.0f} rows/s", flush=True)


def drained(frame: Any) -> int:
    """All rows with all columns, thrown away, and how many there were."""
    from pyspark.sql import Observation
    from pyspark.sql.functions import count, lit

    seen = Observation()
    frame.observe(seen, count(lit(1)).alias("rows")).write.format("noop").mode("overwrite").save()
    return seen.get["rows"]


def measure(spark: Any, server: ServerProcess, rows: int, place: Path, times: int) -> None:
    url = server.base_url
    source = spark.read.format("tailrace").option("endpoint", url)
    files = str(server.data_dir / "objects" / "streams" / "*" / "*" / "segments" / "*.parquet")
    timed("spark.read.parquet", rows, lambda: drained(spark.read.parquet(files)), times)
    timed("history", rows, lambda: drained(read_stream_history(spark, "bench", endpoint=url)), times)
    timed("source, batch", rows, lambda: drained(source.load("bench")), times)
    served = source.option("sealedEntriesMin", str(1 << 60))
    timed("source, batch, from the server only", rows, lambda: drained(served.load("bench")), times)
    runs = iter(range(1000))

    def stream() -> int:
        query = (
            spark.readStream.format("tailrace")
            .options(endpoint=url, stream="bench", startingOffsets="earliest")
            .load()
            .writeStream.format("noop")
            .option("checkpointLocation", str(place / f"read-{next(runs)}"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return sum(progress.numInputRows for progress in query.recentProgress)

    timed("source, streaming", rows, stream, times)
    for delivery in ("staged", "direct"):

        def write(delivery: str = delivery) -> int:
            target = f"to/{next(runs)}"
            few = source.load("bench").where(f"entry <= {min(rows, 50_000)}").select("value")
            few.write.format("tailrace").options(
                endpoint=url, stream=target, delivery=delivery, stagingLocation=str(place / "staging")
            ).mode("append").save()
            with Client(url) as client:
                offset = client.stream(target).head().next_offset
            from tailrace.protocol.offsets import parse_position

            return parse_position(offset)[1]

        timed(f"sink, {delivery}", min(rows, 50_000), write, times)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--rows", type=int, default=200_000)
    flags.add_argument("--row-bytes", type=int, default=1000)
    flags.add_argument("--times", type=int, default=2)
    given = flags.parse_args()
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-") as directory:
        place = Path(directory)
        server = ServerProcess(place / "data", env={"TAILRACE_PIPELINE": "off"}).start()
        try:
            fill(server, given.rows, given.row_bytes)
            seal(server)
            spark = open_session(place / "spark", settings={"spark.driver.extraJavaOptions": ""})
            about = {"spark": spark.version, "cores": os.cpu_count(), "rows": given.rows}
            print(json.dumps(about), flush=True)
            measure(spark, server, given.rows, place, given.times)
            spark.stop()
        finally:
            server.stop()


if __name__ == "__main__":
    main()
