"""What an edge keeps, what it never keeps, and who notices."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.calls import Caller, eventually
from support.cutting_proxy import CuttingProxy, Direction
from support.edge import Asked, EdgeProcess, cached, metrics
from support.server import ServerProcess
from support.wire import fresh

PAGE = {"TAILRACE_READ_PAGE_ENTRIES": "2"}
JSON = {"Content-Type": "application/json"}
START = "0" * 26


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path_factory.mktemp("server") / "data", env=PAGE).start()
    yield process
    process.stop()


Start = Callable[..., EdgeProcess]


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def start_edge(server: ServerProcess, tmp_path: Path, asked: Asked) -> Iterator[Start]:
    edges: list[EdgeProcess] = []
    proxy = CuttingProxy(server.port, asked)

    def start(*args: str, **env: str) -> EdgeProcess:
        edge = EdgeProcess(tmp_path / f"edge-{len(edges)}", proxy.base_url, args=args, env=env)
        edges.append(edge)
        edge.start()
        return edge

    with proxy:
        yield start
        for edge in edges:
            if edge.running:
                edge.stop()


def _made(call: Caller, kind: str, entries: int = 5, headers: dict[str, str] | None = None) -> str:
    name = fresh(kind)
    assert call("PUT", name, headers={**JSON, **(headers or {})}).status == 201
    assert call("POST", name, list(range(entries))).status == 204
    return name


def test_e11_e12_immutable_slices_are_kept_and_tails_are_not(
    server: ServerProcess, start_edge: Start
) -> None:
    """E-5, E-11, E-12."""
    edge, owner = Caller(start_edge()), Caller(server)
    name = _made(owner, "kept")
    direct = owner("GET", name)
    first = edge("GET", name)
    assert first.headers["x-cache"] == "MISS"
    hit = cached(edge, name)
    assert hit.raw == first.raw == direct.raw
    for header in ("etag", "cache-control", "stream-next-offset", "stream-end-offset", "content-type"):
        assert hit.headers[header] == direct.headers[header]
    assert int(hit.headers["age"]) >= 0
    # On a busy machine the answer of a moment ago may be too old by now, and the next one is kept again.
    matched = eventually(
        lambda: edge("GET", name, headers={"If-None-Match": direct.headers["etag"]}),
        lambda answer: answer.headers["x-cache"] == "HIT",
    )
    assert (matched.status, matched.raw) == (304, b"")
    assert edge("GET", name, headers={"Cache-Control": "no-cache"}).headers["x-cache"] == "BYPASS"
    tail = direct.headers["stream-end-offset"]
    last = f"{name}?offset=0000000000000000_0000000000000004"
    assert edge("GET", last).body == [4]
    owner("POST", name, [5])
    assert eventually(lambda: edge("GET", last).body, lambda body: body == [4, 5])
    assert edge("GET", f"{name}?offset={tail}").body == [5]


def test_e10_spellings_share_one_slice_and_other_reads_do_not(
    server: ServerProcess, start_edge: Start, asked: Asked
) -> None:
    """E-10."""
    edge, owner = Caller(start_edge()), Caller(server)
    name = fresh("spelling")
    owner("PUT", name, headers=JSON)
    for number in range(5):
        owner("POST", name, number, headers={"Stream-Key": "ab"[number % 2]})
    assert cached(edge, f"{name}?offset={START}").body == [0, 1]
    before = asked.reads(name)
    spellings = (
        "",
        "?offset=-1",
        "?offset=0000000000000000_0000000000000000",
        f"?x=1&cursor=5&offset={START}",
    )
    for spelling in spellings[2:]:
        assert edge("GET", name + spelling).headers["x-cache"] == "HIT"
    assert asked.reads(name) == before
    for spelling in spellings[:2]:
        assert cached(edge, name + spelling).body == [0, 1]
    assert edge("GET", f"{name}?key=a").body == edge("GET", f"{name}/pk/a").body == [0, 2]
    assert edge("GET", f"{name}?format=raw").raw == b"01"


def test_equal_reads_at_once_are_one_request(server: ServerProcess, start_edge: Start, asked: Asked) -> None:
    process = start_edge(TAILRACE_EDGE_RECENT_MS="0")
    edge = Caller(process)
    name = _made(Caller(server), "together", 1)
    before = asked.reads(name)
    # While the owner stands still, all of them are under way.
    server.signal(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(20) as threads:
            answers = [threads.submit(edge, "GET", name) for _ in range(20)]
            eventually(lambda: metrics(process)["tailrace_edge_coalesced_total"], lambda joined: joined == 19)
            server.signal(signal.SIGCONT)
            assert all(answer.result().body == [0] for answer in answers)
    finally:
        server.signal(signal.SIGCONT)
    assert asked.reads(name) == before + 1


def test_e9_a_write_is_read_at_once_through_the_same_edge(start_edge: Start) -> None:
    """E-9."""
    edge = Caller(start_edge(TAILRACE_EDGE_RECENT_MS="60000"))
    name = fresh("written")
    edge("PUT", name, headers=JSON)
    for number in range(20):
        tail = edge("POST", name, number).headers["stream-next-offset"]
        before = f"0000000000000000_{number:016}"
        for _ in range(3):
            read = edge("GET", f"{name}?offset={before}")
            assert (read.body, read.headers["stream-next-offset"]) == ([number], tail)
    recent = edge("GET", f"{name}?offset=0000000000000000_{19:016}")
    assert recent.headers["x-cache"] == "HIT", "nothing was written since"


def test_e13_what_was_deleted_is_not_served(server: ServerProcess, start_edge: Start) -> None:
    """E-13: deleted through this edge, and behind its back."""
    edge, owner = Caller(start_edge()), Caller(server)
    for deletes in (edge, owner):
        name = _made(edge, "deleted")
        assert cached(edge, name).body == [0, 1]
        assert deletes("DELETE", name).status == 204
        if deletes is edge:
            assert edge("GET", name).status == 404
        eventually(lambda: edge("GET", name).status, lambda status: status == 404)  # noqa: B023
        assert deletes("PUT", name, [7, 8, 9], headers=JSON).status == 201
        eventually(lambda: edge("GET", name).raw, lambda raw: raw == b"[7,8]")  # noqa: B023
        assert cached(edge, name).body == [7, 8]


def test_e13_a_source_that_is_gone_for_all_but_its_forks_is_not_served(
    server: ServerProcess, start_edge: Start
) -> None:
    """E-13: its entries live on in the forks, and are no longer its own."""
    edge, owner = Caller(start_edge()), Caller(server)
    for deletes in (edge, owner):
        name = _made(edge, "source")
        forked = {"Stream-Forked-From": f"/v1/stream/{name}"}
        assert owner("PUT", f"{name}/fork", headers=forked).status == 201
        assert cached(edge, name).body == [0, 1]
        assert cached(edge, f"{name}/fork").body == [0, 1]
        assert deletes("DELETE", name).status == 204
        if deletes is edge:
            assert edge("GET", name).status == 410
        eventually(lambda: edge("GET", name).status, lambda status: status == 410)  # noqa: B023
        assert edge("GET", f"{name}/fork").body == [0, 1]


def test_e13_an_answer_that_was_on_its_way_is_not_kept(server: ServerProcess, tmp_path: Path) -> None:
    """E-13: asked for before the stream was deleted and made anew, and arrived after."""
    held, gate = threading.Event(), threading.Event()

    def hold(direction: Direction, piece: bytes) -> None:
        if direction == "answer" and piece.endswith(b"[0,1]") and not held.is_set():
            held.set()
            assert gate.wait(60)

    args = ("--cache-dir", str(tmp_path / "slices"))
    with CuttingProxy(server.port) as proxy, ThreadPoolExecutor(1) as threads:
        process = EdgeProcess(tmp_path / "edge", proxy.base_url, args=args)
        process.start()
        edge = Caller(process)
        name = _made(edge, "flight")
        proxy.before = hold
        early = threads.submit(edge, "GET", name)
        assert held.wait(60)
        assert edge("DELETE", name).status == 204
        assert edge("GET", name).status == 404, "it does not wait for the answer that is under way"
        assert edge("PUT", name, [7, 8, 9], headers=JSON).status == 201
        gate.set()
        assert early.result().body == [0, 1]
        for _ in range(3):
            assert edge("GET", name).raw == b"[7,8]"
        assert cached(edge, name).body == [7, 8]
        process.restart(kill=True)
        assert edge("GET", name).raw == b"[7,8]"
        process.stop()


def _slices(directory: Path) -> list[Path]:
    return [path for path in directory.glob("??/*") if len(path.name) == 64]


def test_e15_the_disk_cache_survives_its_edge_and_is_checked(
    server: ServerProcess, start_edge: Start, asked: Asked, tmp_path: Path
) -> None:
    """E-15."""
    directory = tmp_path / "slices"
    process = start_edge("--cache-dir", str(directory), TAILRACE_EDGE_MEMORY_CACHE_BYTES="0")
    edge, owner = Caller(process), Caller(server)
    name = _made(owner, "disk")
    assert cached(edge, name).body == [0, 1]
    second = EdgeProcess(tmp_path / "second", server.base_url, args=["--cache-dir", str(directory)])
    second.start(ready=False)
    assert second.wait_exit() == 1
    assert "another edge uses the cache directory" in second.log
    process.restart(kill=True)
    before = asked.reads(name)
    assert cached(edge, name).body == [0, 1]
    assert asked.reads(name) == before
    for path in _slices(directory):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(bytes(data))
    assert edge("GET", name).body == [0, 1], "a damaged file is not there"
    assert cached(edge, name).body == [0, 1]
    owner("DELETE", name)
    owner("PUT", name, [5, 6, 7], headers=JSON)
    process.restart(kill=True)
    assert eventually(lambda: edge("GET", name).raw, lambda raw: raw != b"").startswith(b"[5")


def test_the_disk_cache_keeps_its_bound(start_edge: Start, tmp_path: Path, server: ServerProcess) -> None:
    directory = tmp_path / "slices"
    process = start_edge("--cache-dir", str(directory), TAILRACE_EDGE_DISK_CACHE_BYTES="4000")
    edge = Caller(process)
    for _ in range(10):
        name = _made(Caller(server), "bound")
        assert cached(edge, name).body == [0, 1]
    evicted = eventually(
        lambda: metrics(process).get('tailrace_edge_cache_evictions_total{tier="disk"}', 0),
        lambda evictions: evictions > 0,
    )
    assert evicted
    assert metrics(process)['tailrace_edge_cache_bytes{tier="disk"}'] <= 4000
    eventually(lambda: sum(path.stat().st_size for path in _slices(directory)), lambda size: size <= 4000)


def test_e14_answers_do_not_depend_on_the_cache(
    server: ServerProcess, start_edge: Start, tmp_path: Path
) -> None:
    """E-14: none, some, too little, and one whose files are deleted while it is used."""
    directory = tmp_path / "slices"
    edges = [
        start_edge(TAILRACE_EDGE_MEMORY_CACHE_BYTES="0"),
        start_edge(),
        start_edge(TAILRACE_EDGE_MEMORY_CACHE_BYTES="3000"),
        start_edge("--cache-dir", str(directory), TAILRACE_EDGE_MEMORY_CACHE_BYTES="0"),
    ]
    owner = Caller(server)
    name = _made(owner, "whichever", 9)
    targets = [f"{name}?offset=0000000000000000_{entry:016}" for entry in range(9)]
    expected = [owner("GET", target) for target in targets]
    headers = ("etag", "cache-control", "stream-next-offset", "stream-end-offset")
    for _ in range(3):
        for path in _slices(directory):
            path.unlink(missing_ok=True)
        for edge in edges:
            for target, direct in zip(targets, expected, strict=True):
                reply = Caller(edge)("GET", target)
                assert reply.raw == direct.raw
                assert [reply.headers[header] for header in headers] == [
                    direct.headers[header] for header in headers
                ]
