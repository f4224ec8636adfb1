"""The page about the hub, executed as it is written."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

from support.hub_js import NODE_ENV, built
from support.pages import PageRun, blocks_of
from support.ports import free_port
from support.server import ServerProcess
from tailrace.client.hub import Hub
from tailrace.hub.errors import HUB_CODES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "hub.md"
PRINTED_URL = "http://127.0.0.1:4437"


def test_the_page_about_the_hub(server: ServerProcess, tmp_path: Path) -> None:
    port = str(free_port())
    replaced = {
        PRINTED_URL: server.base_url,
        "127.0.0.1:4438": f"127.0.0.1:{port}",
        "--port 4438": f"--port {port}",
    }
    blocks = list(blocks_of(PAGE, replaced))
    assert [block.kind for block in blocks].count("sh page") > 10
    with PageRun(tmp_path, {"TAILRACE_ENDPOINT": server.base_url}) as run:
        for block in blocks:
            run.execute(block)


def test_its_javascript(server: ServerProcess) -> None:
    (script,) = re.findall(r"^```js\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    built()
    with Hub(server.base_url, address="@(svc/price)") as hub:
        hub.register()
        with subprocess.Popen(
            ["node", "--input-type=module", "-e", script.replace(PRINTED_URL, server.base_url)],
            cwd=ROOT,
            env={**os.environ, **NODE_ENV},
            stdout=subprocess.PIPE,
            text=True,
        ) as node:
            question = hub.next_message(30)
            assert question is not None
            hub.reply(question, {"price": 12})
            printed, _ = node.communicate(timeout=60)
    assert printed.splitlines() == ["{ price: 12 }", "unknown_actor false"]


def test_every_code_and_every_message_type_of_the_client_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [code for code in HUB_CODES if f"`{code}`" not in page] == []
    sources = [*(ROOT / "src/tailrace/client/hub").glob("*.py"), *(ROOT / "clients/hub-js/src").glob("*.ts")]
    used = {
        kind for source in sources for kind in re.findall(r"hub:[a-z_]+", source.read_text(encoding="utf-8"))
    }
    typed = {meaning.typed for meaning in HUB_CODES.values()}
    assert sorted(kind for kind in used - typed if kind not in page) == []


def test_the_error_of_the_page_is_json() -> None:
    text = PAGE.read_text(encoding="utf-8")
    (example,) = re.findall(r'^(\{"type": "hub:error".*?\}\})$', text, re.MULTILINE | re.DOTALL)
    assert json.loads(example)["payload"]["code"] == "mailbox_full"
