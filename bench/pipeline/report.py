# pyright: strict
"""What the stages found, as Markdown: goals first, then what they are judged by."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from bench import machine
from bench.pipeline.place import Place, Record, read_record
from bench.pipeline.stages import ALL

SECTION = "pipeline"
HEADING = "The data pipeline"

Found = dict[str, Record]
Json = dict[str, Any]


class Goal(NamedTuple):
    """One promise: where the reading is, and what it has to be."""

    title: str
    stage: str
    value: Callable[[Json], float]
    limit: float
    at_least: bool
    unit: str

    def cell(self, found: Found) -> str:
        record = found.get(self.stage)
        if record is None or record.failed is not None:
            return ""
        try:
            value = self.value(record.figures)
        except KeyError:  # a record of an older version of the bench
            return ""
        reached = value >= self.limit if self.at_least else value <= self.limit
        return f"{number(value)}{self.unit}{'' if reached else ' **missed**'}"

    @property
    def wanted(self) -> str:
        return f"{'at least' if self.at_least else 'at most'} {number(self.limit)}{self.unit}"


def _of(name: str, scale: float = 1.0) -> Callable[[Json], float]:
    return lambda figures: figures[name] * scale


def _rate(name: str) -> Callable[[Json], float]:
    return lambda figures: figures["rows_per_s"][name]


def _history(figures: Json) -> float:
    return figures["rows_per_s"]["spark.read.parquet"] / figures["rows_per_s"]["history"]


def goals() -> list[Goal]:
    cores = os.cpu_count() or 1
    memory_mb = 1300 + cores * 400 * 1.048576
    return [
        Goal(
            "companions, all families, warm session",
            "companions",
            _of("rows_per_s"),
            100_000,
            True,
            " events/s",
        ),
        Goal(
            "companions, one core, fast path",
            "kernels",
            _of("fast_rows_per_cpu_s"),
            50_000,
            True,
            " events/s",
        ),
        Goal(
            "companions, one core, slow path",
            "kernels",
            _of("slow_rows_per_cpu_s"),
            15_000,
            True,
            " events/s",
        ),
        Goal("memory of the whole pipeline", "companions", _of("peak_spark_mb"), memory_mb, False, " MB"),
        Goal("companions by segments, bytes", "companions", _of("per_segment_byte"), 1.0, False, "x"),
        Goal("history by `spark.read.parquet`, time", "spark", _history, 1.3, False, "x"),
        Goal("source, batch", "spark", _rate("source, batch"), 150_000, True, " rows/s"),
        Goal("source, streaming", "spark", _rate("source, streaming"), 150_000, True, " rows/s"),
        Goal("sink, staged, appends of 1,000 rows", "spark", _rate("sink, staged"), 50_000, True, " rows/s"),
        Goal("sink, direct", "spark", _rate("sink, direct"), 50_000, True, " rows/s"),
        Goal("sealed to published, p95", "live", _of("p95_s"), 10, False, " s"),
        Goal("append p99 during a rebuild by idle", "appends", _of("p99_ratio"), 2, False, "x"),
        Goal("pipeline at rest", "live", _of("idle_core_share", 100), 1, False, " % of a core"),
        Goal("append to searchable, p50", "fresh", _of("p50_ms"), 5, False, " ms"),
    ]


def number(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value else "0"


def markdown(places: Sequence[Place]) -> str:
    found = [_records(place) for place in places]
    sizes = [f"{place.events:,} events" for place in places]
    out = [*_conditions(found), ""]
    out += _table(["goal", "wanted", *sizes], [_goal_row(goal, found) for goal in goals()])
    out += ["", "Questions, milliseconds (p50, and p99 in brackets), answered from companions:", ""]
    out += _table(["question", "goal", *sizes], _question_rows(found))
    out += ["", "The same files in DuckDB, Polars and Spark, seconds (processor seconds in brackets):", ""]
    out += _table(
        ["", *(f"{name}, {size}" for size in sizes for name in ENGINES)], _engine_rows(found, places)
    )
    out += ["", "Rows a second in Spark:", ""]
    out += _table(["", *sizes], _dict_rows(found, "spark", "rows_per_s"))
    out += [
        "",
        "The Prisma server with its limits raised, as far as it got in five minutes:",
        "",
    ]
    out += _table(["", *sizes], _peer_rows(found))
    out += ["", "Building and holding:", ""]
    out += _table(["", *sizes], _building_rows(found))
    out += ["", "Processor time of one core, microseconds an event:", ""]
    out += _table(["", *sizes], _dict_rows(found, "kernels", "cpu_us_per_row_by_step"))
    failures = [
        f"- {place.events:,} events, {record.stage}: {record.failed}"
        for place, records in zip(places, found, strict=True)
        for record in records.values()
        if record.failed is not None
    ]
    if failures:
        out += ["", "Not measured:", "", *failures]
    return "\n".join(out) + "\n"


ENGINES = ("DuckDB", "Polars", "Spark")


def _records(place: Place) -> Found:
    found = {stage.name: read_record(place.results / f"{stage.name}.json") for stage in ALL}
    return {name: record for name, record in found.items() if record is not None}


def _conditions(found: Sequence[Found]) -> list[str]:
    records = [record for one in found for record in one.values()]
    if not records:
        return ["Nothing was measured yet."]
    dates = sorted(record.date for record in records)
    commits = ", ".join(sorted({record.commit for record in records}))
    others = max(record.other_cores for record in records)
    cores = os.cpu_count()
    where = f"{dates[0]} to {dates[-1]}, Tailrace at {commits}, {machine.cpu_model()}, {cores} cores"
    return [f"{where}; other processes took up to {others:.2f} cores."]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Without rows that nobody measured."""
    shown = [row for row in rows if any(row[1:])]
    line = "|---|" + "---:|" * (len(head) - 1)
    return [f"| {' | '.join(head)} |", line, *(f"| {' | '.join(row)} |" for row in shown)]


def _goal_row(goal: Goal, found: Sequence[Found]) -> list[str]:
    return [goal.title, goal.wanted, *(goal.cell(one) for one in found)]


def _figures(found: Found, stage: str) -> Json:
    """Nothing, if nothing was found."""
    record = found.get(stage)
    return {} if record is None or record.failed is not None else record.figures


def _question_rows(found: Sequence[Found]) -> list[list[str]]:
    asked: list[dict[str, Json]] = [_figures(one, "queries").get("classes", {}) for one in found]
    names = list(dict.fromkeys(name for one in asked for name in one))
    rows: list[list[str]] = []
    for name in names:
        goal = next((one[name]["goal_ms"] for one in asked if name in one), None)
        cells = [_question_cell(one[name]) if name in one else "" for one in asked]
        rows.append([name, "" if goal is None else f"{goal:g}", *cells])
    return rows


def _question_cell(asked: Json) -> str:
    goal = asked["goal_ms"]
    cell = f"{asked['p50_ms']:,.1f} ({asked['p99_ms']:,.1f})"
    late = asked["timed_out"] + asked["incomplete"] + asked["failed"]
    if late:
        cell += f", {late} of {asked['asked']} not answered in full"
    return cell if goal is None or asked["p50_ms"] <= goal else f"{cell} **missed**"


def _engine_rows(found: Sequence[Found], places: Sequence[Place]) -> list[list[str]]:
    names: dict[str, None] = {}
    for one in found:
        names.update(dict.fromkeys(_figures(one, "engines").get("readings", {})))
    return [
        [
            name,
            *(cell for one, place in zip(found, places, strict=True) for cell in _engines(one, name, place)),
        ]
        for name in names
    ]


def _engines(found: Found, name: str, place: Place) -> list[str]:
    readings = _figures(found, "engines").get("readings", {}).get(name, {})
    cells = [
        f"{readings[one]['seconds']:.2f} ({readings[one]['cpu_s']:.2f})" if one in readings else ""
        for one in ("DuckDB", "Polars")
    ]
    rates = _figures(found, "spark").get("rows_per_s", {})
    rate = rates.get("spark.read.parquet" if name == "read all" else name)
    return [*cells, "" if rate is None else f"{place.events / rate:.2f}"]


def _dict_rows(found: Sequence[Found], stage: str, name: str) -> list[list[str]]:
    columns = [cast("dict[str, float]", _figures(one, stage).get(name, {})) for one in found]
    names = dict.fromkeys(key for column in columns for key in column)
    return [[key, *(number(column[key]) if key in column else "" for column in columns)] for key in names]


PEER: Sequence[tuple[str, str, str]] = (
    ("events taken", "events", ""),
    ("ingest, batches of 1,000", "ingest_per_s", " events/s"),
    ("peak memory while loading", "peak_loading_mb", " MB"),
    ("peak memory while asked", "peak_asked_mb", " MB"),
    ("bytes at rest", "bytes_at_rest", " B"),
)


def _peer_rows(found: Sequence[Found]) -> list[list[str]]:
    peers = [_figures(one, "peer") for one in found]
    rows = [
        [title, *(f"{number(one[name])}{unit}" if name in one else "" for one in peers)]
        for title, name, unit in PEER
    ]
    asked: list[dict[str, Json]] = [one.get("classes", {}) for one in peers]
    for name in dict.fromkeys(name for one in asked for name in one):
        rows.append([name, *(_peer_cell(one[name]) if name in one else "" for one in asked)])
    return rows


def _peer_cell(asked: Json) -> str:
    return f"{asked['ms']:,.1f} ms{'' if asked['complete'] else ', not in full'}"


BUILDING: Sequence[tuple[str, str, str, str]] = (
    ("ingest", "load", "ingest_per_s", " events/s"),
    ("segments", "load", "segments", ""),
    ("payload", "load", "raw_bytes", " B"),
    ("segments, bytes", "load", "segment_bytes", " B"),
    ("server while loading, peak", "load", "peak_server_mb", " MB"),
    ("build everything, from the start of the process", "companions", "wall_s", " s"),
    ("until the first publication", "companions", "to_first_s", " s"),
    ("processor time of the pipeline", "companions", "cpu_s", " s"),
    ("Spark while building, peak", "companions", "peak_spark_mb", " MB"),
    ("server while companions are built, peak", "companions", "peak_server_mb", " MB"),
    ("merge", "companions", "merge_s", " s"),
    ("Spark while merging, peak", "companions", "merge_peak_spark_mb", " MB"),
    ("companions by payload, bytes", "companions", "per_raw_byte", "x"),
    ("server while it is asked, peak", "queries", "peak_server_mb", " MB"),
    ("append to searchable, worst", "fresh", "max_ms", " ms"),
    ("sealed to published, p50", "live", "p50_s", " s"),
    ("sealed to published, worst", "live", "max_s", " s"),
)


def _building_rows(found: Sequence[Found]) -> list[list[str]]:
    rows: list[list[str]] = []
    for title, stage, name, unit in BUILDING:
        values = [_figures(one, stage).get(name) for one in found]
        rows.append([title, *("" if value is None else f"{number(value)}{unit}" for value in values)])
    for title, when in (("append p99, nothing else", "idle"), ("append p99, during a rebuild", "busy")):
        readings = [_figures(one, "appends").get(when) for one in found]
        rows.append([title, *("" if one is None else f"{number(one['p99_ms'])} ms" for one in readings)])
    sizes = [cast("dict[str, int]", _figures(one, "companions").get("family_bytes", {})) for one in found]
    for family in dict.fromkeys(key for one in sizes for key in one):
        cells = [f"{number(one[family])} B" if family in one else "" for one in sizes]
        rows.append([f"`{family}`", *cells])
    return rows
