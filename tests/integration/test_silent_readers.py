"""Live readers that take nothing cost little, and hold up no others."""

from __future__ import annotations

import re
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from conftest import StartServer
from support.calls import Caller, eventually
from support.edge import metrics

MIB = 1024 * 1024
READERS = 200
STREAM_BYTES = 32 * MIB
ANSWER_S_MAX = 10.0  # on a busy machine; where all pages are sent in one turn it was 14 to 20


def resident(pid: int, name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.parametrize("query", ["offset=-1", "offset=-1&cursor=999999999"], ids=["alike", "each its own"])
def test_readers_of_a_long_stream_that_read_nothing(start_server: StartServer, query: str) -> None:
    server = start_server("--pipeline", "off")
    call = Caller(server)
    octets = {"Content-Type": "application/octet-stream"}
    assert call("PUT", "long", headers=octets).status == 201
    for _ in range(STREAM_BYTES // MIB):
        for _ in range(4):
            assert call("POST", "long", bytes(MIB // 4), headers=octets).status == 204
    before = resident(server.pid, "VmRSS")
    Path(f"/proc/{server.pid}/clear_refs").write_text("5")  # the peak counts from now on
    slowest = 0.0
    with ExitStack() as opened:
        for _ in range(READERS):
            reader = socket.socket()
            opened.callback(reader.close)
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(("127.0.0.1", server.port))
            reader.sendall(f"GET /v1/stream/long?live=sse&{query} HTTP/1.1\r\nHost: x\r\n\r\n".encode())

        def demoted() -> float:
            nonlocal slowest
            begun = time.monotonic()
            found = metrics(server)["tailrace_live_demoted_total"]
            slowest = max(slowest, time.monotonic() - begun)
            return found

        eventually(demoted, lambda found: found >= READERS)
        grown = resident(server.pid, "VmHWM") - before
    assert slowest < ANSWER_S_MAX
    # A page, as it is sent, for each at most; a few of them if readers are at the same places.
    assert grown < (64 * MIB if query == "offset=-1" else READERS * MIB), f"{grown / MIB:.0f} MiB"
