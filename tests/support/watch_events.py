"""Server-sent events of the realtime gateway, as a browser reads them."""

from __future__ import annotations

import http.client
import json
from typing import Any

from support.server import ServerProcess


class Events:
    """A stream of server-sent events."""

    def __init__(self, server: ServerProcess, path: str, body: Any = None, **headers: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        raw = None if body is None else json.dumps(body)
        self._connection.request("GET" if body is None else "POST", path, raw, named)
        self.answer = self._connection.getresponse()

    def take(self) -> tuple[str | None, dict[str, Any]]:
        """The id and the envelope of the next event."""
        found: str | None = None
        while line := self.answer.readline():
            text = line.decode().rstrip("\n")
            if text.startswith("id:"):
                found = text[3:].strip()
            elif text.startswith("data: "):
                return found, json.loads(text[6:])
        raise EOFError

    def close(self) -> None:
        self.answer.close()
        self._connection.close()
