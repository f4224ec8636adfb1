"""SQL over streams: views that come when they are named, one content for a statement, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest
from pyspark.errors import AnalysisException

from support.cli import tailrace
from support.server import ServerProcess
from support.spark_rows import Filled, served
from support.wire import Wire, fresh
from tailrace.spark.options import OptionError
from tailrace.spark.sql import SqlSession, parse_as_of, write_local_parquet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JSON = "application/json"


def test_streams_are_views_when_they_are_named(spark: SparkSession, server: ServerProcess) -> None:
    name = fresh("sql")
    http = Wire(server.port)
    http.put(name, JSON)
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "who": {"type": "string"}, "key": {}},
    }
    assert http.post(f"{name}/_schema", JSON, json.dumps({"schema": schema})).status == 200
    http.post(name, JSON, b'[{"n":1,"who":"a"},{"n":2,"who":"b","deep":{"x":[7]}}]')
    shell = SqlSession(spark, {"endpoint": server.base_url})
    assert shell.query("select 1 + 1").collect()[0][0] == 2
    row = shell.query(
        f"select n, who, json:deep.x[0]::int as x, value, entry from `{name}` where n = 2 -- `no`/x"
    ).collect()[0]
    assert (row.n, row.who, row.x, row.entry) == (2, "b", 7, 2)
    # Twice in one statement, and it has one content; the next statement sees more.
    twice = shell.query(f"select (select count(*) from `{name}`) as one, count(*) as two from `{name}`")
    http.post(name, JSON, b'{"n":3}')
    counts = twice.collect()[0]
    assert (counts.one, counts.two) == (2, 2)
    assert shell.query(f"select count(*) from `{name}`").collect()[0][0] == 3
    listed = shell.query("select name, entries, 'tailrace.streams' as text from tailrace.streams")
    found = {one.name: (one.entries, one.text) for one in listed.collect()}
    assert found[name] == (3, "tailrace.streams")
    with pytest.raises(AnalysisException, match="nothing/here"):
        shell.query("select * from `nothing/here`")
    http.close()


def test_as_of_fixes_the_end(spark: SparkSession, seamed: Filled) -> None:
    truth = served(seamed.server, "ev")
    wanted = truth[40]
    instant = wanted["append_time"].isoformat().replace("+00:00", "Z")
    before = sum(row["append_time"] < wanted["append_time"] for row in truth)
    for text, count in (("00000000000000000050000000", 40), (instant, before)):
        shell = SqlSession(spark, {"endpoint": seamed.url}, parse_as_of(text))
        assert shell.query("select count(*) from ev").collect()[0][0] == count
    with pytest.raises(OptionError):
        parse_as_of("yesterday")
    shell = SqlSession(spark, {"endpoint": seamed.url})
    segments = shell.query(
        "select sum(rows) as rows, count(*) as files from tailrace.segments where stream = 'ev'"
    )
    row = segments.collect()[0]
    assert row.files > 1
    assert 0 < row.rows < len(truth)
    assert shell.query("select * from tailrace.companions").count() == 0


def test_results_are_written_by_the_driver(spark: SparkSession, tmp_path: Path) -> None:
    """As on a cluster, whose executors write where nobody looks."""
    query = "select id, timestamp_micros(id) as at, array(id, null) as list, '😀' as text from range(10000)"
    for name, found in {"some": spark.sql(query), "none": spark.sql(f"{query} where id < 0")}.items():
        write_local_parquet(found.repartition(3), tmp_path / name)
        stored = pq.read_table(tmp_path / name)
        expected = found.orderBy("id").toArrow()
        assert stored.sort_by("id").to_pylist() == expected.to_pylist()
        assert stored.schema.types == expected.schema.types
    with pytest.raises(FileExistsError):
        write_local_parquet(spark.range(1), tmp_path / "some")


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_command(seamed: Filled, tmp_path: Path) -> None:
    """A prompt with several statements, so that Spark starts once."""
    statements = (
        b"select count(*) as n,\n min(json:n::int) as least from ev;\n"
        b"select * from nope;\n"
        b"select key from by\n where key is not null order by entry limit 1;\n"
        b"exit\n"
    )
    done = tailrace("sql", "--url", seamed.url, "--master", "local[2]", "--json", stdin=statements)
    assert done.code == 0, done.err
    assert done.rows == [{"n": len(served(seamed.server, "ev")), "least": 0}, {"key": "k1"}]
    assert "starting Spark" in done.err
    assert "`nope` cannot be found" in done.err
    assert tailrace("sql", "select 1", "--csv", "--json").code == 2
    assert tailrace("sql", "select 1", "--as-of", "yesterday").code == 2
