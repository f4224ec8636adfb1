"""The TypeScript client of the hub in Chromium, and a program that is compiled against its declarations."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from conftest import StartServer
from support.hub_js import ROOT, built
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
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage")


class Pages(SimpleHTTPRequestHandler):
    """The files of the repository; what a page posts is a result."""

    results: queue.Queue[Any]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()
        self.results.put(json.loads(body))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as it is called there
        pass


@contextmanager
def pages(directory: Path = ROOT) -> Iterator[tuple[str, queue.Queue[Any]]]:
    results: queue.Queue[Any] = queue.Queue()
    handler = type("ThesePages", (Pages,), {"results": results})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(directory))) as served:
        thread = threading.Thread(target=served.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{served.server_address[1]}", results
        served.shutdown()
        thread.join()


@contextmanager
def browser(url: str, profile: Path) -> Iterator[subprocess.Popen[bytes]]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert chromium is not None, "Chromium is missing: scripts/need chromium"
    quiet = subprocess.DEVNULL
    argv = [chromium, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-port=0", url]
    process = subprocess.Popen(argv, stdout=quiet, stderr=quiet, start_new_session=True)
    try:
        yield process
    finally:
        os.killpg(process.pid, 9)
        process.wait()


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
