# pyright: strict
"""Rows per second into and out of Spark, beside Spark's own Parquet reader.

Each reading is of all rows, counted in the result. Up to a million rows the first one of each kind is
thrown away, since it pays for classes and workers; beyond, a short one before all others has to do. The sink
writes the same few rows whatever there is, so that its first reading never counts.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from bench.evlog.target import STREAM
from bench.pipeline.place import COLUMNS, SEGMENTS, Figures, Place, StageError
from bench.run import say
from tailrace.client import Client
from tailrace.protocol.offsets import parse_offset
from tailrace.spark import read_stream_history
from tailrace.spark.session import open_session

SUNK_ROWS = 200_000
HEAP_BYTES = 2 << 30
RECORD = "timestamp string, service string, duration double"


def spark(place: Place) -> Figures:
    """All readings in one session."""
    home = place.directory / "spark"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    with place.server() as target:
        session = open_session("local[*,4]", home, heap_bytes=HEAP_BYTES)
        try:
            readings = Readings(session, f"http://127.0.0.1:{target.server.port}", place, home)
            return {"version": session.version, "rows_per_s": readings.take()}
        finally:
            session.stop()


class Readings:
    def __init__(self, session: Any, url: str, place: Place, home: Path) -> None:
        self._spark = session
        self._url = url
        self._place = place
        self._home = home
        self._runs = count()
        self._source = session.read.format("tailrace").option("endpoint", url)

    def take(self) -> dict[str, float]:
        events = self._place.events
        served = self._spark.read.format("tailrace").options(
            endpoint=self._url, sealedEntriesMin=str(1 << 60)
        )
        drained = {
            "spark.read.parquet": lambda: self._parquet(SEGMENTS),
            "history": lambda: read_stream_history(self._spark, STREAM, endpoint=self._url),
            "source, batch": lambda: self._source.load(STREAM),
            "source, batch, from the server only": lambda: served.load(STREAM),
        }
        found: dict[str, float] = {}
        self._warm_up()
        for name, frame in drained.items():
            found[name] = self._timed(name, events, lambda frame=frame: _drained(frame()))
        found["source, streaming"] = self._timed("source, streaming", events, self._followed)
        found |= self._sunk(min(events, SUNK_ROWS))
        for name, work in (
            ("24 h by 1 m and service, from JSON", self._from_json),
            ("24 h by 1 m and service, from `col`", self._from_columns),
        ):
            found[name] = self._timed(name, events, work)
        return found

    def _parquet(self, files: str) -> Any:
        """By their names: Spark would look for its own notes beside a pattern, and complain."""
        return self._spark.read.parquet(*sorted(map(str, self._place.folder.glob(files))))

    def _warm_up(self) -> None:
        few = self._source.load(STREAM).where("entry <= 2000")
        few.select("value").write.format("noop").mode("overwrite").save()

    def _timed(self, name: str, rows: int, work: Callable[[], int]) -> float:
        best = 0.0
        rounds = 2 if rows <= 1_000_000 else 1
        if rounds > 1:
            work()
        for _ in range(rounds):
            begun = time.perf_counter()
            found = work()
            spent_s = time.perf_counter() - begun
            if found != rows:
                raise StageError(f"{name}: {found:,} rows instead of {rows:,}")
            best = max(best, rows / spent_s)
        say(f"{name}: {best:,.0f} rows/s")
        return best

    def _followed(self) -> int:
        query = (
            self._spark.readStream.format("tailrace")
            .options(endpoint=self._url, stream=STREAM, startingOffsets="earliest")
            .load()
            .writeStream.format("noop")
            .option("checkpointLocation", str(self._home / f"read-{next(self._runs)}"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return sum(progress.numInputRows for progress in query.recentProgress)

    def _sunk(self, rows: int) -> dict[str, float]:
        """The rows lie in Spark's memory before the clock starts: reading them is not the sink's work."""
        kept = self._parquet(SEGMENTS).where(f"entry <= {rows}").selectExpr("payload as value").cache()
        kept.count()
        found: dict[str, float] = {}
        for delivery in ("staged", "direct"):
            name = f"sink, {delivery}"
            found[name] = self._timed(name, rows, lambda delivery=delivery: self._written(delivery, kept))
        kept.unpersist()
        return found

    def _written(self, delivery: str, rows: Any) -> int:
        target = f"to/{next(self._runs)}"
        rows.write.format("tailrace").options(
            endpoint=self._url, stream=target, delivery=delivery, stagingLocation=str(self._home / "staging")
        ).mode("append").save()
        with Client(self._url) as client:
            stream = client.stream(target)
            written = parse_offset(stream.head().next_offset)[1]
            stream.delete()
        return written

    def _from_json(self) -> int:
        from pyspark.sql import functions as f

        rows = self._parquet(SEGMENTS).select(f.from_json("payload", RECORD).alias("e"))
        return _counted(rows.groupBy(f.substring("e.timestamp", 1, 16), "e.service"), "e.duration")

    def _from_columns(self) -> int:
        from pyspark.sql import functions as f

        rows = self._parquet(COLUMNS).select(
            f.expr("`timestamp`[0] div 60000").alias("minute"),
            f.expr("service[0]").alias("service"),
            f.expr("duration[0]").alias("duration"),
        )
        return _counted(rows.groupBy("minute", "service"), "duration")


def _counted(grouped: Any, duration: str) -> int:
    """All groups are made; how many rows they are of."""
    from pyspark.sql import functions as f

    groups = grouped.agg(f.count(f.lit(1)).alias("rows"), f.sum(duration)).collect()
    return sum(group["rows"] for group in groups)


def _drained(frame: Any) -> int:
    """All rows with all columns, thrown away, and how many there were."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as f

    seen = Observation()
    frame.observe(seen, f.count(f.lit(1)).alias("rows")).write.format("noop").mode("overwrite").save()
    return int(seen.get["rows"])
