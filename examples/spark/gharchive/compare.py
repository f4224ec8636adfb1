"""Events per minute and repository, once as the server adds them up and once as Spark does. They are equal.

    python compare.py github/archive

The server answers out of sums that the pipeline has built, where there are some; Spark reads every record.
"""

# ruff: noqa: INP001, T201
from __future__ import annotations

import json
import os
import sys
import urllib.request
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from pyspark.sql import SparkSession

from tailrace.spark import read_stream_history

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ENDPOINT = os.environ.get("TAILRACE_ENDPOINT", "http://127.0.0.1:4437")
BY_MINUTE = """
with event as (
  select to_timestamp(json:created_at::string) as at, json:repo.name::string as repo,
         json:type::string as type, try_variant_get(json, '$.payload.size', 'bigint') as size
  from (select parse_json(value) as json from {history})
)
select date_trunc('minute', at) as minute, repo, count(*) as events, count_if(type = 'PushEvent') as pushes,
       coalesce(sum(size), 0) as commits
from event group by 1, 2
"""
Sums = dict[tuple[datetime, str], tuple[int, int, int]]


def by_spark(spark: SparkSession, history: DataFrame) -> Sums:
    rows = spark.sql(BY_MINUTE, history=history).collect()
    return {(row.minute.astimezone(UTC), row.repo): (row.events, row.pushes, row.commits) for row in rows}


def by_server(stream: str, start: datetime, end: datetime) -> tuple[Sums, bool]:
    """The sums, and whether ready-made ones were used."""
    body = {
        "rollup": "activity",
        "from": start.isoformat(),
        "to": end.isoformat(),
        "interval": "1m",
        "group_by": ["repo"],
    }
    request = urllib.request.Request(  # noqa: S310 - the endpoint is yours
        f"{ENDPOINT}/v1/stream/{stream}/_aggregate",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as reply:  # noqa: S310
        answer: dict[str, Any] = json.load(reply)
    found: Sums = {}
    for bucket in answer["buckets"]:
        for group in bucket["groups"]:
            told = group["measures"]
            sums = told["events"]["count"], told["pushes"]["count"], int(told["commits"]["sum"])
            found[datetime.fromisoformat(bucket["start"]), group["key"]["repo"]] = sums
    return found, answer["coverage"]["used_rollups"]


def main(stream: str) -> bool:
    """Whether both say the same."""
    spark = SparkSession.builder.appName("gharchive").getOrCreate()
    counted = by_spark(spark, read_stream_history(spark, stream, endpoint=ENDPOINT))
    if not counted:
        print("there is nothing in", stream)
        return True
    minutes = [minute for minute, _ in counted]
    told, ready_made = by_server(stream, min(minutes), max(minutes) + timedelta(minutes=1))
    busiest = sorted(counted.items(), key=lambda one: (-one[1][0], one[0]))[:5]
    for (minute, repo), (events, pushes, commits) in busiest:
        print(f"{minute:%H:%M}  {repo:<20} {events:>6} events {pushes:>6} pushes {commits:>6} commits")
    how = "ready-made sums" if ready_made else "a scan"
    print(f"{len(counted)} sums by Spark, {len(told)} by the server with {how}:", end=" ")
    print("equal" if told == counted else "NOT equal")
    return told == counted


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("stream")
    sys.exit(0 if main(parser.parse_args().stream) else 1)
