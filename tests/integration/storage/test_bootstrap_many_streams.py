"""Ten thousand streams after the disk is lost, each compared by hash with what HTTP gave before."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.calls import Caller, Reply
from support.loss import BYTES, JSON, Seen, bootstrap, destroy, look, post, producing, put, seal
from support.server import ServerProcess

STREAMS = 10_000
CLIENTS = 4
READY_S_MAX = 600.0


class KeptCaller(Caller):
    """Keeps one connection for each thread."""

    def __init__(self, server: ServerProcess) -> None:
        super().__init__(server)
        self._kept = threading.local()
        self._open: list[http.client.HTTPConnection] = []

    def __enter__(self) -> KeptCaller:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._open:
            connection.close()

    def __call__(
        self, method: str, path: str, body: Any = None, *, headers: Any = None, token: str | None = None
    ) -> Reply:
        connection: http.client.HTTPConnection | None = getattr(self._kept, "connection", None)
        if connection is None:
            connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=60)
            self._kept.connection = connection
            self._open.append(connection)
        connection.request(
            method, path if path.startswith("/") else f"/v1/stream/{path}", body, dict(headers or {})
        )
        response = connection.getresponse()
        answered = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, answered, response.read())


def make(call: Caller, number: int) -> None:
    """Streams of several kinds; every tenth is a fork of the one before it."""
    name, kind = f"many/{number:05}", number % 10
    messages = json.dumps(
        [{"stream": number, "entry": entry, "text": "x" * 40} for entry in range(10)]
    ).encode()
    if kind == 0:
        put(call, name, BYTES, b"%d-" % number * 50)
        for _ in range(3):
            post(call, name, bytes(range(256)), BYTES)
    elif kind == 1:
        put(call, name, {**JSON, "Stream-Closed": "true"}, messages)
    elif kind == 2:
        put(call, name, JSON)
        post(call, name, messages, producing("worker", 0, 0))
        post(call, name, messages, producing("worker", 0, 1))
    elif kind == 3:
        put(call, name, JSON)
    else:
        put(call, name, JSON, messages)
        if kind == 4:
            post(call, name, messages, JSON)


def fork(call: Caller, number: int) -> None:
    source = {"Stream-Forked-From": f"/v1/stream/many/{number - 1:05}"}
    put(call, f"many/{number:05}", {**JSON, **source}, b'[{"fork":%d}]' % number)


def in_parallel(work: Callable[[int], Any], numbers: Iterable[int]) -> list[Any]:
    with ThreadPoolExecutor(CLIENTS) as threads:
        return list(threads.map(work, numbers))


def look_at_all(server: ServerProcess) -> list[Seen]:
    with KeptCaller(server) as call:
        return in_parallel(lambda number: look(call, f"many/{number:05}"), range(STREAMS))


@pytest.mark.nightly
def test_ten_thousand_streams_come_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = (tmp_path / "bucket").as_uri()
    took: dict[str, float] = {}

    def timed(what: str, work: Callable[[], Any]) -> Any:
        begun = time.monotonic()
        done = work()
        took[what] = round(time.monotonic() - begun, 1)
        return done

    first = ServerProcess(tmp_path / "first", args=("--object-store", url)).start()
    with KeptCaller(first) as call:
        plain = (number for number in range(STREAMS) if number % 10 != 9)
        timed("make", lambda: in_parallel(lambda number: make(call, number), plain))
        timed("fork", lambda: in_parallel(lambda number: fork(call, number), range(9, STREAMS, 10)))
        before = timed("read", lambda: look_at_all(first))
        assert len({seen.digest for seen in before}) > STREAMS // 2
        timed("seal", lambda: seal(call))
        lost = {name: post(call, name, b"[0]", JSON) for name in ("many/00004", "many/00009", "many/00013")}
    destroy(first)

    again = bootstrap(tmp_path / "again", url)
    timed("bootstrap", lambda: (again.start(ready=False), again.wait_ready(READY_S_MAX)))
    after = timed("read again", lambda: look_at_all(again))
    assert [number for number in range(STREAMS) if before[number] != after[number]] == []
    with KeptCaller(again) as call:
        for name, offset in lost.items():
            assert call("GET", f"{name}?offset={offset}").status == 410
            post(call, name, b"[1]", JSON)
            assert call("GET", f"{name}?offset={offset}").status == 410
        assert call("POST", "many/00002", b"[0]", headers=producing("worker", 0, 1)).status == 204
    assert " 0 problems" in again.log
    again.stop()
    with capsys.disabled():
        print(f"\n{STREAMS} streams, seconds: {took}")  # so that somebody sees it get slower
