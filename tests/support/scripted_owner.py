"""An owner that says what a test wants it to say: refusals, sockets that end at once, and nothing at all."""

from __future__ import annotations

import base64
import hashlib
import socket
import socketserver
import threading
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Self

SALT = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class Asked(NamedTuple):
    """One request, as far as a script has to know it."""

    method: str
    target: str
    socket_key: bytes

    @property
    def is_socket(self) -> bool:
        return bool(self.socket_key)


Script = Callable[[Asked], bytes]


def answer(status: int, fields: dict[str, str] | None = None, body: bytes = b"") -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in (fields or {}).items())
    return f"HTTP/1.1 {status} .\r\n{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body


def opened(asked: Asked, *messages: bytes, close: int | None = None) -> bytes:
    """The answer to a handshake, then messages, then the end if there is a code for it."""
    accept = base64.b64encode(hashlib.sha1(asked.socket_key + SALT, usedforsecurity=False).digest())
    head = b"HTTP/1.1 101 .\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: %b\r\n\r\n"
    frames = [b"\x81" + _length(message) + message for message in messages]
    if close is not None:
        frames.append(b"\x88\x02" + close.to_bytes(2))
    return head % accept + b"".join(frames)


def _length(message: bytes) -> bytes:
    return len(message).to_bytes(1) if len(message) < 126 else b"\x7e" + len(message).to_bytes(2)


class ScriptedOwner:
    """Answers every request as the script says, and counts them by method and path."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.counts: Counter[str] = Counter()
        owner = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                while (asked := _read_request(self.rfile.readline)) is not None:
                    owner.counts[f"{asked.method} {asked.target.partition('?')[0]}"] += 1
                    self.wfile.write(owner.script(asked))
                    if asked.is_socket:
                        _read_to_the_end(self.connection)
                        return

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            allow_reuse_address = True

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _read_request(readline: Callable[[], bytes]) -> Asked | None:
    try:
        first = readline().split()
        if len(first) != 3:
            return None
        fields: dict[bytes, bytes] = {}
        while (line := readline().strip()) != b"":
            name, _, value = line.partition(b":")
            fields[name.lower()] = value.strip()
    except OSError:
        return None
    return Asked(first[0].decode(), first[1].decode(), fields.get(b"sec-websocket-key", b""))


def _read_to_the_end(connection: socket.socket) -> None:
    """Whatever the client of a socket says is taken note of by nobody."""
    try:
        while data := connection.recv(4096):
            if data[0] == 0x88:
                return
    except OSError:
        return
