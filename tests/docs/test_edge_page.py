"""The page about the edge, executed as it is written."""

from __future__ import annotations

import re
from pathlib import Path

from support.edge import EdgeProcess, metrics
from support.pages import PageRun, blocks_of
from support.ports import free_port
from support.server import ServerProcess
from tailrace.edge.metrics import TABLE

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_about_the_edge(tmp_path: Path) -> None:
    server, edge = free_port(), free_port()
    replaced = {"127.0.0.1:4437": f"127.0.0.1:{server}", "127.0.0.1:4438": f"127.0.0.1:{edge}"}
    env = {"TAILRACE_PORT": str(server), "TAILRACE_EDGE_LISTEN": f"127.0.0.1:{edge}"}
    blocks = list(blocks_of(ROOT / "docs" / "edge.md", replaced))
    assert [block.kind for block in blocks].count("sh page") > 7
    with PageRun(tmp_path, env) as run:
        for block in blocks:
            run.execute(block)


def test_metrics_of_an_edge_are_documented(server: ServerProcess, tmp_path: Path) -> None:
    edge = EdgeProcess(tmp_path / "cache", server.base_url)
    edge.start()
    exposed = {re.split(r"[{ ]", name)[0] for name in metrics(edge) if name.startswith("tailrace_")}
    edge.stop()
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").partition("## Edge")[2]
    documented = set(re.findall(r"^\| `(tailrace_\w+)`", page, re.MULTILINE))
    assert documented == {metric.exposed for metric in TABLE.values()}
    plain = {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in exposed}
    assert {name.removesuffix("_created") for name in plain} <= documented
