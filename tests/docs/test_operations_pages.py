"""The pages for those who run a server, executed as they are written; its metrics beside their page."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from support.calls import Caller
from support.pages import PageRun, blocks_of
from support.ports import free_port
from support.server import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PRINTED_URL = "http://127.0.0.1:4437"
BY_SETTING = frozenset({"partition"})  # is only there if `watch_metrics_partitions` is set
_ROW = re.compile(r"^\| `(tailrace_\w+)` \| (\w+) \| ([^|]*) \| [^|]+ \|$", re.MULTILINE)


def test_running_it(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    env = {"TAILRACE_PORT": str(port), "TAILRACE_ENDPOINT": url, "TAILRACE_PIPELINE": "off"}
    env["TAILRACE_BOOTSTRAP_SETTLE_MS"] = "1"  # the server before it is known to be gone
    blocks = list(blocks_of(DOCS / "operations.md", {PRINTED_URL: url}))
    assert [block.kind for block in blocks].count("sh page") > 16
    with PageRun(tmp_path, env) as run:
        for block in blocks:
            run.execute(block)


def test_testing(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider -p no:schemathesis\n")
    blocks = list(blocks_of(DOCS / "testing.md", {}))
    assert [block.kind for block in blocks].count("sh page") == 1
    with PageRun(tmp_path, {}) as run:
        for block in blocks:
            run.execute(block)


def exercise(call: Caller) -> None:
    """A little of everything, so that what is counted by label has some."""
    call("PUT", "a", [{"n": 1}])
    call("POST", "a", [{"n": 2}])
    call("POST", "a", b"{")
    call("GET", "a")
    call("GET", "a?offset=now&live=long-poll&timeout_ms=10")
    call("GET", "missing")
    call("PUT", "/v1/databases/default/collections/things", {})
    call("PUT", "/v1/databases/default/collections/things/docs/one", {"n": 1})
    assert call("POST", "/v1/server/_seal").status == 200
    running = {"state": "running", "seconds": {"exact": [0.5]}}
    assert call("POST", "/v1/pipeline/heartbeat", running).status == 200


def test_the_page_of_metrics_and_a_server_at_work_agree(server: ServerProcess) -> None:
    call = Caller(server)
    exercise(call)
    page = (DOCS / "metrics.md").read_text(encoding="utf-8").partition("## Edge")[0]
    documented = {
        name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in _ROW.findall(page)
    }
    seen: set[str] = set()
    for family in text_string_to_metric_families(call("GET", "/metrics").raw.decode()):
        if not family.name.startswith("tailrace_"):
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        kind, labels = documented[name]
        assert family.type == kind, name
        seen.add(name)
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                assert set(sample.labels) - {"le"} == labels - BY_SETTING, sample
        if not labels:
            assert family.samples, f"{name} has no value"
    assert seen == set(documented)
