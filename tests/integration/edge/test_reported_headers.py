"""What an edge says about itself and about its clients is true."""

from __future__ import annotations

import gzip
import json
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from websockets.sync.client import connect

from support.calls import Caller, Reply, eventually
from support.cutting_proxy import CuttingProxy, Direction
from support.edge import EdgeProcess, metrics
from support.live_pairs import LivePairs
from support.server import ServerProcess
from support.wire import Wire, fresh, request_bytes
from tailrace.auth import create_token

KEY = "a key that the edge and its server have in common"
ENV = {"TAILRACE_EDGE_SIGNING_KEY": KEY, "TAILRACE_READ_PAGE_ENTRIES": "2"}
JSON = {"Content-Type": "application/json"}
_REQUEST = re.compile(rb"(GET|HEAD|PUT|POST|DELETE) /v1/stream/(?!__registry__)([^ ]*) HTTP/1.1\r\n")


class Heard:
    """Requests for streams that went to the server, the look at the registry apart."""

    def __init__(self) -> None:
        self.text = b""

    def __call__(self, direction: Direction, piece: bytes) -> bool:
        if direction == "request":
            self.text += piece
        return False

    def total(self, name: str) -> int:
        plain = self.count("GET", name) + self.count("HEAD", name)
        return plain + self.count("GET", name, live=True)

    def count(self, method: str, name: str, *, live: bool = False) -> int:
        found = [(verb.decode(), target.decode()) for verb, target in _REQUEST.findall(self.text)]
        return sum(
            verb == method and target.partition("?")[0] == name and ("live=ws" in target) is live
            for verb, target in found
        )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    args = ["--server-timing", "--log-requests", "all", "--log-format", "json"]
    process = ServerProcess(tmp_path_factory.mktemp("server") / "data", args=args, env=ENV).start()
    yield process
    process.stop()


@pytest.fixture(scope="module")
def heard() -> Heard:
    return Heard()


@pytest.fixture(scope="module")
def edge(
    server: ServerProcess, heard: Heard, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EdgeProcess]:
    with CuttingProxy(server.port, heard) as proxy:
        directory = tmp_path_factory.mktemp("edge") / "cache"
        process = EdgeProcess(directory, proxy.base_url, args=["--server-timing"], env=ENV)
        process.start()
        yield process
        process.stop()


def _made(call: Caller, entries: int = 5) -> str:
    name = fresh("edge-truth")
    assert call("PUT", name, headers=JSON).status == 201
    assert call("POST", name, list(range(entries))).status == 204
    return name


def _phases(reply: Reply) -> list[str]:
    return [part.partition(";dur=")[0] for part in reply.headers["server-timing"].split(", ")]


def test_e25_x_cache_counts_what_the_server_was_asked(
    server: ServerProcess, edge: EdgeProcess, heard: Heard
) -> None:
    """E-25: requests at the server are those that were not hits, and the edge's own looks."""
    owner, call = Caller(server), Caller(edge)
    name = _made(owner)
    told: list[str] = []
    before = metrics(edge)["tailrace_edge_coalesced_total"]

    def read(target: str, **headers: str) -> None:
        sent = {field.replace("_", "-"): value for field, value in headers.items()}
        told.append(call("GET", target, headers=sent).headers["x-cache"])

    eventually(lambda: read(name), lambda _: told[-1] == "HIT")
    for _ in range(3):
        read(name)
        read(f"{name}?offset=now")
        read(f"{name}?offset=0000000000000000_0000000000000004")
        read(name, Cache_Control="no-cache")
        read(name, If_None_Match="*")
    joined = metrics(edge)["tailrace_edge_coalesced_total"] - before
    assert joined == 0, "one reader at a time joins nobody"
    assert heard.count("GET", name) == told.count("MISS") + told.count("BYPASS")
    assert told.count("HIT") > 0
    own_looks = heard.count("HEAD", name)
    assert call("HEAD", name).headers["x-cache"] == "BYPASS"
    assert heard.count("HEAD", name) == own_looks + 1
    waited = call("GET", f"{name}?offset=-1&live=long-poll")
    assert waited.headers["x-cache"] == "MISS"
    assert heard.count("GET", name, live=True) == 1, "the shared socket"


def test_e25_live_readers_and_heads_are_told_the_truth(
    server: ServerProcess, edge: EdgeProcess, heard: Heard
) -> None:
    """E-25: a hit asks the server for nothing; all that is not a hit does."""
    owner, call = Caller(server), Caller(edge)
    name = _made(owner)
    tail = owner("HEAD", name).headers["stream-next-offset"]
    told: list[tuple[str, str | None, int]] = []

    def note(what: str, read: Callable[[], str | None]) -> None:
        before = heard.total(name)
        outcome = read()
        told.append((what, outcome, heard.total(name) - before))

    def live(mode: str, offset: str) -> str | None:
        with LivePairs(edge.port, name, mode, f"offset={offset}") as reader:
            while not reader.take().up_to_date:
                pass
        return reader.cache

    def poll(offset: str) -> str:
        return call("GET", f"{name}?offset={offset}&live=long-poll&timeout_ms=50").headers["x-cache"]

    note("first", lambda: live("sse", tail))
    for _ in range(2):
        for mode in ("sse", "ws"):
            note("tail", lambda mode=mode: live(mode, tail))
            note("now", lambda mode=mode: live(mode, "now"))
        note("tail", lambda: poll(tail))
        note("now", lambda: poll("now"))
        note("behind", lambda: poll("0000000000000000_0000000000000003"))
        note("head", lambda: call("HEAD", name).headers["x-cache"])
        note("missing", lambda: call("HEAD", f"{name}/none").headers["x-cache"])
    assert told[0] == ("first", "MISS", 2), "a look, and the shared socket"
    expected = {"tail": ("HIT", 0), "now": ("MISS", 1), "behind": ("MISS", 1), "head": ("BYPASS", 1)}
    for what, outcome, asked in told[1:]:
        assert what == "missing" or (outcome, asked) == expected[what], told
        assert what != "missing" or outcome == "BYPASS"
    assert heard.count("GET", name, live=True) == 1, "one socket for all of them"
    # The rest of the ring's readers: what is not in it is read in slices first.
    note("slices", lambda: live("sse", "0000000000000000_0000000000000003"))
    assert told[-1] == ("slices", "MISS", 1)
    tail = owner("POST", name, [5]).headers["stream-next-offset"]
    with LivePairs(edge.port, name, "ws", f"offset={tail}") as reader:
        assert reader.take().up_to_date
    note("replayed", lambda: live("sse", "0000000000000000_0000000000000005"))
    assert told[-1] == ("replayed", "HIT", 0)


def test_e20_the_server_is_told_for_whom_the_edge_asks(server: ServerProcess, edge: EdgeProcess) -> None:
    """E-20: the client's own address reaches the server's log; what clients say of themselves does not."""
    name = _made(Caller(server))
    forged = "v1;id=evil;t=1;ip=203.0.113.9;sub=root;sig=AAAA"
    headers = {"Tailrace-Edge": forged, "X-Forwarded-For": "203.0.113.9", "Cache-Control": "no-cache"}
    for port in (edge.port, server.port):
        with socket.create_connection(("127.0.0.1", port), 30, ("127.0.0.2", 0)) as client:
            client.sendall(request_bytes("GET", f"/v1/stream/{name}", {**headers, "Connection": "close"}))
            while client.recv(65536):
                pass
    lines = eventually(
        lambda: [json.loads(line) for line in server.log.splitlines() if name in line and '"GET"' in line],
        lambda found: len(found) == 2,
    )
    through, direct = lines
    assert through["client"] == "127.0.0.2"
    assert through["peer"].startswith("127.0.0.1:")
    assert len(through["edge"]) == 8
    assert direct["peer"].startswith("127.0.0.2:")
    assert "client" not in direct
    assert "203.0.113.9" not in server.log


def test_every_part_of_an_answer_is_timed(server: ServerProcess, edge: EdgeProcess) -> None:
    call = Caller(edge)
    name = _made(Caller(server))
    asked = ["edge-queue", "edge-upstream", "edge-total"]
    assert _phases(call("POST", name, [5])) == ["edge-auth", *asked, "commit", "total"]
    missed = call("GET", name)
    assert missed.headers["x-cache"] == "MISS"
    assert _phases(missed)[:5] == ["edge-auth", "edge-cache", *asked]
    assert _phases(missed)[-1] == "total"
    hit = eventually(lambda: call("GET", name), lambda reply: reply.headers["x-cache"] == "HIT")
    assert _phases(hit) == ["edge-auth", "edge-cache", "edge-total"]
    tail = call("HEAD", name).headers["stream-next-offset"]
    idle = call("GET", f"{name}?offset={tail}&live=long-poll&timeout_ms=50")
    assert idle.status == 204
    assert _phases(idle) == ["edge-auth", "edge-wait", "edge-total"]


def test_a_tail_that_has_not_changed_is_not_sent_again(
    server: ServerProcess, heard: Heard, tmp_path: Path
) -> None:
    """Asked for with its tag; a write, and closing alone, bring the new answer (E-11, E-12)."""
    with CuttingProxy(server.port, heard) as proxy:
        edge = EdgeProcess(tmp_path / "cache", proxy.base_url, env={"TAILRACE_EDGE_RECENT_MS": "0"})
        edge.start()
        try:
            owner, call = Caller(server), Caller(edge)
            name = _made(owner, 1)
            first = call("GET", name)
            told = "tailrace_edge_revalidated_total"
            again = eventually(lambda: call("GET", name), lambda _: metrics(edge)[told] == 1)
            assert again.headers["x-cache"] == "MISS"
            for header in ("etag", "content-type", "stream-next-offset", "stream-end-offset"):
                assert again.headers[header] == first.headers[header]
            assert again.raw == first.raw == b"[0]"
            owner("POST", name, [1])
            assert call("GET", name).body == [0, 1]
            assert owner("POST", name, headers={"Stream-Closed": "true"}).status == 204
            closed = call("GET", name)
            assert closed.headers["stream-closed"] == "true"
            assert metrics(edge)[told] == 1
            owner("DELETE", name)
            assert owner("PUT", name, [7], headers=JSON).status == 201
            assert eventually(lambda: call("GET", name).body, lambda body: body == [7])
        finally:
            edge.stop()


def test_text_is_compressed_on_the_way_out(server: ServerProcess, edge: EdgeProcess) -> None:
    """Kept as it is: one slice serves those who want it compressed and those who do not."""
    owner = Caller(server)
    name = fresh("edge-packed")
    assert owner("PUT", name, headers=JSON).status == 201
    for _ in range(3):
        assert owner("POST", name, {"text": "over and over " * 500}).status == 204
    wire = Wire(edge.port)
    try:
        plain = eventually(lambda: wire.get(name), lambda answer: answer["x-cache"] == "HIT")
        assert plain["vary"] == "Accept-Encoding"
        assert "content-encoding" not in plain
        for _ in range(2):
            packed = eventually(
                lambda: wire.get(name, {"Accept-Encoding": "br, gzip"}),
                lambda answer: answer["x-cache"] == "HIT",
            )
            assert packed["content-encoding"] == "gzip"
            assert len(packed.body) < len(plain.body) / 10
            assert gzip.decompress(packed.body) == plain.body
            assert packed["etag"] == plain["etag"]
        same = wire.get(name, {"Accept-Encoding": "gzip", "If-None-Match": plain["etag"]})
        assert (same.status, same.get("content-encoding")) == (304, None)
        short = wire.get(f"{name}?key=nobody", {"Accept-Encoding": "gzip"})
        assert "content-encoding" not in short
    finally:
        wire.close()


def test_e7_up_to_date_is_only_who_has_everything(server: ServerProcess, edge: EdgeProcess) -> None:
    """E-7: pages of two; no control before the last one says it, from wherever a reader begins."""
    name = _made(Caller(server), 7)
    tail = Caller(server)("HEAD", name).headers["stream-next-offset"]
    for entry in range(7):
        offset = f"0000000000000000_{entry:016}"
        url = f"ws://127.0.0.1:{edge.port}/v1/stream/{name}?offset={offset}&live=ws"
        with connect(url, proxy=None) as reader:
            seen: list[int] = []
            control = {"upToDate": False}
            while not control["upToDate"]:
                message = json.loads(reader.recv(timeout=30))
                if message["type"] == "data":
                    seen += json.loads(message["payload"])
                else:
                    control = message
                    assert control["upToDate"] is (control["streamNextOffset"] == tail)
            assert seen == list(range(entry, 7))


def test_clients_without_a_token_are_counted_each_for_itself(tmp_path: Path) -> None:
    """E-20: by their own addresses, although all of them come through one edge."""
    secret = "a secret that is long enough for tokens"
    env = {**ENV, "TAILRACE_AUTH_JWT_SECRET": secret, "TAILRACE_AUTH_PUBLIC_STREAMS": "open/"}
    server = ServerProcess(tmp_path / "data", env={**env, "TAILRACE_IDENTITY_OPS_PER_S": "1"}).start()
    edge = EdgeProcess(tmp_path / "cache", server.base_url, env=env)
    edge.start()

    def read(address: str) -> int:
        with socket.create_connection(("127.0.0.1", edge.port), 30, (address, 0)) as client:
            head = {"Cache-Control": "no-cache", "Connection": "close"}
            client.sendall(request_bytes("GET", "/v1/stream/open/one", head))
            return int(client.recv(64).split(b" ")[1])

    try:
        token = create_token(secret, sub="maker", scopes=["write"])
        assert Caller(server, token)("PUT", "open/one", headers=JSON).status == 201
        assert read("127.0.0.2") == 200
        eventually(lambda: read("127.0.0.2"), lambda status: status == 429)
        assert read("127.0.0.3") == 200
    finally:
        edge.stop()
        server.stop()
