"""What an edge keeps of streams that end, or lose their oldest entries, by themselves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from support.calls import Caller, eventually
from support.cutting_proxy import CuttingProxy
from support.edge import Asked, EdgeProcess, Follower, all_live, cached, metrics
from support.retention import ENTRY_BYTES, wait_trimmed
from support.sealing import SEALING_ENV
from support.server import ServerProcess
from support.wire import Wire, fresh
from tailrace.auth import create_token
from tailrace.protocol.offsets import encode_offset

JSON = {"Content-Type": "application/json"}
PAGE = {"TAILRACE_READ_PAGE_ENTRIES": "2"}
WINDOW_S = 6
RENEWED = 'tailrace_edge_ttl_renewals_total{outcome="renewed"}'
LOST = 'tailrace_edge_ttl_renewals_total{outcome="lost"}'
START = "0" * 26

Start = Callable[..., EdgeProcess]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("server") / "data"
    process = ServerProcess(directory, env={**SEALING_ENV, **PAGE}).start()
    yield process
    process.stop()


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def start_edge(server: ServerProcess, tmp_path: Path, asked: Asked) -> Iterator[Start]:
    edges: list[EdgeProcess] = []

    with CuttingProxy(server.port, asked) as proxy:

        def start(*args: str, **env: str) -> EdgeProcess:
            edge = EdgeProcess(tmp_path / f"edge-{len(edges)}", proxy.base_url, args=args, env=env)
            edges.append(edge)
            edge.start()
            return edge

        yield start
        for edge in edges:
            if edge.running:
                edge.stop()


def _made(call: Caller, **headers: str) -> str:
    name = fresh("ending")
    lifetime = {header.replace("_", "-"): value for header, value in headers.items()}
    assert call("PUT", name, headers={**JSON, **lifetime}).status == 201
    assert call("POST", name, list(range(5))).status == 204
    return name


def test_e16_a_stream_that_is_read_only_here_lives_on_and_dies_after_the_last_read(
    server: ServerProcess, start_edge: Start, asked: Asked
) -> None:
    """E-16: hits and 304s renew it, once in a quarter of its window; after its end there is no hit."""
    process = start_edge()
    edge, owner = Caller(process), Caller(server)
    name = _made(owner, Stream_TTL=str(WINDOW_S))
    begun = time.monotonic()
    tag = cached(edge, name).headers["etag"]
    hits = 0
    while time.monotonic() < begun + 2.5 * WINDOW_S:
        for headers, status in (({}, 200), ({"If-None-Match": tag}, 304)):
            reply = edge("GET", name, headers=headers)
            assert reply.status == status
            hits += reply.headers["x-cache"] == "HIT"
        time.sleep(0.05)
    read_s = time.monotonic() - begun
    renewals = asked.renewals(name)
    assert 1 <= renewals <= read_s / (WINDOW_S / 4) + 1
    # Besides, each answer is asked for anew when its max-age is over.
    assert asked.reads(name) - renewals < hits / 4
    while owner("HEAD", name).status == 200:
        time.sleep(0.05)
    assert asked.renewals(name) <= renewals + 1, "nobody has read it since"
    assert metrics(process)[RENEWED] == asked.renewals(name)
    gone = edge("GET", name)
    assert (gone.status, gone.headers["x-cache"]) == (404, "MISS")


def test_e16_a_live_reader_renews_by_being_there(
    server: ServerProcess, start_edge: Start, asked: Asked
) -> None:
    """E-16: an open channel is a live reader at the owner."""
    process = start_edge()
    edge = Caller(process)
    name = _made(Caller(server), Stream_TTL="4")

    def read_for_a_while() -> None:
        begun = time.monotonic()
        while time.monotonic() < begun + 6:
            assert edge("GET", name).status == 200
            time.sleep(0.05)
        assert asked.renewals(name) == 0
        assert edge("POST", name, headers={"Stream-Closed": "true"}).status == 204

    async def watch() -> None:
        follower = Follower(process.port, name, "sse")
        following = asyncio.create_task(follower.run())
        await all_live([follower])
        await asyncio.to_thread(read_for_a_while)
        await following

    asyncio.run(watch())


@pytest.mark.parametrize("window", ["1", "3"])
def test_e16_what_ends_too_soon_to_be_renewed_is_not_kept(
    server: ServerProcess, start_edge: Start, window: str
) -> None:
    edge = Caller(start_edge())
    name = _made(Caller(server), Stream_TTL=window)
    for target in (name, f"{name}?offset={encode_offset(0, 4)}") * 4:
        assert edge("GET", target).headers["x-cache"] == "MISS"


def test_e16_nothing_is_served_after_a_fixed_end(server: ServerProcess, start_edge: Start) -> None:
    edge, owner = Caller(start_edge()), Caller(server)
    ends = datetime.now(UTC) + timedelta(seconds=6)
    name = _made(owner, Stream_Expires_At=ends.isoformat())
    cached(edge, name)
    hits = 0
    while True:
        before = owner("HEAD", name).status
        reply = edge("GET", name)
        assert before == 200 or (reply.status, reply.headers["x-cache"]) == (404, "MISS")
        if reply.status == 404:
            break
        hits += reply.headers["x-cache"] == "HIT"
        time.sleep(0.02)
    assert hits


def test_e16_an_owner_that_is_away_is_not_spoken_for_longer_than_the_window(
    tmp_path: Path,
) -> None:
    server = ServerProcess(tmp_path / "data", env=PAGE).start()
    edge = EdgeProcess(tmp_path / "edge", server.base_url, env={"TAILRACE_EDGE_CONFIRM_MS": "600000"})
    edge.start()
    try:
        call = Caller(edge)
        name, lasting = _made(call, Stream_TTL="4"), _made(call)
        cached(call, lasting)
        cached(call, name)
        server.kill()
        eventually(lambda: call("GET", name).status, lambda status: status == 503)
        assert metrics(edge)[LOST] >= 1
        assert call("GET", lasting).headers["x-cache"] == "HIT"
    finally:
        edge.stop()


def test_e16_what_is_due_is_sent_before_an_edge_stops(
    server: ServerProcess, start_edge: Start, asked: Asked
) -> None:
    process = start_edge()
    name = _made(Caller(server), Stream_TTL="3600")
    cached(Caller(process), name)
    process.stop()
    assert asked.renewals(name) == 1


def test_e16_renewals_carry_the_token_of_a_reader(tmp_path: Path) -> None:
    secret = "a secret that is long enough for tokens"
    env = {"TAILRACE_AUTH_JWT_SECRET": secret, **PAGE}
    server = ServerProcess(tmp_path / "data", env=env).start()
    edge = EdgeProcess(tmp_path / "edge", server.base_url, env=env)
    edge.start()
    try:
        token = create_token(secret, sub="somebody", scopes=["manage"])
        call = Caller(edge, token)
        name = _made(call, Stream_TTL="4")

        def renewed() -> float:
            assert call("GET", name).status == 200
            return metrics(edge, token).get(RENEWED, 0)

        eventually(renewed, lambda renewals: renewals >= 2)
    finally:
        edge.stop()
        server.stop()


# -- retention -----------------------------------------------------------------------------------------


def test_e14_trimmed_entries_are_not_served_and_the_others_are(
    server: ServerProcess, start_edge: Start, tmp_path: Path
) -> None:
    """E-14, for streams whose start moves: from memory, and from disk after a restart."""
    directory = tmp_path / "slices"
    process = start_edge("--cache-dir", str(directory), TAILRACE_EDGE_CONFIRM_MS="100")
    edge, owner = Caller(process), Caller(server)
    name = fresh("trimmed")
    bound = {"Content-Type": "text/plain", "Stream-Retention-Bytes": str(10 * ENTRY_BYTES)}
    assert owner("PUT", name, headers=bound).status == 201
    text = {"Content-Type": "text/plain"}
    for number in range(8):
        assert owner("POST", name, b"%04d" % number, headers=text).status == 204
    late = f"{name}?offset={encode_offset(0, 6)}"
    assert cached(edge, f"{name}?offset={START}").raw == b"00000001"
    for _ in range(3):
        first = edge("GET", name)
        assert (first.raw, first.headers["x-cache"]) == (b"00000001", "MISS"), "where it begins moves"
    for number in range(8, 14):
        assert owner("POST", name, b"%04d" % number, headers=text).status == 204
    assert cached(edge, late).raw == b"00060007"
    wire = Wire(server.port)
    gone = wait_trimmed(wire, server.data_dir, name, 14)
    wire.close()
    for _ in range(2):
        answer = eventually(lambda: edge("GET", f"{name}?offset={START}"), lambda reply: reply.status == 410)
        assert answer.headers["stream-earliest-offset"] == encode_offset(0, gone)
        assert edge("GET", name).raw == owner("GET", name).raw
        kept, direct = cached(edge, late), owner("GET", late)
        assert kept.raw == direct.raw
        for header in ("etag", "cache-control", "stream-earliest-offset", "stream-end-offset"):
            assert kept.headers[header] == direct.headers[header]
        process.restart()


def test_e11_what_has_an_end_is_not_on_disk(server: ServerProcess, start_edge: Start, tmp_path: Path) -> None:
    """E-11."""
    directory = tmp_path / "slices"
    edge = Caller(start_edge("--cache-dir", str(directory)))
    bounds = ({"Stream_TTL": "3600"}, {"Stream_Retention": "1h"})
    for bound in bounds:
        name = _made(Caller(server), **bound)
        assert "immutable" not in cached(edge, f"{name}?offset={START}").headers["cache-control"]
    lasting = _made(Caller(server))
    cached(edge, lasting)
    files = eventually(lambda: list(directory.glob("??/*")), lambda found: len(found) >= 2)
    assert all(lasting.encode() in path.read_bytes() for path in files)
