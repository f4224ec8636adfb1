"""What answers tell an edge, and for whom they are."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jwt
import pytest

from support.calls import Caller, eventually
from support.cutting_proxy import CuttingProxy, Direction
from support.edge import Asked, EdgeProcess, cached, metrics
from support.ports import KeptPort
from support.server import ServerProcess
from support.wire import fresh
from tailrace.auth import create_token

SECRET = "a secret that is long enough for tokens"
JSON = {"Content-Type": "application/json"}
NO_CACHE = {"Cache-Control": "no-cache"}
MINUTE = {"TAILRACE_EDGE_RECENT_MS": "60000", "TAILRACE_EDGE_CONFIRM_MS": "60000"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    env = {
        "TAILRACE_READ_PAGE_ENTRIES": "2",
        "TAILRACE_OTLP_TRACES_STREAM": "spans",
        "TAILRACE_OTLP_AUTO_CREATE": "true",
    }
    process = ServerProcess(tmp_path_factory.mktemp("server") / "data", env=env).start()
    yield process
    process.stop()


class NoRegistry:
    """A proxy's decision that keeps an edge from following `__registry__`: it has to see for itself."""

    def __call__(self, direction: Direction, piece: bytes) -> bool:
        return direction == "request" and b"/v1/stream/__registry__" in piece


@pytest.fixture(scope="module")
def edge(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EdgeProcess]:
    with CuttingProxy(server.port, NoRegistry()) as proxy:
        process = EdgeProcess(tmp_path_factory.mktemp("edge") / "cwd", proxy.base_url, env=MINUTE)
        process.start()
        yield process
        process.stop()


@pytest.mark.parametrize(
    ("method", "body", "headers"),
    [("POST", [4], {}), ("GET", None, NO_CACHE), ("HEAD", None, {})],
)
def test_any_answer_that_a_stream_is_gone_drops_what_is_kept_of_it(
    server: ServerProcess, edge: EdgeProcess, method: str, body: list[int] | None, headers: dict[str, str]
) -> None:
    """E-13: the stream was deleted behind the edge's back, and the edge hears of it by the way."""
    owner, call, name = Caller(server), Caller(edge), fresh("gone")
    assert owner("PUT", name, [1, 2, 3], headers=JSON).status == 201
    assert cached(call, f"{name}?offset=-1").body == [1, 2]
    assert owner("DELETE", name).status == 204
    assert call(method, name, body, headers=headers).status in (404, 410)
    assert call("GET", f"{name}?offset=-1").status in (404, 410)


@pytest.mark.parametrize(("method", "body", "headers"), [("POST", [8], {}), ("GET", None, NO_CACHE)])
def test_any_answer_of_a_new_epoch_drops_what_is_kept(
    server: ServerProcess, edge: EdgeProcess, method: str, body: list[int] | None, headers: dict[str, str]
) -> None:
    """E-13: deleted and made again by others; the new stream has a higher epoch."""
    owner, call, name = Caller(server), Caller(edge), fresh("again")
    assert owner("PUT", name, [1, 2, 3], headers=JSON).status == 201
    assert cached(call, f"{name}?offset=-1").body == [1, 2]
    assert owner("DELETE", name).status == 204
    assert owner("PUT", name, [5, 6, 7], headers=JSON).status == 201
    assert call(method, name, body, headers=headers).status in (200, 204)
    assert call("GET", f"{name}?offset=-1").body == [5, 6]


@pytest.mark.parametrize(("first", "then"), [("", "&format=json"), ("&format=json", "")])
def test_e10_a_form_that_is_what_no_form_means_is_the_same_slice(
    server: ServerProcess, edge: EdgeProcess, first: str, then: str
) -> None:
    """E-10; and the other form never is, nor is JSON what a stream of text gives unasked."""
    call, owner, name, text = Caller(edge), Caller(server), fresh("forms"), fresh("forms")
    assert call("PUT", name, [1, 2, 3], headers=JSON).status == 201
    kept = cached(call, f"{name}?offset=-1{first}")
    again = call("GET", f"{name}?offset=-1{then}")
    assert (again.headers["x-cache"], again.raw) == ("HIT", kept.raw)
    raw = cached(call, f"{name}?offset=-1&format=raw")
    assert raw.raw == owner("GET", f"{name}?offset=-1&format=raw").raw != kept.raw
    closed = {"Content-Type": "text/plain", "Stream-Closed": "true"}
    assert call("PUT", text, b"a", headers=closed).status == 201
    assert cached(call, f"{text}?offset=-1").raw == b"a"
    asked = [caller("GET", f"{text}?offset=-1&format=json") for caller in (call, owner)]
    assert asked[0].status == asked[1].status == 400


SPANS = {
    "resourceSpans": [
        {
            "scopeSpans": [
                {
                    "spans": [
                        {
                            "traceId": "0123456789abcdef0123456789abcdef",
                            "spanId": "0123456789abcdef",
                            "name": "a span",
                            "startTimeUnixNano": "1700000000000000000",
                            "endTimeUnixNano": "1700000000000000001",
                        }
                    ]
                }
            ]
        }
    ]
}


@pytest.mark.parametrize("route", ["/v1/traces", "/v1/stream/spans/_otlp/v1/traces"])
def test_e9_spans_are_read_at_once_through_the_same_edge(edge: EdgeProcess, route: str) -> None:
    """E-9: they are appended to a stream, though not by a POST to it."""
    call = Caller(edge)
    assert call("POST", "/v1/traces", SPANS).status == 200
    tail = call("HEAD", "spans").headers["stream-next-offset"]
    assert call("GET", f"spans?offset={tail}").body == []
    recent = call("GET", f"spans?offset={tail}")
    assert recent.headers["x-cache"] == "HIT", "an answer of a moment ago"
    assert call("POST", route, SPANS).status == 200
    assert len(call("GET", f"spans?offset={tail}").body) == 1


def test_a_refusal_of_one_identity_is_not_given_to_another(tmp_path: Path) -> None:
    """The one who asked first has asked too often; the others wait for the same answer."""
    env = {
        "TAILRACE_AUTH_JWT_SECRET": SECRET,
        "TAILRACE_IDENTITY_OPS_PER_S": "1",
        "TAILRACE_EDGE_RECENT_MS": "0",
    }
    token = {sub: create_token(SECRET, sub=sub, scopes=["manage"]) for sub in ("greedy", "modest", "owner")}
    server = ServerProcess(tmp_path / "server" / "data", env=env).start()
    asked = Asked()
    with CuttingProxy(server.port, asked) as proxy:
        edge = EdgeProcess(tmp_path / "edge" / "cwd", proxy.base_url, env=env)
        edge.start()
        assert Caller(server, token["owner"])("PUT", "shared", [1], headers=JSON).status == 201
        greedy = Caller(server, token["greedy"])
        assert [greedy("GET", "shared").status for _ in range(4)][-1] == 429
        server.signal(signal.SIGSTOP)
        try:
            with ThreadPoolExecutor(2) as threads:
                first = threads.submit(Caller(edge, token["greedy"]), "GET", "shared?offset=-1")
                eventually(lambda: asked.reads("shared"), lambda reads: reads == 1)
                second = threads.submit(Caller(edge, token["modest"]), "GET", "shared?offset=-1")
                coalesced = "tailrace_edge_coalesced_total"
                eventually(lambda: metrics(edge, token["owner"])[coalesced], lambda joined: joined == 1)
                server.signal(signal.SIGCONT)
                assert first.result().status == 429
                assert second.result().status == 200
        finally:
            server.signal(signal.SIGCONT)
            edge.stop()
            server.stop()


def test_a_bad_token_goes_nowhere_and_an_unknown_one_to_the_owner(tmp_path: Path) -> None:
    """E-19: on every route. What the edge cannot read is the owner's to judge."""
    env = {"TAILRACE_AUTH_JWT_SECRET": SECRET}
    server = ServerProcess(tmp_path / "server" / "data", env=env).start()
    passed: list[bytes] = []

    def note(direction: Direction, piece: bytes) -> bool:
        if direction == "request":
            passed.append(piece.split(b"\r\n")[0])
        return False

    routes = (
        "/v1/streams",
        "/v1/databases",
        "/hub/shards",
        "a/_schema",
        "__ds/subscriptions/s",
    )
    forged = jwt.encode(
        {"sub": "x", "scope": "manage"}, "another secret that is long enough", algorithm="HS256"
    )
    with CuttingProxy(server.port, note) as proxy:
        edge = EdgeProcess(tmp_path / "edge" / "cwd", proxy.base_url, env=env)
        edge.start()
        for route in routes:
            refused = Caller(edge, forged)("GET", route)
            assert (refused.status, refused.code) == (401, "unauthorized"), route
            assert not any(route.encode() in line for line in passed), route
        for route in routes[:3]:
            assert Caller(edge, "trk_0123456789abcdef_" + "x" * 43)("GET", route).status == 401
            assert any(route.encode() in line for line in passed), route
        assert Caller(edge, forged)("GET", "/openapi.json").status == 200, "nobody is asked who they are"
        good = create_token(SECRET, sub="x", scopes=["manage"])
        assert Caller(edge, good)("GET", "/v1/streams").status == 200
        edge.stop()
    server.stop()


def test_edges_that_lead_to_each_other_are_seen_by_every_read(tmp_path: Path) -> None:
    """The way that a request came is told also by those that are asked for many clients at once."""
    ports = [KeptPort(), KeptPort()]
    edges = [
        EdgeProcess(tmp_path / str(number) / "cwd", f"http://127.0.0.1:{ports[1 - number].number}")
        for number in range(2)
    ]
    for edge, port in zip(edges, ports, strict=True):
        edge.port = port.number
        edge.start(ready=False)
    try:
        for edge in edges:
            eventually(lambda edge=edge: edge.status("/healthz"), lambda status: status == 200)
        call = Caller(edges[0])
        for path in ("a?offset=-1", "a?offset=-1&live=long-poll", "a?offset=now&live=sse"):
            assert call("GET", path).status == 500, path
        assert any("proxy loop detected" in edge.log for edge in edges)
    finally:
        for edge in edges:
            edge.kill()
