"""Chromium for tests: a page of the repository is opened, and what it posts is a result."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from support.hub_js import ROOT

FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage")
PATIENCE_S = 60.0


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


class BrowserSources:
    """Plain `EventSource` objects in one page of Chromium: the page counts and collects, and does no more."""

    def __init__(self, results: queue.Queue[Any]) -> None:
        self._results = results

    @classmethod
    @contextmanager
    def open(cls, profile: Path, urls: list[str]) -> Iterator[BrowserSources]:
        with pages() as (base, results):
            asked = urlencode([("source", url) for url in urls])
            with browser(f"{base}/tests/support/event_source.html?{asked}", profile):
                yield cls(results)

    def wait(self, wanted: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        """The state of all sources as soon as it is what is wanted; a source that gave up is a failure."""
        seen: list[dict[str, Any]] = []
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            seen = self._results.get(timeout=PATIENCE_S)
            gave_up = [one["url"] for one in seen if one["state"] == "closed" and not one["ended"]]
            assert not gave_up, f"EventSource gave up: {gave_up}"
            if all(wanted(one) for one in seen):
                return seen
        raise AssertionError(f"still {seen}")
