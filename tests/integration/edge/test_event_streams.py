"""Event streams through an edge: resumed at their last event, and held while the server is away."""

from __future__ import annotations

import pytest

from conftest import StartServer
from support.calls import Caller, eventually
from support.edge import EdgeProcess, StartEdge, Writer, cached, metrics
from support.scripted_owner import Asked, ScriptedOwner, answer
from support.wire import Connection, Wire, request_bytes
from tailrace.protocol.offsets import encode_offset

REALTIME = "/realtime/sse?database=default&collection=things"
REPLICATION = "/replication/v1/databases/default/stream?collection=things"


def _head(edge: EdgeProcess, path: str, **headers: str) -> int:
    """The status of an event stream, which is left at once."""
    with Connection(edge.port) as connection:
        items = [(name.replace("_", "-"), value) for name, value in headers.items()]
        connection.send(request_bytes("GET", path, items))
        return connection.read_head().status


class HeldReader:
    """An event stream that has to end without an event."""

    def __init__(self, edge: EdgeProcess, path: str, **headers: str) -> None:
        self._connection = Connection(edge.port)
        items = [(name.replace("_", "-"), value) for name, value in headers.items()]
        self._connection.send(request_bytes("GET", path, items))
        self.head = self._connection.read_head()
        assert self.head.status == 200
        assert self.head["content-type"] == "text/event-stream"
        assert self._connection.read_chunk().startswith(b": upstream unavailable, waiting for it\nretry: ")

    def wait_end(self) -> None:
        while chunk := self._connection.read_chunk():
            assert chunk == b": keep-alive\n\n"
        self._connection.close()


@pytest.mark.parametrize("offset", ["-1", "now"])
def test_a_reader_resumes_at_its_last_event(
    start_server: StartServer, start_edge: StartEdge, offset: str
) -> None:
    server = start_server()
    writer = Writer(server, "resumed")
    writer.append(2)
    http = Wire(start_edge(server.base_url).port)
    url = f"resumed?offset={offset}&live=sse"
    with http.events(url) as events:
        if offset == "-1":
            assert (events.data(), events.last_id) == (b"[0,1]", encode_offset(0, 2))
        assert events.control()["streamNextOffset"] == events.last_id == encode_offset(0, 2)
    writer.append()
    with http.events(url, {"Last-Event-ID": encode_offset(0, 2)}) as events:
        assert events.head["stream-start"] == "last-event-id"
        # The edge may have heard of the append later than the writer did.
        found = eventually(events.next, lambda event: event is None or event[0] == "data")
        assert (found, events.last_id) == (("data", b"[2]"), encode_offset(0, 3))
        assert events.control()["upToDate"] is True
        writer.append()
        assert (events.data(), events.last_id) == (b"[3]", encode_offset(0, 4))
    with http.events(url, {"Last-Event-ID": "foreign"}) as events:
        assert events.head["stream-start"] == "offset"
        assert events.data() == b"[0,1,2,3]" if offset == "-1" else events.control()["upToDate"]
    beyond = http.get(url, {"Last-Event-ID": encode_offset(0, 9)})
    assert (beyond.status, beyond.code) == (400, "offset_beyond_tail")
    http.close()


def test_the_answer_of_an_edge_says_whether_offset_or_since_was_used(
    start_server: StartServer, start_edge: StartEdge
) -> None:
    """Also where it is kept: what was asked for in vain is no part of a slice."""
    server = start_server(env={"TAILRACE_READ_PAGE_ENTRIES": "1"})
    Writer(server, "timed").append(2)
    call = Caller(start_edge(server.base_url))
    since = "since=2020-01-01T00:00:00Z"
    cached(call, f"timed?offset=-1&{since}")
    for live in ("", "&live=long-poll"):
        found = call("GET", f"timed?offset=-1&{since}{live}")
        assert (found.body, found.headers["stream-start"]) == ([0], "offset")
        plain = call("GET", f"timed?offset=-1{live}")
        assert plain.body == [0]
        assert "stream-start" not in plain.headers
    only = call("GET", f"timed?{since}")
    assert (only.headers["x-cache"], only.headers["stream-start"]) == ("BYPASS", "since")


def test_a_known_event_stream_is_held_until_the_server_is_back(
    start_server: StartServer, start_edge: StartEdge
) -> None:
    server = start_server()
    Writer(server, "known").append()
    assert Caller(server)("PUT", "/v1/databases/default/docs/things/one", {"n": 1}).status == 201
    # Without readers a channel is closed at once: it would keep readers that reconnect to it.
    edge = start_edge(server.base_url, edge_linger_ms="1")
    since = "/v1/stream/known?since=2020-01-01T00:00:00Z&live=sse"
    paths = ["/v1/stream/known?offset=now&live=sse", since, "/v1/stream/__registry__?offset=-1&live=sse"]
    paths += [REALTIME, REPLICATION]
    assert {_head(edge, path) for path in paths} == {200}
    eventually(lambda: metrics(edge)["tailrace_edge_channels"], lambda count: count == 0)
    server.stop()
    held = [HeldReader(edge, path) for path in paths]
    assert metrics(edge)['tailrace_edge_clients{mode="held"}'] == len(paths)
    assert _head(edge, "/v1/stream/unknown?offset=now&live=sse") == 503
    assert _head(edge, f"{REALTIME}&where=true") == 503
    held.append(HeldReader(edge, "/v1/stream/unknown?offset=now&live=sse", Last_Event_ID=encode_offset(0, 1)))
    held.append(HeldReader(edge, f"{REALTIME}&where=true", Last_Event_ID="7b7d"))
    assert Caller(edge)("GET", "known?offset=-1&live=long-poll").status == 503
    server.start()
    for reader in held:
        reader.wait_end()
    assert {_head(edge, path) for path in paths} == {200}
    assert _head(edge, "/v1/stream/unknown?offset=now&live=sse", Last_Event_ID=encode_offset(0, 1)) == 404
    assert metrics(edge)['tailrace_edge_clients{mode="held"}'] == 0


def test_a_hold_ends(start_server: StartServer, start_edge: StartEdge) -> None:
    """After its time, so that a balancer may send the reader to another edge, or when the edge stops."""
    server = start_server()
    Writer(server, "short").append()
    path = "/v1/stream/short?offset=now&live=sse"
    brief, long = (start_edge(server.base_url, edge_hold_ms=hold_ms) for hold_ms in ("500", "600000"))
    assert _head(brief, path) == _head(long, path) == 200
    server.kill()
    resumed = {"Last_Event_ID": encode_offset(0, 0)}  # before anything that a channel could continue
    HeldReader(brief, path, **resumed).wait_end()
    waiting = HeldReader(long, path, **resumed)
    long.stop()
    waiting.wait_end()


def test_a_deleted_stream_is_not_known(start_server: StartServer, start_edge: StartEdge) -> None:
    server = start_server()
    Writer(server, "deleted").append()
    edge = start_edge(server.base_url)
    path = "/v1/stream/deleted?offset=now&live=sse"
    assert _head(edge, path) == 200
    assert Caller(edge)("DELETE", "deleted").status == 204
    server.kill()
    assert _head(edge, path) == 503


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_an_upstream_that_cannot_answer_for_now(start_edge: StartEdge, status: int) -> None:
    """As a proxy between the two says it, or a server whose worker is away."""
    refusing = False

    def script(asked: Asked) -> bytes:
        if asked.target == "/readyz":
            return answer(200, body=b'{"deployment":"one"}')
        if asked.target.startswith("/realtime"):
            return answer(status) if refusing else answer(200, {"Content-Type": "text/event-stream"})
        return answer(404)

    with ScriptedOwner(script) as owner:
        edge = start_edge(owner.base_url)
        assert _head(edge, REALTIME) == 200
        refusing = True
        HeldReader(edge, REALTIME).wait_end()
        assert _head(edge, f"{REALTIME}&where=true") == status
