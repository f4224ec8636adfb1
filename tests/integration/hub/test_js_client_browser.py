"""The TypeScript client of the hub in Chromium, and a program that is compiled against its declarations."""

from __future__ import annotations

import subprocess
from pathlib import Path

from conftest import StartServer
from support.browser import browser, pages
from support.hub_js import built
from support.server import ServerProcess

PLAIN_PAGE = """<script type="module">
const url = new URL(location).searchParams.get("server") + "/hub/ws"
const attempt = () => new Promise((done) => {
  const socket = new WebSocket(url)
  const told = { opened: false, type: null, waits: false, code: null }
  socket.onopen = () => {
    told.opened = true
    socket.send('{"type":"ping"}')
  }
  socket.onmessage = ({ data }) => {
    const message = JSON.parse(data)
    told.type = message.type
    told.waits = message.payload?.retryAfter >= 1000
    if (message.type === "pong") socket.close()
  }
  socket.onclose = ({ code }) => done({ ...told, code })
})
let told
do told = await attempt()
while (told.type === "pong")
await fetch("/", { method: "POST", body: JSON.stringify(told) })
</script>"""


def test_the_client_in_chromium(server: ServerProcess, tmp_path: Path) -> None:
    built()
    with pages() as (base, results):
        url = f"{base}/clients/hub-js/browser.test.html?server={server.base_url}"
        with browser(url, tmp_path / "profile"):
            result = results.get(timeout=100)
    assert result == {
        "price": 14,
        "status": "accepted",
        "kept": "ü€😀",
        "lag": 0,
        "refused": "unknown_actor",
        "topic": "browsers/all",
        "found": ["@(browser/one)", "@(browser/other)"],
        "subscribed": "browsers/+",
    }


def test_a_page_can_read_that_there_are_too_many_connections(
    start_server: StartServer, tmp_path: Path
) -> None:
    """Without any client of ours: what a plain WebSocket tells its page."""
    server = start_server(env={"TAILRACE_HUB_CONNECTS_PER_S": "1"})
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "index.html").write_text(PLAIN_PAGE, encoding="utf-8")
    with pages(tmp_path / "page") as (base, results):
        url = f"{base}/index.html?server={server.base_url.replace('http', 'ws')}"
        with browser(url, tmp_path / "profile"):
            result = results.get(timeout=100)
    assert result == {"opened": True, "type": "hub:rate_limited", "waits": True, "code": 1013}


def test_the_declarations_compile() -> None:
    client = built()
    options = ["--noEmit", "--strict", "--target", "es2022", "--module", "nodenext", "--lib", "es2023,dom"]
    command = ["node_modules/.bin/tsc", *options, "types.test.ts"]
    done = subprocess.run(command, cwd=client, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
