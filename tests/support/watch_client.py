"""A realtime client for tests: applies what it is told, remembers where it is, and checks what must hold."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import pytest
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import ClientConnection, connect

from support.server import ServerProcess

WAIT_S = 30.0


class Live:
    """One WebSocket; frames are taken by hand."""

    def __init__(
        self,
        server: ServerProcess,
        *,
        token: str | None = None,
        path: str = "/realtime/ws",
        window_bytes: int | None = None,
    ) -> None:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        plain = socket.socket()
        if window_bytes is not None:
            # Else the kernel lets it grow, on some machines up to tens of megabytes.
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window_bytes)
        plain.settimeout(WAIT_S)
        try:
            plain.connect(("127.0.0.1", server.port))
        except OSError:
            plain.close()
            raise
        plain.settimeout(None)
        self.socket: ClientConnection = connect(
            f"ws://127.0.0.1:{server.port}{path}",
            sock=plain,
            additional_headers=headers,
            ping_interval=None,  # one that does not read cannot see the answer either
            max_size=None,
            max_queue=2,  # what is not taken stays in the socket
            open_timeout=WAIT_S,
            legacy=True,
        )

    def send(self, kind: str, message_id: str | None = None, **payload: Any) -> None:
        envelope: dict[str, Any] = {"type": kind, "payload": payload}
        if message_id is not None:
            envelope["id"] = message_id
        self.socket.send(json.dumps(envelope))

    def take(self) -> dict[str, Any]:
        return json.loads(self.socket.recv(timeout=WAIT_S))

    def take_until(self, kind: str) -> list[dict[str, Any]]:
        """Everything up to and including the next envelope of this kind."""
        found = [self.take()]
        while found[-1]["type"] != kind:
            found.append(self.take())
        return found

    def closed(self) -> int:
        """The code that the server closed with, after reading whatever came before."""
        with pytest.raises(ConnectionClosed) as ended:
            while True:
                self.socket.recv(timeout=WAIT_S)
        received = ended.value.rcvd
        assert received is not None
        return received.code

    def close(self) -> None:
        self.socket.close()


class Life(NamedTuple):
    """From the end of a snapshot to the next one: every event between two positions, or a word about it."""

    start: dict[int, int]
    seen: set[tuple[int, int]]


class Follower:
    """Holds the result of one query, whatever happens to its connection."""

    def __init__(
        self,
        server: ServerProcess,
        query: dict[str, Any],
        *,
        patient: Callable[[], bool],
        max_unacked: int = 0,
    ) -> None:
        self._server = server
        self.query = query
        self._patient = patient  # False: it does not read for now
        self._max_unacked = max_unacked
        self.held: dict[str, int] = {}
        self.positions: dict[int, int] = {}
        self.seen: dict[tuple[int, int], str] = {}
        self.lives: list[Life] = []
        self.generation = 0
        self.token: str | None = None
        self._since: dict[int, int] = {}  # what was applied after the token was given
        self.resyncs: list[str] = []
        self._snapshot: dict[str, int] | None = None
        self._live: Live | None = None
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None

    def open(self) -> None:
        """Connects, and goes on where it was, if it was anywhere."""
        self.cut()
        try:
            self._live = live = Live(self._server)
            live.send("auth", "a", tokens="each")
            self._snapshot = None
            if self.token is None:
                self._subscribe(live)
            else:
                positions = {str(partition): seq for partition, seq in self._since.items()}
                live.send(
                    "resume",
                    "r",
                    subId="s",
                    token=self.token,
                    positions=positions,
                    query=self.query,
                    maxUnacked=self._max_unacked,
                )
        except (OSError, InvalidHandshake, ConnectionClosed, TimeoutError):
            self._live = None
            return
        self._thread = threading.Thread(target=self._read, args=(live,), daemon=True)
        self._thread.start()

    def _subscribe(self, live: Live) -> None:
        self.token = None
        live.send("subscribe", "s", query=self.query, sendSnapshot=True, maxUnacked=self._max_unacked)

    def cut(self) -> None:
        """The connection is gone from one moment to the next."""
        if self._live is not None:
            broken, self._live = self._live, None
            with suppress(OSError):  # the server may have been faster
                broken.socket.socket.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join(WAIT_S)
            assert not self._thread.is_alive()
            self._thread = None

    @property
    def connected(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _read(self, live: Live) -> None:
        last: dict[int, int] = {}
        try:
            while self._live is live:
                if not self._patient():
                    threading.Event().wait(0.02)
                    continue
                try:
                    envelope = json.loads(live.socket.recv(timeout=0.5))
                except TimeoutError:
                    continue
                self._apply(live, envelope, last)
        except (ConnectionClosed, OSError):
            return
        except BaseException as error:  # noqa: BLE001 - told to the test
            self.failure = error

    def _apply(self, live: Live, envelope: dict[str, Any], last: dict[int, int]) -> None:
        kind, payload = envelope["type"], envelope.get("payload", {})
        if kind == "subscribe_ack":
            self.generation = payload["generation"]
        elif kind == "snapshot":
            if payload["page"] == 0:
                self._snapshot, self.positions = {}, {}
            assert self._snapshot is not None
            for row in payload["documents"]:
                self._snapshot[row["id"]] = row["version"]
        elif kind == "snapshot-end":
            assert self._snapshot is not None
            assert payload["count"] <= len(self._snapshot) + len(self.seen) + 1
            self.held, self._snapshot = self._snapshot, None
            self.token, self._since = payload["token"], {}
            self.positions = dict(enumerate(payload["positions"]))
            self.lives.append(Life(dict(self.positions), set()))
        elif kind == "event":
            self._event(envelope, last)
            if self._max_unacked:
                acked = {str(envelope["partition"]): envelope["seq"]}
                live.send("ack", subId="s", positions=acked)
        elif kind == "resync-required":
            self.resyncs.append(payload["reason"])
            last.clear()
            self._subscribe(live)
        elif kind == "resume-ack":
            assert payload["status"] in ("ok", "resync-required")
        elif kind == "error":
            raise AssertionError(envelope)

    def _event(self, envelope: dict[str, Any], last: dict[int, int]) -> None:
        partition, seq = envelope["partition"], envelope["seq"]
        content = json.dumps(envelope["payload"]["delta"], sort_keys=True)
        assert seq > last.get(partition, 0), "on a connection they only grow"
        last[partition] = seq
        if self._snapshot is None:
            assert self.seen.setdefault((partition, seq), content) == content, "equal keys, equal content"
            if seq <= self.positions.get(partition, 0):
                return  # a repeat
            self.lives[-1].seen.add((partition, seq))
            self.positions[partition] = seq
            self._since[partition] = seq
            if seq % 3:  # now and then the older token, and what was applied since, have to do
                self.token, self._since = envelope["payload"].get("token", self.token), {}
        held = self.held if self._snapshot is None else self._snapshot
        delta = envelope["payload"]["delta"]
        if delta["op"] == "delete":
            held.pop(delta["doc"]["id"], None)
        else:
            held[delta["doc"]["id"]] = delta["doc"]["version"]
