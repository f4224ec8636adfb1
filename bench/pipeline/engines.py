# pyright: strict
"""DuckDB and Polars on the same Parquet files: what somebody with one machine and no server would take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import duckdb
import polars as pl

from bench.pipeline.place import Figures, Place, StageError
from bench.run import say

ROUNDS = 2
ID = "req_a"
Work = Callable[[], int]  # answers a number by which engines are compared


def engines(place: Place) -> Figures:
    """Seconds and processor time of each reading; the first one of each is thrown away up to a million."""
    works = {"DuckDB": _duckdb(place), "Polars": _polars(place)}
    readings: dict[str, dict[str, object]] = {}
    for engine, questions in works.items():
        for name, work in questions.items():
            readings.setdefault(name, {})[engine] = _timed(work, place.events)
            say(f"{engine}, {name}: {readings[name][engine]}")
    _compare(readings, place.events)
    return {"readings": readings, "versions": {"DuckDB": duckdb.__version__, "Polars": pl.__version__}}


def _timed(work: Work, events: int) -> dict[str, float]:
    rounds = ROUNDS if events <= 1_000_000 else 1
    best_s, best_cpu_s, answer = float("inf"), 0.0, 0
    if rounds > 1:
        work()
    for _ in range(rounds):
        begun, cpu = time.perf_counter(), time.process_time()
        answer = work()
        spent_s = time.perf_counter() - begun
        if spent_s < best_s:
            best_s, best_cpu_s = spent_s, time.process_time() - cpu
    return {"seconds": best_s, "cpu_s": best_cpu_s, "answer": answer}


def _compare(readings: dict[str, dict[str, Any]], events: int) -> None:
    for name, by_engine in readings.items():
        answers = {engine: reading["answer"] for engine, reading in by_engine.items()}
        if len(set(answers.values())) != 1:
            raise StageError(f"{name}: {answers}")
    if readings["read all"]["DuckDB"]["answer"] != events:
        raise StageError("the files do not hold all events")


def _duckdb(place: Place) -> dict[str, Work]:
    database = duckdb.connect()
    rows, columns = f"read_parquet('{place.segments}')", f"read_parquet('{place.columns}')"

    def number(query: str) -> Work:
        return lambda: int(database.sql(query).fetchall()[0][0])

    def count(query: str) -> Work:
        return lambda: len(database.sql(query).fetchall())

    def json(name: str) -> str:
        return f"json_extract_string(payload, '$.{name}')"

    both = f"{json('service')} = 'checkout' AND {json('level')} = 'error'"
    minute = f"substr({json('timestamp')}, 1, 16)"
    return {
        "read all": number(f"SELECT count(*), sum(strlen(payload)), max(entry) FROM {rows}"),
        "prefix of an id": number(f"SELECT count(*) FROM {rows} WHERE {json('requestId')} LIKE '{ID}%'"),
        "newest 50 by two equalities": count(
            f"SELECT entry, payload FROM {rows} WHERE {both} ORDER BY entry DESC LIMIT 50"
        ),
        "sort by a column": count(
            f"SELECT entry, payload FROM {rows} WHERE {json('service')} = 'checkout' "
            f"ORDER BY CAST({json('duration')} AS DOUBLE) DESC LIMIT 50"
        ),
        "a word, not ranked": number(f"SELECT count(*) FROM {rows} WHERE contains(payload, 'deadlock')"),
        "24 h by 1 m and service, from JSON": count(
            f"SELECT {minute}, {json('service')}, count(*), sum(CAST({json('duration')} AS DOUBLE)) "
            f"FROM {rows} GROUP BY 1, 2"
        ),
        "24 h by 1 m and service, from `col`": count(
            'SELECT "timestamp"[1] // 60000, service[1], count(*), sum(duration[1]) '
            f"FROM {columns} GROUP BY 1, 2"
        ),
    }


def _polars(place: Place) -> dict[str, Work]:
    rows, columns = pl.scan_parquet(place.segments), pl.scan_parquet(place.columns)

    def json(name: str) -> pl.Expr:
        return pl.col("payload").str.json_path_match(f"$.{name}")

    def number(frame: pl.LazyFrame) -> Work:
        return lambda: int(frame.collect(engine="streaming").item(0, 0))

    def count(frame: pl.LazyFrame) -> Work:
        return lambda: frame.collect(engine="streaming").height

    both = (json("service") == "checkout") & (json("level") == "error")
    pages = rows.select("entry", "payload")
    duration = json("duration").cast(pl.Float64)
    first = pl.col("timestamp").list.first() // 60000
    return {
        "read all": number(
            rows.select(pl.len(), pl.col("payload").str.len_bytes().sum(), pl.col("entry").max())
        ),
        "prefix of an id": number(rows.filter(json("requestId").str.starts_with(ID)).select(pl.len())),
        "newest 50 by two equalities": count(pages.filter(both).top_k(50, by="entry")),
        "sort by a column": count(pages.filter(json("service") == "checkout").top_k(50, by=duration)),
        "a word, not ranked": number(
            rows.filter(pl.col("payload").str.contains("deadlock", literal=True)).select(pl.len())
        ),
        "24 h by 1 m and service, from JSON": count(
            rows.group_by(
                json("timestamp").str.slice(0, 16).alias("minute"), json("service").alias("service")
            ).agg(pl.len(), duration.sum().alias("duration"))
        ),
        "24 h by 1 m and service, from `col`": count(
            columns.group_by(first.alias("minute"), pl.col("service").list.first()).agg(
                pl.len(), pl.col("duration").list.first().sum()
            )
        ),
    }
