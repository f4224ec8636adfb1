"""A server whose log has no room, because the process that makes checkpoints is stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.calls import eventually
from support.server import ServerProcess
from support.wire import Wire

BYTES = "application/octet-stream"
KIB = 1024
# Memory for 8 MiB of entries at most, so that checkpoints are behind at once.
SMALL = ("--tail-memory-max-bytes", "4MiB", "--pipeline", "off")
# The server itself writes nothing during a test.
PATIENT = {"TAILRACE_APPEND_WAIT_MS": "30s", "TAILRACE_METRICS_FLUSH_MS": "1h"}


def metric(http: Wire, name: str) -> float:
    lines = http.get("/metrics").body.decode().splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"tailrace_{name} "))


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


def start_checkpoints(http: Wire, name: str) -> None:
    """Creates a stream to `fill`; the first checkpoint starts the process that makes them."""
    assert http.put(name, BYTES).status == 201
    for _ in range(2):
        assert http.post(name, BYTES, bytes(5 * KIB * KIB)).status == 204
