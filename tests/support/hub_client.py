"""A client of the hub for tests: frames are written and taken by hand."""

from __future__ import annotations

import json
import time
from itertools import count
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from support.server import ServerProcess
from tailrace.hub.errors import ERROR_TYPES

WAIT_S = 30.0
HUB = "@(cloudflare/signal-hub)"
_numbers = count(1)

Frame = dict[str, Any]


def now_ms() -> int:
    return int(time.time() * 1000)


class Actor:
    """One WebSocket of the hub. `said` is what was taken and not looked at yet."""

    def __init__(
        self,
        server: ServerProcess,
        address: str | None = None,
        *,
        path: str = "/hub/ws",
        token: str | None = None,
        words: list[str] | None = None,
        hello: bool = True,
        resume: str | None = None,
        behind_ms: int = 0,
    ) -> None:
        self.address = address
        self._behind_ms = behind_ms  # how late the clock of this actor is
        self.socket: ClientConnection = connect(
            f"ws://127.0.0.1:{server.port}{path}",
            max_size=None,
            max_queue=2,  # what is not taken stays in the socket
            open_timeout=WAIT_S,
            ping_interval=None,
            compression=None,
            legacy=True,
        )
        self._kept: list[Frame] = []
        self.connected: Frame = {}
        if hello:
            metadata: Frame = {
                "protocolVersion": "0.1.0",
                "capabilities": words or ["test"],
                "resumeToken": resume,
            }
            if token is not None:
                metadata["authToken"] = f"bearer {token}"
            self.connected = self.ask("hub:connect", None, metadata=metadata)

    def write(self, kind: str, payload: Any = None, **more: Any) -> str:
        """Sends an envelope; its id."""
        frame: Frame = {
            "id": f"m-{next(_numbers)}",
            "from": self.address,
            "to": HUB,
            "type": kind,
            "payload": payload,
            "pattern": "tell",
            "correlationId": None,
            "timestamp": now_ms() - self._behind_ms,
            "metadata": {},
            "ttl": None,
            "signature": None,
        }
        frame |= more
        self.socket.send(json.dumps(frame))
        return frame["id"]

    def ask(self, kind: str, payload: Any = None, **more: Any) -> Frame:
        """Sends an envelope and takes its first answer."""
        return self.answer(self.write(kind, payload, **{"pattern": "ask"} | more))

    def answer(self, message_id: str) -> Frame:
        return self.find(lambda frame: frame["correlationId"] == message_id and frame["from"] == HUB)

    def take(self) -> Frame:
        """The next envelope, whatever it is."""
        if self._kept:
            return self._kept.pop(0)
        return json.loads(self.socket.recv(timeout=WAIT_S))

    def find(self, wanted: Any) -> Frame:
        """The first envelope that is wanted; others are kept in their order."""
        for place, frame in enumerate(self._kept):
            if wanted(frame):
                return self._kept.pop(place)
        while True:
            frame = json.loads(self.socket.recv(timeout=WAIT_S))
            if wanted(frame):
                return frame
            self._kept.append(frame)

    def of(self, kind: str) -> Frame:
        return self.find(lambda frame: frame["type"] == kind)

    def quiet(self) -> list[Frame]:
        """All that was sent here before now: the answer to a heartbeat comes after it."""
        message_id = self.write("hub:heartbeat")
        found = [self.take()]
        while found[-1].get("correlationId") != message_id:
            found.append(self.take())
        return found[:-1]

    def register(self, address: str | None = None, **more: Any) -> Frame:
        payload = {"actorAddress": address or self.address, "capabilities": ["test"], **more}
        found = self.ask("hub:register", payload)
        assert found["type"] == "hub:registered", found
        return found

    def closed(self) -> int:
        """The code that the server closed with, after reading whatever came before."""
        with pytest.raises(ConnectionClosed) as ended:
            while True:
                self._kept.append(json.loads(self.socket.recv(timeout=WAIT_S)))
        received = ended.value.rcvd
        assert received is not None
        return received.code

    def cut(self) -> None:
        """The connection is gone without a goodbye."""
        self.socket.socket.close()

    def close(self) -> None:
        self.socket.close()


def code(frame: Frame) -> str:
    """The code of a frame that must be an error."""
    assert frame["type"] in ERROR_TYPES, frame
    return frame["payload"]["code"]


def registered(server: ServerProcess, address: str, **more: Any) -> Actor:
    """An actor that is connected and registered."""
    words = more.pop("words", None)
    token = more.pop("token", None)
    actor = Actor(server, address, words=words, token=token)
    assert actor.connected["type"] == "hub:connected", actor.connected
    actor.register(**more)
    return actor
