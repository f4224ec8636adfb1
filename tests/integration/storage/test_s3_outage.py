"""The S3 server is gone for long: appends up to the bound, reads of what is here, and then all drains."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conftest import StartServer
from support.calls import Caller
from support.cli import tailrace
from support.s3 import S3Server
from support.sealing import SEALING_ENV, wait_sealed, wait_until
from support.server import ServerProcess
from support.wire import Wire
from tailrace.protocol.offsets import encode_offset

TEXT = "text/plain"
ENTRY_BYTES = 10_000
SPOOL_BYTES = 2_000_000
WRITERS = 4
# An hour of trying again, in seconds: pauses are short, and a server that is gone refuses at once. While it
# is there, a slow answer is no outage.
IMPATIENT_ENV = {
    **SEALING_ENV,
    "TAILRACE_SPOOL_BYTES": str(SPOOL_BYTES),
    "TAILRACE_SEAL_PAUSE_MS": "200",
    "TAILRACE_OBJECT_MS": "20000",
    "TAILRACE_OBJECT_TRY_MS": "10000",
    "TAILRACE_OBJECT_TRIES": "2",
    "TAILRACE_OBJECT_RETRY_MS": "10",
    "TAILRACE_SEGMENT_CACHE_MAX_BYTES": "0",
}


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[S3Server]:
    """One of its own: this one is taken away."""
    server = S3Server(tmp_path / "s3").start()
    yield server
    server.stop()


def entry(name: str, number: int) -> bytes:
    return f"{name} {number:08}\n".encode().ljust(ENTRY_BYTES, b".")


def write_until_refused(port: int, name: str, first: int) -> int:
    """As fast as it goes; the last entry that was taken."""
    http = Wire(port)
    number = first
    while (answer := http.post(name, TEXT, entry(name, number))).status == 204:
        number += 1
        assert number < 10_000, "nothing bounds what waits"
    assert (answer.status, answer.code) == (503, "unavailable")
    assert int(answer["retry-after"]) >= 1
    assert "object store" in answer.json["error"]["message"]
    http.close()
    return number - 1


def text_of(http: Wire, name: str, last: int) -> bytes:
    body, number = b"", 0
    while number < last:
        answer = http.get(f"{name}?offset={encode_offset(0, number)}")
        assert answer.status == 200, answer
        body += answer.body
        number = len(body) // ENTRY_BYTES
    return body


def object_store(server: ServerProcess) -> str:
    return Caller(server)("GET", "/readyz").body["object_store"]


def test_a_long_outage_stops_appends_at_the_bound_and_nothing_is_lost(
    start_server: StartServer, s3: S3Server
) -> None:
    env = {**IMPATIENT_ENV, **s3.env(), "TAILRACE_OBJECT_STORE": s3.url("history")}
    server = start_server(env=env)
    http = Wire(server.port)
    names = [f"s{number}" for number in range(WRITERS)]
    for name in names:
        assert http.put(name, TEXT, entry(name, 1)).status == 201
    wait_sealed(server.data_dir)
    s3.stop()

    with ThreadPoolExecutor(WRITERS) as threads:
        lasts = list(threads.map(lambda name: write_until_refused(server.port, name, 2), names))
    waiting = (sum(lasts) - WRITERS) * ENTRY_BYTES
    assert SPOOL_BYTES / 2 < waiting <= SPOOL_BYTES
    wait_until(lambda: object_store(server).startswith("failing"), "the failure told")
    assert server.status("/readyz") == 503
    # What is here is read, what is only there is not, and streams may still go.
    for name, last in zip(names, lasts, strict=True):
        assert http.get(f"{name}?offset={encode_offset(0, last - 1)}").body == entry(name, last)
        assert http.get(f"{name}?offset=-1").code == "unavailable"
    # A crash in the midst of it changes nothing.
    http.close()
    server.kill()
    server.start(ready=False)
    wait_until(lambda: server.status("/healthz") == 200, "the server back")
    lasts[0] = write_until_refused(server.port, "s0", lasts[0] + 1)  # recovered entries take a little less
    assert (sum(lasts) - WRITERS) * ENTRY_BYTES <= SPOOL_BYTES
    assert http.get(f"s1?offset={encode_offset(0, 1)}").body.startswith(entry("s1", 2))
    assert http.delete("s3").status == 204

    s3.start()
    wait_until(lambda: object_store(server) == "ok", "the store used again", 60)
    wait_until(lambda: server.status("/readyz") == 200, "appends again", 60)
    for name, last in zip(names[:3], lasts, strict=False):
        assert http.post(name, TEXT, entry(name, last + 1)).status == 204
    wait_sealed(server.data_dir)
    for name, last in zip(names[:3], lasts, strict=False):
        expected = b"".join(entry(name, number) for number in range(1, last + 2))
        assert text_of(http, name, last + 1) == expected
    done = tailrace("verify", "--object-store", s3.url("history"), env=s3.env())
    assert done.code == 0, done.out + done.err
    http.close()
