"""Helper processes end when they have nothing to do, and are there again when they have."""

from __future__ import annotations

from pathlib import Path

from conftest import StartServer
from support.calls import Caller, eventually
from support.server import ServerProcess


def helpers(server: ServerProcess) -> set[str]:
    """The names of those that run now."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    found: set[str] = set()
    for child in children:
        try:
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it has just ended
        found |= {word.decode() for word in words if word.startswith(b"tailrace.storage.")}
    return found


def test_helpers_end_and_come_back(start_server: StartServer) -> None:
    server = start_server("--helper-idle-ms", "100")
    call = Caller(server)
    assert call("PUT", "s", headers={"Content-Type": "text/plain"}).status == 201
    for _ in range(3):
        assert call("POST", "s", b"more", headers={"Content-Type": "text/plain"}).status == 204
        assert call("POST", "/v1/server/_seal").body == {"sealed": True}
        eventually(lambda: helpers(server), lambda found: not found)
    segments = eventually(lambda: call("GET", "s/_details").body, bool)["stream"]["segment_count"]
    assert segments == 3, "each time there were helpers to do it"
    assert "sealer process exited" not in server.log
