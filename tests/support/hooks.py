"""A webhook receiver for tests: a real HTTP server that keeps what it gets and answers as told."""

from __future__ import annotations

import json
import queue
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

WAIT_S = 60.0


class Call(NamedTuple):
    """One delivery."""

    path: str
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> dict[str, Any]:
        return json.loads(self.raw)

    def tails(self) -> dict[str, str]:
        return {item["path"]: item["tail_offset"] for item in self.body["streams"] if item["has_pending"]}


class Hook:
    """Answers 200 `{}` until it is told otherwise."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.status = 200
        self.answer: bytes = b"{}"
        self.headers: dict[str, str] = {}
        self.calls: queue.Queue[Call] = queue.Queue()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                status, answer, extra = owner.status, owner.answer, dict(owner.headers)
                owner.calls.put(Call(self.path, headers, raw))
                self.send_response(status)
                for name, value in extra.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                try:
                    self.wfile.write(answer)
                except OSError:
                    pass  # the sender had read enough

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook"
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
            self.url = f"https://localhost:{self._server.server_port}/hook"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def next(self) -> Call:
        """The next delivery, waiting for it."""
        return self.calls.get(timeout=WAIT_S)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
