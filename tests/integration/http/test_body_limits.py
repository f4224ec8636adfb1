"""Large bodies: what is taken, what is refused, and the memory that they cost the whole server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conftest import StartServer
from support.calls import Caller
from support.server import ServerProcess

MIB = 1024 * 1024
BODY_BYTES = 10 * MIB
# The body while it is received and as a whole, the entries, the record and the batch that are written.
MULTIPLE_MAX = 12
FIXED_BYTES = 48 * MIB
JSON = {"Content-Type": "application/json"}


def resident(server: ServerProcess, name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{server.pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.fixture
def server(start_server: StartServer) -> ServerProcess:
    return start_server("--pipeline", "off")


@pytest.mark.parametrize(
    "body",
    [
        b'"' + b"[" * BODY_BYTES + b'"',
        b'"\\ud800' + b"\\n" * (BODY_BYTES // 2) + b'"',
        b"[" + b"[],{}," * (BODY_BYTES // 60) + b'"' + b"x" * (BODY_BYTES * 9 // 10) + b'"]',
        b"[" + b"0," * 999_000 + b"0]",
        b"[[" + b"[]," * (BODY_BYTES // 3) + b"0]]",
    ],
    ids=["brackets in a string", "escapes", "short and long", "many elements", "nested"],
)
def test_memory_of_an_append_is_a_small_multiple_of_its_body(server: ServerProcess, body: bytes) -> None:
    call = Caller(server)
    assert call("PUT", "s", headers=JSON).status == 201
    assert call("POST", "s", b'[1,"[[[[[[[["]', headers=JSON).status == 204
    before = resident(server, "VmRSS")
    Path(f"/proc/{server.pid}/clear_refs").write_text("5")  # the peak counts from now on
    assert call("POST", "s", body, headers=JSON).status == 204
    grown = resident(server, "VmHWM") - before
    assert grown <= MULTIPLE_MAX * max(len(body), 2 * MIB) + FIXED_BYTES, f"{grown / MIB:.0f} MiB"


def test_an_entry_of_64_mib_is_taken_and_a_larger_one_is_not(server: ServerProcess) -> None:
    call = Caller(server)
    octets = {"Content-Type": "application/octet-stream"}
    assert call("PUT", "s", headers=octets).status == 201
    assert call("POST", "s", bytes(64 * MIB), headers=octets).status == 204
    assert len(call("GET", "s?offset=-1").raw) == 64 * MIB
    refused = call("POST", "s", bytes(64 * MIB + 1), headers=octets)
    assert (refused.status, refused.code) == (413, "payload_too_large")


def test_what_is_decoded_has_a_smaller_limit(start_server: StartServer) -> None:
    call = Caller(
        start_server("--pipeline", "off", "--request-body-bytes", "1MiB", "--append-entries", "1000")
    )
    assert call("PUT", "s", headers=JSON).status == 201
    assert call("POST", "s", b'"%b"' % (b"x" * 2 * MIB), headers=JSON).status == 204
    for path in ("s/_schema", "s/_profile", "s/_search", "/v1/traces"):
        refused = call("POST", path, b'"%b"' % (b"x" * MIB), headers=JSON)
        assert (refused.status, refused.code) == (413, "payload_too_large"), path
    assert call("PUT", "logs", headers=JSON).status == 201
    assert call("POST", "logs/_profile", {"profile": {"kind": "evlog"}}).status == 200
    record = b'{"message":"%b"}'
    assert call("POST", "logs", record % (b"x" * (MIB - 100)), headers=JSON).status == 204
    assert call("POST", "logs", record % (b"x" * MIB), headers=JSON).code == "payload_too_large"
    assert call("POST", "s", [0] * 1000).status == 204
    refused = call("POST", "s", [0] * 1001)
    assert (refused.status, refused.body["error"]["limit_entries"]) == (413, 1000)
