"""A live reader that takes one pair at a time, over SSE or a WebSocket: data, if any, and control."""

from __future__ import annotations

import base64
import json
from contextlib import ExitStack
from types import TracebackType
from typing import Any, NamedTuple, Self

from websockets.sync.client import ClientConnection, connect

from support.edge import payload_in
from support.wire import Events, Wire

PATIENCE_S = 60.0


class Pair(NamedTuple):
    data: bytes | None
    control: dict[str, Any]

    @property
    def next(self) -> str:
        return self.control["streamNextOffset"]

    @property
    def up_to_date(self) -> bool:
        return bool(self.control.get("upToDate"))

    @property
    def entries(self) -> list[Any]:
        return [] if self.data is None else json.loads(self.data)

    @property
    def lasting(self) -> tuple[bytes | None, dict[str, Any]]:
        """What is the same for every reader: all but the cursor, and what is left out for being false."""
        own = ("streamCursor", "type")
        told = {name: value for name, value in self.control.items() if name not in own}
        return self.data, {name: value for name, value in told.items() if value is not False}


class LivePairs:
    """Reads `{name}?{query}&live={mode}` from a server or an edge."""

    def __init__(self, port: int, name: str, mode: str, query: str = "offset=-1") -> None:
        self._stack = ExitStack()
        self._events: Events | None = None
        self._socket: ClientConnection | None = None
        target = f"{name}?{query}&live={mode}"
        if mode == "sse":
            self._events = self._stack.enter_context(Wire(port).events(target))
            assert self._events.head.status == 200
            self._packed = self._events.head.get("stream-sse-data-encoding") == "base64"
            self.cache = self._events.head.get("x-cache")
        else:
            url = f"ws://127.0.0.1:{port}/v1/stream/{target}"
            self._socket = self._stack.enter_context(connect(url, proxy=None, open_timeout=PATIENCE_S))
            assert self._socket.response is not None
            self.cache = self._socket.response.headers.get("x-cache")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def take(self) -> Pair:
        data: bytes | None = None
        while True:
            kind, found = self._next_event() if self._events is not None else self._next_message()
            if kind == "control":
                return Pair(data, json.loads(found))
            assert data is None, "two data without a control between them"
            data = found

    def take_entries(self, count: int) -> list[Pair]:
        """Pairs until so many JSON entries were in them, and not one more."""
        pairs: list[Pair] = []
        while (seen := sum(len(pair.entries) for pair in pairs)) < count:
            pairs.append(self.take())
        assert seen == count
        return pairs

    def _next_event(self) -> tuple[str, bytes]:
        assert self._events is not None
        event = self._events.next()
        assert event is not None, "the reader was sent away"
        kind, found = event
        return kind, base64.b64decode(found) if self._packed and kind == "data" else found

    def _next_message(self) -> tuple[str, bytes]:
        assert self._socket is not None
        raw = self._socket.recv(timeout=PATIENCE_S)
        message = json.loads(raw)
        if message["type"] == "data":
            return "data", payload_in(message)
        return "control", raw if isinstance(raw, bytes) else raw.encode()
