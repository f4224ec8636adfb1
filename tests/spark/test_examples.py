"""The examples, run as their pages say, on a real server."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from conftest import StartServer
from support.calls import Caller, eventually
from support.hub_client import registered
from support.offers import plan, seal
from support.pipeline import run_once
from support.server import ServerProcess
from support.wire import Wire
from tailrace.client import Client
from tailrace.spark.jobs.pipeline_client import PipelineClient
from tailrace.spark.sql import SqlSession

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "spark"
JSON = "application/json"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(name).name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_lake_is_kept_up_to_date(
    spark: SparkSession, server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAILRACE_ENDPOINT", server.base_url)
    http = Wire(server.port)
    http.put("orders", JSON)
    http.post("orders", JSON, json.dumps([{"id": number} for number in range(50)]))
    lake = load("lake")
    assert lake.fill_lake(spark, "orders", tmp_path) == 50
    http.post("orders", JSON, b'{"id":50}')
    assert lake.fill_lake(spark, "orders", tmp_path) == 1
    assert sorted(row.entry for row in spark.read.parquet(str(tmp_path / "data")).collect()) == [
        *range(1, 52)
    ]
    http.close()


def test_the_pulse_of_repositories(
    spark: SparkSession, server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAILRACE_ENDPOINT", server.base_url)
    http = Wire(server.port)
    http.put("github/events", JSON)
    records = [
        {"type": "PushEvent", "repo": f"ada/{number % 3}", "at": f"2026-01-01T00:{number % 7:02}:07Z"}
        for number in range(60)
    ]
    http.post("github/events", JSON, json.dumps(records))
    http.close()
    pulse = load("pulse")
    target = tmp_path / "pulse.svg"
    pulse.main("github/events", target)
    drawn = target.read_text(encoding="utf-8")
    assert drawn.count("<rect") == 7
    assert "2026-01-01 00:00:00: 9" in drawn


def test_sums_of_an_archive_are_those_of_spark(
    spark: SparkSession,
    start_server: StartServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By scanning, and once the pipeline has built them."""
    server = start_server(env={"TAILRACE_PIPELINE": "off"})
    monkeypatch.setenv("TAILRACE_ENDPOINT", server.base_url)
    archive = tmp_path / "2026-01-01-15.json.gz"
    loading, compare = load("gharchive/load"), load("gharchive/compare")
    with gzip.open(archive, "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps(record) + "\n" for record in loading.made_up(1200))
    loading.main("github/archive", str(archive))
    assert compare.main("github/archive")
    assert "with a scan: equal" in capsys.readouterr().out
    call = Caller(server)
    seal(call, "github/archive")
    with closing(PipelineClient(server.base_url)) as owner:
        run_once(owner, spark, monkeypatch, jobs=("companions",), directory=tmp_path / "pipeline")
    eventually(lambda: plan(call, "github/archive")["work"], lambda work: not work)
    assert compare.main("github/archive")
    assert "with ready-made sums: equal" in capsys.readouterr().out
    listed = SqlSession(spark, {"endpoint": server.base_url}).query(
        "select family, first, last, rows from tailrace.companions where stream = 'github/archive'"
    )
    families = {"agg", "col", "exact"}
    assert {tuple(row) for row in listed.collect()} == {(family, 1, 1200, 1200) for family in families}


@pytest.mark.nightly
def test_a_declarative_pipeline(server: ServerProcess, tmp_path: Path) -> None:
    with Client(server.base_url) as client:
        clicks = client.stream("clicks", content_type=JSON)
        clicks.create()
        clicks.append([{"user": "ada", "page": "/docs"}, {"user": "bob", "page": "/"}])
    spec = (EXAMPLES / "declarative" / "spark-pipeline.yml").read_text(encoding="utf-8")
    transformations = EXAMPLES / "declarative" / "transformations"
    (tmp_path / "transformations").symlink_to(transformations)
    text = spec.replace("file:///var/tmp/tailrace-clicks", (tmp_path / "storage").as_uri())
    (tmp_path / "spark-pipeline.yml").write_text(text, encoding="utf-8")
    done = subprocess.run(
        [Path(sys.executable).parent / "spark-pipelines", "run", "--spec", "spark-pipeline.yml"],
        cwd=tmp_path,
        env={
            **os.environ,
            "TAILRACE_ENDPOINT": server.base_url,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
        },
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    with Client(server.base_url) as client:
        found = list(client.stream("clicks/loud").entries())
    assert sorted(found, key=lambda one: one["entry"]) == [
        {"entry": 1, "user": "ada", "page": "/DOCS"},
        {"entry": 2, "user": "bob", "page": "/"},
    ]


def test_the_flow_of_the_hub(
    spark: SparkSession, start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server(env={"TAILRACE_HUB_TRACE": "all"})
    monkeypatch.setenv("TAILRACE_ENDPOINT", server.base_url)
    asker, actor = registered(server, "@(flow/asker)"), registered(server, "@(flow/actor)")
    with closing(asker), closing(actor):
        for number in range(3):
            asker.ask("hub:send", {"to": "@(flow/actor)", "type": "t", "data": number})
        asker.write(
            "hub:send", {"to": "@(flow/actor)", "type": "q", "expectReply": True}, pattern="ask", ttl=20_000
        )
        asked = actor.of("q")
        actor.write("hub:reply", {"ok": True, "data": 1}, correlationId=asked["id"])
        asker.of("hub:reply")
        asker.write("hub:send", {"to": "@(flow/nobody)", "type": "t"})
    call = Caller(server)
    eventually(
        lambda: call("GET", "hub/trace?offset=-1"),
        lambda found: (
            found.status == 200 and {"delivered", "replied", "dead"} <= {step["ev"] for step in found.body}
        ),
    )
    flow = load("hub_flow")
    found = flow.steps(flow.read_stream_history(spark, flow.STREAM)).cache()
    (edge,) = spark.sql(flow.EDGES, steps=found).collect()
    assert (edge["from"], edge["to"]) == ("@(flow/asker)", "@(flow/actor)")
    assert (edge["messages"], edge["answers"]) == (4, 1)
    assert edge["answer_p95_ms"] >= 0
    flow.main(tmp_path / "flow.dot")
    drawn = (tmp_path / "flow.dot").read_text(encoding="utf-8")
    assert '"@(flow/asker)" -> "@(flow/actor)" [label="4", penwidth=5.0];' in drawn


def test_the_notebook(
    spark: SparkSession,
    server: ServerProcess,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TAILRACE_ENDPOINT", server.base_url)
    book = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "notebook.ipynb", "exec"), names)
    assert names["chart"]._repr_svg_().count("<rect") == 10
    assert "|600  |" in capsys.readouterr().out
