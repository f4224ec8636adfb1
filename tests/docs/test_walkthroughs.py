"""Pages that walk a reader through something, and the README's Python, executed as they are written."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from support.cli import environment
from support.pages import PageRun, Terminal, blocks_of
from support.ports import free_port
from support.server import ServerProcess
from tailrace.client import Client

ROOT = Path(__file__).resolve().parents[2]
PRINTED_URL = "http://127.0.0.1:4437"


def test_authentication(tmp_path: Path) -> None:
    """The page starts its own servers; only their port and directory are the test's."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    env = {"TAILRACE_PORT": str(port), "TAILRACE_ENDPOINT": url}
    blocks = list(blocks_of(ROOT / "docs" / "auth.md", {PRINTED_URL: url}))
    assert [block.kind for block in blocks].count("sh page") > 10
    with PageRun(tmp_path, env) as run:
        for block in blocks:
            run.execute(block)


def test_subscriptions(server: ServerProcess, tmp_path: Path) -> None:
    hook = f"127.0.0.1:{free_port()}"
    port = hook.partition(":")[2]
    replaced = {
        PRINTED_URL: server.base_url,
        "http://127.0.0.1:8000": f"http://{hook}",
        '("127.0.0.1", 8000)': f'("127.0.0.1", {port})',
    }
    blocks = list(blocks_of(ROOT / "docs" / "subscriptions.md", replaced))
    assert [block.kind for block in blocks].count("sh page") > 10
    with PageRun(tmp_path, {}) as run:
        for block in blocks:
            run.execute(block)


def test_searching(server: ServerProcess, tmp_path: Path) -> None:
    blocks = list(blocks_of(ROOT / "docs" / "search.md", {PRINTED_URL: server.base_url}))
    assert [block.kind for block in blocks].count("sh page") > 8
    with PageRun(tmp_path, {}) as run:
        for block in blocks:
            run.execute(block)


def test_watching(server: ServerProcess, tmp_path: Path) -> None:
    blocks = list(blocks_of(ROOT / "docs" / "watch.md", {PRINTED_URL: server.base_url}))
    assert [block.kind for block in blocks].count("sh page") > 5
    with PageRun(tmp_path, {"TAILRACE_ENDPOINT": server.base_url}) as run:
        for block in blocks:
            run.execute(block)


def test_the_python_of_the_readme(server: ServerProcess, tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    script = block.replace(PRINTED_URL, server.base_url)
    assert server.base_url in script
    follower = Terminal([sys.executable, "-W", "error", "-c", script], tmp_path, environment())
    follower.wait_for(re.compile(r"^\[\{'id': 1\}\] 0{19}4000000$", re.MULTILINE))
    with Client(server.base_url) as client:
        orders = client.stream("orders/today", content_type="application/json")
        orders.append({"id": 2})
        follower.wait_for(re.compile(r"^\[\{'id': 2\}\] 0{19}8000000$", re.MULTILINE))
        orders.close()
    assert follower.wait_end() == 0, "closing the stream ends the loop"
