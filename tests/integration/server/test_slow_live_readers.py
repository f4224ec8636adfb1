"""Live readers that take nothing cost little, and hold up no others."""

from __future__ import annotations

import os
import re
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from conftest import StartServer
from support.calls import Caller, eventually
from support.edge import metrics

MIB = 1024 * 1024
READERS = 200
STREAM_BYTES = 32 * MIB
# Processor time of the server between a request and its answer, so that other work on the machine does not
# count: 0.2 to 0.5 s, and 1.7 s if all pages are sent in one iteration of the loop.
ANSWER_CPU_S_MAX = 1.0


def resident(pid: int, name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def cpu_s(pid: int) -> float:
    """Processor time of a process so far, in user and kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
            begun = cpu_s(server.pid)
            found = metrics(server)["tailrace_live_demoted_total"]
            slowest = max(slowest, cpu_s(server.pid) - begun)
            return found

        eventually(demoted, lambda found: found >= READERS)
        grown = resident(server.pid, "VmHWM") - before
    assert slowest < ANSWER_CPU_S_MAX
    # A page, as it is sent, for each at most; a few of them if readers are at the same places.
    assert grown < (64 * MIB if query == "offset=-1" else READERS * MIB), f"{grown / MIB:.0f} MiB"
