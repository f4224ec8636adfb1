"""A client that sends exactly what a test says and checks what every answer of the server must keep."""

from __future__ import annotations

import itertools
import json
import select
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tailrace.common.errors import ERROR_STATUS

PATIENCE_S = 90.0
Headers = dict[str, str] | dict[str, bytes] | dict[str, str | bytes] | Sequence[tuple[str, str | bytes]]
_numbers = itertools.count(1)


def fresh(kind: str = "rules") -> str:
    """A stream name that no other test uses."""
    return f"{kind}/{next(_numbers)}"


def is_readable(opened: socket.socket) -> bool:
    """Whether something has arrived; any number of files may be open (`select` has a limit of 1024)."""
    poll = select.poll()
    poll.register(opened, select.POLLIN)
    return bool(poll.poll(0))


@dataclass
class Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def get(self, name: str) -> str | None:
        values = [value for key, value in self.headers if key == name.lower()]
        if name.lower() == "access-control-expose-headers":
            return ", ".join(values) or None  # a route may add a line with names of its own
        assert len(values) < 2, f"{name} is there twice"
        return values[0] if values else None

    def __getitem__(self, name: str) -> str:
        value = self.get(name)
        assert value is not None, f"no {name} in {self.headers}"
        return value

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str | None:
        return self.json["error"]["code"] if self.status >= 400 and self.body else None


class Connection:
    """One socket, buffered by hand so that nothing is hidden."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            self._socket = tls.wrap_socket(self._socket, server_hostname="localhost")
        self._buffer = b""

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def shrink_receive_buffer(self) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

    def was_left(self) -> bool:
        """Whether the other side has ended the connection while nothing was under way."""
        if self._buffer:
            return False
        return is_readable(self._socket)

    def _more(self) -> bool:
        piece = self._socket.recv(65536)
        self._buffer += piece
        return bool(piece)

    def read_until(self, mark: bytes) -> bytes:
        while mark not in self._buffer:
            assert self._more(), f"the server left after {self._buffer[-200:]!r}"
        found, _, self._buffer = self._buffer.partition(mark)
        return found

    def read_exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            assert self._more(), "the server left in the middle of a body"
        found, self._buffer = self._buffer[:size], self._buffer[size:]
        return found

    def at_end(self) -> bool:
        """Whether the server has closed its side; waits until that is known."""
        try:
            return not self._buffer and not self._more()
        except ConnectionError:
            return True

    def read_head(self) -> Answer:
        while True:
            first, *lines = self.read_until(b"\r\n\r\n").decode("latin-1").split("\r\n")
            version, status, _ = first.split(" ", 2)
            assert version == "HTTP/1.1"
            if status == "100":
                continue
            fields = [(line.partition(":")[0].lower(), line.partition(":")[2].strip()) for line in lines]
            return Answer(int(status), fields, b"")

    def read_chunk(self) -> bytes:
        size = int(self.read_until(b"\r\n"), 16)
        chunk = self.read_exactly(size)
        assert self.read_exactly(2) == b"\r\n"
        return chunk

    def read_answer(self, method: str = "GET") -> Answer:
        answer = self.read_head()
        bodiless = method == "HEAD" or answer.status in (101, 204, 304)
        if answer.get("transfer-encoding") == "chunked":
            while chunk := self.read_chunk():
                answer.body += chunk
        elif not bodiless:
            answer.body = self.read_exactly(int(answer["content-length"]))
        check_answer(answer, method)
        return answer


def check_answer(answer: Answer, method: str) -> None:
    """What holds for every answer, whatever was asked."""
    assert answer["x-content-type-options"] == "nosniff"
    assert "cross-origin-resource-policy" in answer
    assert "stream-next-offset" in answer["access-control-expose-headers"].lower()
    assert "date" in answer
    if answer.status in (204, 304):
        assert "content-length" not in answer
    if answer.status >= 400:
        assert answer["content-type"] == "application/json; charset=utf-8"
        assert answer["cache-control"] == "no-store"
        if method != "HEAD":
            body = answer.json
            assert set(body) == {"error"}
            assert ERROR_STATUS[body["error"]["code"]] == answer.status
            assert body["error"]["message"]
            assert "Traceback" not in body["error"]["message"]
        if answer.status == 405:
            assert "allow" in answer
        if answer.status in (429, 503, 507):
            assert int(answer["retry-after"]) >= 1


def _items(headers: Headers) -> list[tuple[str, str | bytes]]:
    return [*headers.items()] if isinstance(headers, dict) else [*headers]


def request_bytes(method: str, path: str | bytes, headers: Headers = (), body: bytes | None = None) -> bytes:
    target = path.encode() if isinstance(path, str) else path
    lines = [b"%b %b HTTP/1.1" % (method.encode(), target), b"Host: tailrace.test"]
    for name, value in _items(headers):
        lines.append(name.encode() + b": " + (value.encode() if isinstance(value, str) else value))
    if body is not None:
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + (body or b"")


class Wire:
    """Calls one server over a kept connection; `bearer` goes along with every request."""

    def __init__(self, port: int, *, bearer: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.port = port
        self._bearer = bearer
        self._tls = tls
        self._kept: Connection | None = None

    def connect(self) -> Connection:
        return Connection(self.port, self._tls)

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def call(
        self, method: str, path: str | bytes, headers: Headers = (), body: bytes | str | None = None
    ) -> Answer:
        """A path without a leading slash is a stream's name, as it is to stand in the URL."""
        raw = body.encode() if isinstance(body, str) else body
        whole = path if path[:1] in ("/", b"/") else _stream_path(path)
        items = _items(headers)
        if self._bearer is not None:
            items.append(("Authorization", f"Bearer {self._bearer}"))
        connection = self._kept
        self._kept = None
        if connection is not None and connection.was_left():
            # The server ends a connection that idled too long between two tests, as it should.
            connection.close()
            connection = None
        connection = connection or self.connect()
        try:
            connection.send(request_bytes(method, whole, items, raw))
            answer = connection.read_answer(method)
        except BaseException:
            connection.close()
            raise
        if answer.get("connection") == "close":
            connection.close()
        else:
            self._kept = connection
        return answer

    def put(
        self, path: str | bytes, content_type: str | None = None, body: str | bytes | None = None, **more: str
    ) -> Answer:
        return self.call("PUT", path, _named(content_type, more), body)

    def post(
        self, path: str | bytes, content_type: str | None = None, body: str | bytes | None = None, **more: str
    ) -> Answer:
        return self.call("POST", path, _named(content_type, more), body)

    def get(self, path: str | bytes, headers: Headers = ()) -> Answer:
        return self.call("GET", path, headers)

    def head(self, path: str | bytes) -> Answer:
        return self.call("HEAD", path)

    def delete(self, path: str | bytes) -> Answer:
        return self.call("DELETE", path)

    def events(self, path: str, headers: Headers = ()) -> Events:
        connection = self.connect()
        items = _items(headers)
        if self._bearer is not None:
            items.append(("Authorization", f"Bearer {self._bearer}"))
        connection.send(request_bytes("GET", _stream_path(path), items))
        return Events(connection)


def _stream_path(name: str | bytes) -> str | bytes:
    return f"/v1/stream/{name}" if isinstance(name, str) else b"/v1/stream/" + name


def _named(content_type: str | None, more: Mapping[str, str]) -> list[tuple[str, str]]:
    """`stream_seq="1"` is the header `Stream-Seq: 1`."""
    headers = [(name.replace("_", "-").title(), value) for name, value in more.items()]
    return headers if content_type is None else [("Content-Type", content_type), *headers]


class Events:
    """A running SSE answer."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.head = connection.read_head()
        self.comments: list[bytes] = []
        self.last_id = ""  # of the event that was read last
        self._text = b""
        self.ended = False
        if self.head.status != 200:
            self.head.body = connection.read_exactly(int(self.head["content-length"]))
            check_answer(self.head, "GET")

    def __enter__(self) -> Events:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def _block(self) -> bytes | None:
        while b"\n\n" not in self._text:
            if self.ended:
                assert not self._text
                return None
            chunk = self.connection.read_chunk()
            self.ended = not chunk
            self._text += chunk
        block, _, self._text = self._text.partition(b"\n\n")
        return block

    def next(self) -> tuple[str, bytes] | None:
        """The next event, None at the end. Comments are put aside."""
        while (block := self._block()) is not None:
            if block.startswith(b":"):
                self.comments.append(block)
                continue
            first, *lines, last = block.split(b"\n")
            assert last.startswith(b"id: ")
            self.last_id = last.removeprefix(b"id: ").decode()
            assert all(line.startswith(b"data:") for line in lines)
            kind = first.removeprefix(b"event: ").decode()
            assert kind in ("data", "control")
            data = [line[5:][1:] if line.startswith(b"data: ") else line[5:] for line in lines]
            return kind, b"\n".join(data)
        return None

    def data(self) -> bytes:
        event = self.next()
        assert event is not None
        assert event[0] == "data", event
        return event[1]

    def control(self) -> dict[str, Any]:
        event = self.next()
        assert event is not None
        assert event[0] == "control", event
        assert b"\n" not in event[1]
        return json.loads(event[1])
