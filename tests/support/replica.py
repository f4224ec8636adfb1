"""Replicating clients for tests, frame by frame and request by request."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlencode

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from support.calls import Caller, Reply
from support.server import ServerProcess

WAIT_S = 30.0


class Replica:
    """Pulls and pushes one collection over HTTP."""

    def __init__(self, call: Caller, collection: str, *, database: str = "default") -> None:
        self._call = call
        self.collection = collection
        self.base = f"/replication/v1/databases/{database}"

    def ask(self, checkpoint: Any = None, **more: Any) -> Reply:
        given = {"collection": self.collection, **more}
        if checkpoint is not None:
            given["checkpoint"] = checkpoint if isinstance(checkpoint, str) else json.dumps(checkpoint)
        return self._call("GET", f"{self.base}/pull?{urlencode(given)}")

    def pull(self, checkpoint: Any = None, **more: Any) -> tuple[list[dict[str, Any]], Any]:
        answer = self.ask(checkpoint, **more)
        assert answer.status == 200, answer.raw
        assert set(answer.body) == {"documents", "checkpoint"}
        return answer.body["documents"], answer.body["checkpoint"]

    def walk(self, checkpoint: Any = None, limit: int = 100) -> tuple[list[dict[str, Any]], Any]:
        """Page by page until a short one says that this is all."""
        found: list[dict[str, Any]] = []
        while True:
            page, checkpoint = self.pull(checkpoint, limit=limit)
            found += page
            if len(page) < limit:
                return found, checkpoint

    def send(self, *rows: tuple[dict[str, Any], dict[str, Any] | None], **more: Any) -> Reply:
        listed = [{"newDocumentState": new, "assumedMasterState": assumed} for new, assumed in rows]
        return self._call(
            "POST", f"{self.base}/push", {"collection": self.collection, "rows": listed, **more}
        )

    def push(self, *rows: tuple[dict[str, Any], dict[str, Any] | None]) -> list[dict[str, Any]]:
        answer = self.send(*rows)
        assert answer.status == 200, answer.raw
        return answer.body["conflicts"]


class Stream:
    """Server-sent events of `/stream`, one by one."""

    def __init__(self, server: ServerProcess, collection: str, **more: Any) -> None:
        headers = {name.replace("_", "-"): more.pop(name) for name in ("Last_Event_ID",) if name in more}
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
        query = urlencode({"collection": collection, **more})
        self._connection.request("GET", f"/replication/v1/databases/default/stream?{query}", headers=headers)
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200, self._answer.read()
        self.id = ""

    def line(self) -> str:
        raw = self._answer.readline()
        assert raw, "the server has ended the stream"
        return raw.decode().rstrip("\n")

    def begin(self) -> str:
        """What comes before anything happens: a place to go on from."""
        while line := self.line():
            if line.startswith("id:"):
                self.id = line[3:].strip()
        return self.id

    def take(self) -> Any:
        """The next page, or RESYNC."""
        while not (line := self.line()).startswith("data:"):
            if line.startswith("id:"):
                self.id = line[3:].strip()
        return json.loads(line[5:])

    def close(self) -> None:
        self._answer.close()
        self._connection.close()


class Frames:
    """The WebSocket protocol, by hand."""

    def __init__(self, server: ServerProcess, *, query: str = "", token: str | None = None) -> None:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.socket: ClientConnection = connect(
            f"ws://127.0.0.1:{server.port}/replication/ws{query}",
            additional_headers=headers,
            max_size=None,
            open_timeout=WAIT_S,
            legacy=True,
        )
        self._count = 0

    def send(self, method: str, collection: str, *params: Any) -> str:
        self._count += 1
        frame_id = "stream" if method == "masterChangeStream$" else f"r{self._count}"
        self.socket.send(
            json.dumps({"id": frame_id, "collection": collection, "method": method, "params": params})
        )
        return frame_id

    def take(self) -> dict[str, Any]:
        return json.loads(self.socket.recv(timeout=WAIT_S))

    def call(self, method: str, collection: str, *params: Any) -> Any:
        """The result; there is nothing else on the connection."""
        frame_id = self.send(method, collection, *params)
        answer = self.take()
        assert (answer["id"], answer["collection"]) == (frame_id, collection)
        return answer["result"]

    def closed(self) -> int:
        """The code that the server closed with, after whatever came before."""
        with pytest.raises(ConnectionClosed) as ended:
            while True:
                self.socket.recv(timeout=WAIT_S)
        received = ended.value.rcvd
        assert received is not None
        return received.code

    def close(self) -> None:
        self.socket.close()
