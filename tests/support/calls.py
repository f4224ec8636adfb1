"""Plain HTTP for tests of the server: one request, its status, headers and body, nothing hidden."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from support.server import ServerProcess

PATIENCE_S = 60.0
PAUSE_S = 0.02

T = TypeVar("T")


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.raw)

    @property
    def code(self) -> str:
        """The code of an error; every error has the one shape."""
        assert self.headers["content-type"] == "application/json; charset=utf-8"
        assert set(self.body) == {"error"}
        return self.body["error"]["code"]


class Caller:
    """Calls one server; `token` goes along with every request."""

    def __init__(self, server: ServerProcess, token: str | None = None) -> None:
        self._server = server
        self._token = token

    def __call__(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        token: str | None = None,
    ) -> Reply:
        """Sends JSON, or bytes as they are, below `/v1/stream/`; a path that begins with a slash is whole."""
        sent = dict(headers or {})
        bearer = token or self._token
        if bearer is not None:
            sent["Authorization"] = f"Bearer {bearer}"
        if body is not None:
            sent.setdefault("Content-Type", "application/json")
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        # Longer than the server has for an answer: it says that it was too slow, not this socket.
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=90)
        try:
            connection.request(method, path if path.startswith("/") else f"/v1/stream/{path}", raw, sent)
            response = connection.getresponse()
            answered = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, answered, response.read())
        finally:
            connection.close()


def eventually(look: Callable[[], T], wanted: Callable[[T], object], patience_s: float = PATIENCE_S) -> T:
    """What `look` sees as soon as it is what is wanted."""
    deadline = time.monotonic() + patience_s
    while True:
        seen = look()
        if wanted(seen):
            return seen
        assert time.monotonic() < deadline, f"still {seen!r}"
        time.sleep(PAUSE_S)
