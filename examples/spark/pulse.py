"""Events of public repositories, per minute: who is busy, as a table and as a chart.

    python pulse.py github/events pulse.svg

Records are like those of public event archives:

    {"type": "PushEvent", "repo": "ada/engine", "at": "2026-01-01T00:00:07Z"}

The chart is plain SVG, so that nothing else has to be installed.
"""

# ruff: noqa: INP001, T201
from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession
from pyspark.sql.functions import count, countDistinct, date_trunc, from_json, to_timestamp

from tailrace.spark import read_stream_history

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

RECORD = "type string, repo string, at string"
WIDTH, HEIGHT, MARGIN = 640, 200, 24


def events(history: DataFrame) -> DataFrame:
    """The records as columns."""
    parsed = history.select(from_json("value", RECORD).alias("e")).select("e.*")
    return parsed.withColumn("minute", date_trunc("minute", to_timestamp("at")))


def by_minute(found: DataFrame) -> DataFrame:
    return found.groupBy("minute").agg(count("*").alias("events"), countDistinct("repo").alias("repos"))


def by_repo(found: DataFrame) -> DataFrame:
    return found.groupBy("repo").count().orderBy("count", "repo", ascending=[False, True])


def chart(title: str, bars: list[tuple[str, int]]) -> str:
    """Bars from left to right, each with its label as a tooltip."""
    most = max((height for _, height in bars), default=1)
    step = (WIDTH - 2 * MARGIN) / max(1, len(bars))
    drawn: list[str] = []
    for number, (label, value) in enumerate(bars):
        height = (HEIGHT - 2 * MARGIN) * value / most
        left, top = MARGIN + number * step, HEIGHT - MARGIN - height
        drawn.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{step * 0.9:.1f}" height="{height:.1f}" '
            f'fill="#2a6f97"><title>{escape(label)}: {value}</title></rect>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
        f'<text x="{MARGIN}" y="16" font-size="12">{escape(title)} (most: {most})</text>'
        f"{''.join(drawn)}</svg>\n"
    )


def main(stream: str, target: Path) -> None:
    spark = SparkSession.builder.appName("pulse").getOrCreate()
    found = events(read_stream_history(spark, stream)).cache()
    by_repo(found).show(10, truncate=False)
    minutes = by_minute(found).orderBy("minute").collect()
    bars = [(str(row.minute), row.events) for row in minutes]
    target.write_text(chart(f"{stream}, events per minute", bars), encoding="utf-8")
    print("wrote", target)


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("stream")
    parser.add_argument("target", type=Path, help="the file for the chart")
    given = parser.parse_args()
    main(given.stream, given.target)
