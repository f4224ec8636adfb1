"""Who talks to whom: the message flow of the hub as a graph, out of the steps it writes to hub/trace.

    tailrace serve --hub-trace all
    python hub_flow.py flow.dot

Prints the edges with their rates and how long answers take, and the actors; writes the graph for Graphviz
(`dot -Tsvg flow.dot`). By default only messages that are kept leave steps; `--hub-trace all` is for every
one.
"""

# ruff: noqa: INP001, T201
from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession
from pyspark.sql.functions import from_json

from tailrace.spark import read_stream_history

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame, Row

STREAM = "hub/trace"
STEP = "ev string, at bigint, id string, `from` string, `to` string, kind string, bytes bigint"

EDGES = """
with sent as (select id, `from`, `to`, at, bytes from {steps} where ev = 'accepted'),
     answered as (select id, min(at) as at from {steps} where ev = 'replied' group by id)
select sent.`from`, sent.`to`, count(*) as messages, sum(sent.bytes) as bytes,
       round(count(*) / (max(sent.at div 60000) - min(sent.at div 60000) + 1), 1) as per_minute,
       count(answered.at) as answers,
       percentile_approx(answered.at - sent.at, 0.95) as answer_p95_ms
from sent left join answered using (id)
group by all order by messages desc, sent.`from`, sent.`to`
"""
ACTORS = """
select actor, sum(sent) as sent, sum(received) as received from (
  select `from` as actor, 1 as sent, 0 as received from {steps} where ev = 'accepted'
  union all select `to`, 0, 1 from {steps} where ev = 'delivered'
) group by actor order by actor
"""
LOST = "select reason, count(*) as messages from {dead} group by reason order by messages desc, reason"


def steps(history: DataFrame) -> DataFrame:
    """What the hub wrote, as columns."""
    return history.select(from_json("value", f"{STEP}, reason string").alias("step")).select("step.*")


def dot(edges: Sequence[Row]) -> str:
    """The graph in the language of Graphviz; the more messages, the thicker the line."""
    most = max((edge["messages"] for edge in edges), default=1)
    lines = [
        f'  "{edge["from"]}" -> "{edge["to"]}" '
        f'[label="{edge["messages"]}", penwidth={1 + 4 * edge["messages"] / most:.1f}];'
        for edge in edges
    ]
    return "\n".join(["digraph hub {", "  rankdir=LR;", *lines, "}", ""])


def main(target: Path) -> None:
    spark = SparkSession.builder.appName("hub-flow").getOrCreate()
    found = steps(read_stream_history(spark, STREAM)).cache()
    edges = spark.sql(EDGES, steps=found)
    edges.show(20, truncate=False)
    spark.sql(ACTORS, steps=found).show(20, truncate=False)
    spark.sql(LOST, dead=found.where("ev = 'dead'")).show(20, truncate=False)
    target.write_text(dot(edges.collect()), encoding="utf-8")
    print("wrote", target)


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="the file for the graph")
    main(parser.parse_args().target)
