"""An append that the log has no room for waits its turn, and is refused only when that takes too long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from conftest import StartServer
from support.calls import eventually
from support.full_log import BYTES, KIB, PATIENT, SMALL, fill, metric, no_checkpoints, start_checkpoints
from support.server import ServerProcess
from support.wire import Answer, Wire, fresh

Wires = Callable[[ServerProcess], Wire]


@pytest.fixture
def wires() -> Iterator[Wires]:
    made: list[Wire] = []

    def make(server: ServerProcess) -> Wire:
        made.append(Wire(server.port))
        return made[-1]

    yield make
    for wire in made:
        wire.close()


def post_alone(server: ServerProcess, name: str, body: str) -> Answer:
    """On a connection of its own."""
    wire = Wire(server.port)
    try:
        return wire.post(name, "text/plain", body)
    finally:
        wire.close()


@pytest.mark.parametrize("size", [256 * KIB, 1024 * KIB])
def test_sixteen_clients_with_large_appends_are_all_served(start_server: StartServer, size: int) -> None:
    server = start_server(*SMALL, env=PATIENT)

    def append(client: int) -> list[int]:
        wire = Wire(server.port)
        name = f"writer/{client}"
        try:
            assert wire.put(name, BYTES).status == 201
            return [wire.post(name, BYTES, bytes(size)).status for _ in range(8 * KIB * KIB // size)]
        finally:
            wire.close()

    with ThreadPoolExecutor(16) as threads:
        answered = list(threads.map(append, range(16)))
    assert {status for statuses in answered for status in statuses} == {204}


def test_appends_that_wait_are_served_in_the_order_they_came(start_server: StartServer, wires: Wires) -> None:
    server = start_server(*SMALL, env=PATIENT)
    http = wires(server)
    filled, name = fresh(), fresh()
    assert http.put(name, "text/plain").status == 201
    start_checkpoints(http, filled)
    with ThreadPoolExecutor(8) as threads, no_checkpoints(server):
        fill(http, filled)
        waiting: list[Future[Answer]] = []
        for number in range(8):
            waiting.append(threads.submit(post_alone, server, name, str(number)))
            eventually(
                lambda: metric(http, "append_waiting_requests"), lambda found, n=number: found == n + 1
            )
        assert not any(future.done() for future in waiting)
        assert metric(http, "append_waiting_bytes") == 8
    assert [future.result().status for future in waiting] == [204] * 8
    assert http.get(name).body == b"01234567"
    assert metric(http, "append_waiting_requests") == metric(http, "append_waiting_bytes") == 0


def test_an_append_that_waited_too_long_is_refused_and_nothing_else_is(
    start_server: StartServer, wires: Wires
) -> None:
    server = start_server(*SMALL, env={"TAILRACE_APPEND_WAIT_MS": "300ms"})
    http = wires(server)
    filled = fresh()
    start_checkpoints(http, filled)
    with no_checkpoints(server):
        fill(http, filled)
        begun = time.monotonic()
        refused = http.post(filled, BYTES, b"late")
        assert time.monotonic() - begun >= 0.3
        assert (refused.status, refused.code, refused["retry-after"]) == (429, "overloaded", "1")
        assert http.get(f"{filled}?offset=now").status == 200
    eventually(lambda: http.post(filled, BYTES, b"again").status, lambda status: status == 204)
