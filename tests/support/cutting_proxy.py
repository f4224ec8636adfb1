"""A TCP proxy that cuts connections, at random or at the worst moment."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Literal, Self

Direction = Literal["request", "answer"]
# Asked for each piece that passes: cut here, instead of passing it on?
Decide = Callable[[Direction, bytes], bool]

PIECE_BYTES = 64 * 1024
HOLD_S_MAX = 120.0
_METHODS = (b"GET ", b"HEAD ", b"PUT ", b"POST ", b"DELETE ")


class CuttingProxy:
    """Forwards to a local port. `decide` may cut; so may the test, with `cut_all`."""

    def __init__(self, port: int, decide: Decide | None = None) -> None:
        self._target = ("127.0.0.1", port)
        self._lock = threading.Lock()
        self._pairs: set[_Pair] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self.decide: Decide = decide or _never
        # May wait: what comes behind on the same connection waits as well, and nothing else does.
        self.before: Callable[[Direction, bytes], None] = _at_once
        self.cuts = 0
        self.requests = 0

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._acceptor.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A closed listener does not wake the thread that waits on it; a connection does.
        self._target = ("", 0)
        socket.create_connection(self._listener.getsockname()).close()
        self._acceptor.join()
        self._listener.close()
        self.cut_all()

    def cut_all(self) -> int:
        """Reset every open connection; how many there were."""
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            pair.cut()
        return len(pairs)

    def shut(self) -> None:
        """Nobody gets through any more, and who was through is cut."""
        self.decide = _always
        self.cut_all()

    def open(self) -> None:
        self.decide = _never

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            if not self._target[1]:
                client.close()
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            pair = _Pair(self, client, server)
            with self._lock:
                self._pairs.add(pair)
            pair.start()

    def judge(self, direction: Direction, piece: bytes) -> bool:
        with self._lock:
            self.requests += direction == "request"
            cut = self.decide(direction, piece)
            self.cuts += cut
        return cut

    def forget(self, pair: _Pair) -> None:
        with self._lock:
            self._pairs.discard(pair)


class _Pair:
    """Both halves of one proxied connection."""

    def __init__(self, proxy: CuttingProxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start(self) -> None:
        threading.Thread(target=self._pump, args=(self._client, self._server, "request"), daemon=True).start()
        threading.Thread(target=self._pump, args=(self._server, self._client, "answer"), daemon=True).start()

    def cut(self) -> None:
        # The client sees a reset. The server sees an orderly end, so that what it got is what it acts on.
        for end, linger in ((self._client, struct.pack("ii", 1, 0)), (self._server, None)):
            try:
                if linger is not None:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            end.close()
        self._proxy.forget(self)

    def _pump(self, source: socket.socket, target: socket.socket, direction: Direction) -> None:
        try:
            while piece := source.recv(PIECE_BYTES):
                self._proxy.before(direction, piece)
                if self._proxy.judge(direction, piece):
                    break
                target.sendall(piece)
        except OSError:
            pass
        self.cut()


def _never(_direction: Direction, _piece: bytes) -> bool:
    return False


def _always(_direction: Direction, _piece: bytes) -> bool:
    return True


def _at_once(_direction: Direction, _piece: bytes) -> None:
    return


class Hold:
    """Keeps back whatever has a mark in it, and what comes behind that, until it is let go.

    Given to a proxy as its `before`; without a mark the proxy is silent, and its connections stay open.
    """

    def __init__(self, direction: Direction, mark: bytes = b"") -> None:
        self._direction = direction
        self._mark = mark
        self._gate = threading.Event()
        self.reached = threading.Event()

    def __call__(self, direction: Direction, piece: bytes) -> None:
        if direction == self._direction and self._mark in piece and not self._gate.is_set():
            self.reached.set()
            assert self._gate.wait(HOLD_S_MAX)

    def wait_reached(self) -> None:
        assert self.reached.wait(HOLD_S_MAX)

    def let_go(self) -> None:
        self._gate.set()


def at_random(seed: int, share: float) -> Decide:
    """Cut a share of all pieces, requests and answers alike."""
    chance = random.Random(seed)

    def decide(_direction: Direction, _piece: bytes) -> bool:
        return chance.random() < share

    return decide


def lose_answers(count: int, *, to: bytes = b"") -> Decide:
    """Cut the first answers to the requests that begin with these bytes, after the server obeyed them."""
    state = {"left": count, "armed": False}

    def decide(direction: Direction, piece: bytes) -> bool:
        if direction == "request":
            # A body may come in a piece of its own; only the head of a request says what it is.
            if piece.startswith(_METHODS):
                state["armed"] = piece.startswith(to)
        elif state["left"] and state["armed"]:
            state["left"] -= 1
            return True
        return False

    return decide
