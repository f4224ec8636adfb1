"""An append that the log has no room for waits its turn, and is refused only when that takes too long."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from conftest import StartServer
from support.calls import eventually
from support.server import ServerProcess
from support.wire import Answer, Wire, fresh

BYTES = "application/octet-stream"
KIB = 1024
# Memory for 8 MiB of entries at most, so that checkpoints are behind at once.
SMALL = ("--tail-memory-max-bytes", "4MiB", "--pipeline", "off")
PATIENT = {"TAILRACE_APPEND_WAIT_MS": "30s"}


Wires = Callable[[ServerProcess], Wire]


def metric(http: Wire, name: str) -> float:
    lines = http.get("/metrics").body.decode().splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"tailrace_{name} "))


@pytest.fixture
def wires() -> Iterator[Wires]:
    made: list[Wire] = []

    def make(server: ServerProcess) -> Wire:
        made.append(Wire(server.port))
        return made[-1]

    yield make
    for wire in made:
        wire.close()


@contextmanager
def no_checkpoints(server: ServerProcess) -> Iterator[None]:
    """The process that makes them is stopped meanwhile."""

    def checkpointers() -> list[int]:
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        return [
            int(child)
            for child in children
            if b"tailrace.storage.checkpointer" in Path(f"/proc/{child}/cmdline").read_bytes()
        ]

    [pid] = eventually(checkpointers, bool)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def fill(http: Wire, name: str) -> None:
    """Until there is room for no more."""
    while metric(http, "tail_memory_bytes") <= 8 * KIB * KIB:
        assert http.post(name, BYTES, bytes(512 * KIB)).status == 204


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
    assert http.put(filled, BYTES).status == http.put(name, "text/plain").status == 201
    http.post(filled, BYTES, bytes(5 * KIB * KIB))  # the first checkpoint starts the process
    http.post(filled, BYTES, bytes(5 * KIB * KIB))
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
    assert http.put(filled, BYTES).status == 201
    http.post(filled, BYTES, bytes(5 * KIB * KIB))
    http.post(filled, BYTES, bytes(5 * KIB * KIB))
    with no_checkpoints(server):
        fill(http, filled)
        begun = time.monotonic()
        refused = http.post(filled, BYTES, b"late")
        assert time.monotonic() - begun >= 0.3
        assert (refused.status, refused.code, refused["retry-after"]) == (429, "overloaded", "1")
        assert http.get(f"{filled}?offset=now").status == 200
    eventually(lambda: http.post(filled, BYTES, b"again").status, lambda status: status == 204)
