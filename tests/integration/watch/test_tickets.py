"""Tickets for browsers over a restart: they are good no longer than what they were given for."""

from __future__ import annotations

from conftest import StartServer
from support.calls import Caller
from support.server import ServerProcess
from support.wire import Wire, request_bytes
from tailrace.auth import create_token

JSON = "application/json"
OLD = "the old secret that is long enough for HS256, 32 bytes"
NEW = "the new secret that is long enough for HS256, 32 bytes"
ASKED = {"database": "default", "subscriptions": [{"id": "1", "query": {"collection": "c"}}]}


def ticket_of(server: ServerProcess, token: str | None = None) -> str:
    """The path that an EventSource would ask for."""
    call = Caller(server, token)
    assert call("PUT", "/v1/databases/default/collections/c", {}).status in (200, 201)
    given = call("POST", "/realtime/sse", ASKED, headers={"Accept": JSON})
    assert given.status == 200, given.raw
    return f"/realtime/sse?ticket={given.body['ticket']}"


def status_of(server: ServerProcess, path: str) -> int:
    with Wire(server.port).connect() as connection:
        connection.send(request_bytes("GET", path))
        return connection.read_head().status


def test_a_ticket_is_good_after_a_restart(start_server: StartServer) -> None:
    server = start_server(env={"TAILRACE_AUTH_JWT_SECRET": OLD})
    path = ticket_of(server, create_token(OLD, sub="m", scopes=["manage"]))
    server.restart()
    assert status_of(server, path) == 200


def test_a_ticket_from_before_there_was_authentication_is_worth_nothing(start_server: StartServer) -> None:
    server = start_server()
    path = ticket_of(server)
    assert status_of(server, path) == 200
    server.stop()
    guarded = start_server(data_dir=server.data_dir, env={"TAILRACE_AUTH_JWT_SECRET": NEW})
    assert status_of(guarded, path) == 401


def test_a_new_secret_ends_the_tickets_of_the_old_one(start_server: StartServer) -> None:
    server = start_server(env={"TAILRACE_AUTH_JWT_SECRET": OLD})
    path = ticket_of(server, create_token(OLD, sub="m", scopes=["manage"]))
    assert status_of(server, path) == 200
    server.stop()
    rotated = start_server(data_dir=server.data_dir, env={"TAILRACE_AUTH_JWT_SECRET": NEW})
    assert status_of(rotated, path) == 401
