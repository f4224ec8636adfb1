"""What an edge keeps, what it never keeps, and who notices."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.calls import Caller, eventually
from support.cutting_proxy import CuttingProxy, Hold
from support.edge import Asked, EdgeProcess, cached, metrics, upstream_sockets
from support.live_pairs import LivePairs
from support.server import ServerProcess
from support.wire import fresh
from tailrace.protocol.offsets import encode_offset

PAGE = {"TAILRACE_READ_PAGE_ENTRIES": "2"}
JSON = {"Content-Type": "application/json"}
START = "0" * 26
RECENT_S = 0.1
KEPT = 'tailrace_edge_cache_bytes{tier="memory"}'


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
    time.sleep(RECENT_S)
    assert edge("GET", last).body == [4, 5], "what was read a moment ago is given again for no longer"
    assert edge("GET", f"{name}?offset={tail}").body == [5]


def test_e11_what_may_not_be_kept_is_nowhere(
    server: ServerProcess, start_edge: Start, tmp_path: Path
) -> None:
    """E-11: answers from now, heads, live answers, empty ones, refusals and open tails."""
    directory = tmp_path / "slices"
    process = start_edge("--cache-dir", str(directory))
    edge, owner = Caller(process), Caller(server)
    name = _made(owner, "never", 1)
    tail = owner("HEAD", name).headers["stream-next-offset"]
    for _ in range(2):
        for target, status in (
            (name, 200),
            (f"{name}?offset=now", 200),
            (f"{name}?offset={tail}", 200),
            (f"{name}?offset=-1&live=long-poll", 200),
            (f"{name}?offset={tail}&live=long-poll&timeout_ms=20", 204),
            (f"{name}?offset=now&live=long-poll&timeout_ms=20", 204),
            (f"{name}?offset={encode_offset(0, 9)}", 400),
            (f"{name}/none", 404),
        ):
            assert edge("GET", target).status == status, target
        assert edge("HEAD", name).status == 200
        with LivePairs(process.port, name, "sse") as reader:
            assert reader.take().entries == [0]
    lasting = _made(owner, "lasting")
    cached(edge, lasting)
    files = eventually(lambda: _slices(directory), lambda found: len(found) >= 2)
    assert all(lasting.encode() in path.read_bytes() for path in files)
    assert edge("DELETE", lasting).status == 204
    assert metrics(process)[KEPT] == 0


def test_e10_spellings_share_one_slice_and_other_reads_do_not(
    server: ServerProcess, start_edge: Start, asked: Asked
) -> None:
    """E-10: order and spelling of parameters, unknown ones, offsets, names and keys."""
    owner = Caller(server)
    name = fresh("spelling")
    owner("PUT", name, headers=JSON)
    for number in range(9):
        owner("POST", name, number, headers={"Stream-Key": "ab"[number % 2]})
    spelled = name.replace("spelling", "%73pelling")
    second, alias = encode_offset(0, 2), "0000000000000000_0000000000000002"
    groups = {
        b"[0,1]": (
            f"{name}?offset=-1",
            name,
            f"{name}?offset={START}",
            f"{spelled}?x=1&cursor=5&offset=-1&timeout_ms=7",
        ),
        b"[2,3]": (
            f"{name}?x=1&offset={second}&y=2",
            f"{name}?offset={second.lower()}",
            f"{spelled}?cursor=5&offset={alias}&timeout=1s",
        ),
        b"[2,4]": (
            f"{name}/pk/a?offset={alias}",
            f"{name}?key=a&offset={second}",
            f"{name}?offset={second.lower()}&key=a",
            f"{spelled}/pk/%61?offset={second}&zzz=1",
        ),
        b"[3,5]": (f"{name}?key=b&offset={second}", f"{name}/pk/b?offset={alias}&key=b"),
        b"23": (f"{name}?offset={second}&format=raw", f"{name}?format=raw&offset={alias}&format_=json"),
        b"[3,4]": (f"{name}?offset={encode_offset(0, 3)}", f"{name}?offset=0000000000000000_{3:016}"),
    }
    # Started last: the registry tells an edge of a new stream, and what was kept of its name is dropped.
    _check_shared(start_edge(), asked, name, groups)


def test_e10_reads_with_filters_of_their_own_do_not_share(
    server: ServerProcess, start_edge: Start, asked: Asked
) -> None:
    """E-10: nor do such with none."""
    owner = Caller(server)
    name = fresh("filtered")
    owner("PUT", name, headers=JSON)
    field = {
        "kind": "integer",
        "bindings": [{"version": 1, "jsonPointer": "/n"}],
        "exact": True,
        "column": True,
    }
    search = {"fields": {"n": field}}
    assert owner("POST", f"{name}/_schema", {"schema": {}, "search": search}).status == 200
    owner("POST", name, [{"n": number} for number in range(9)])
    groups = {
        b'[{"n": 0},{"n": 1}]': (f"{name}?offset=-1", name),
        b'[{"n": 2},{"n": 3}]': (f"{name}?filter=n:>=2", f"{name}?x=1&offset=-1&filter=n%3A%3E%3D2"),
        b'[{"n": 5},{"n": 6}]': (f"{name}?offset=-1&filter=n:>=5", f"{name}?filter=n:>=5&x=1"),
    }
    _check_shared(start_edge(TAILRACE_EDGE_RECENT_MS="60000"), asked, name, groups)


def _check_shared(
    process: EdgeProcess, asked: Asked, name: str, groups: dict[bytes, tuple[str, ...]]
) -> None:
    """Of each group one read goes to the owner, and its answer is that of all of them."""
    edge = Caller(process)
    for number, (body, (first, *others)) in enumerate(groups.items(), 1):
        before = metrics(process)[KEPT]
        missed = edge("GET", first)
        assert (missed.raw, missed.headers["x-cache"]) == (body, "MISS")
        if "immutable" in missed.headers["cache-control"]:  # else it is there as a recent read
            eventually(lambda: metrics(process)[KEPT], lambda size: size > before)  # noqa: B023
        for target in (first, *others):
            reply = edge("GET", target)
            assert (reply.raw, reply.headers["x-cache"]) == (body, "HIT"), target
            assert reply.headers["etag"] == missed.headers["etag"]
        assert asked.reads(name) == number, body


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


def test_e9_a_read_that_is_under_way_is_not_shared_after_a_write(
    server: ServerProcess, tmp_path: Path
) -> None:
    """E-9: asked for before the write, answered after; who has seen the acknowledgement reads anew."""
    hold = Hold("answer", b"[0]")
    with CuttingProxy(server.port) as proxy, ThreadPoolExecutor(1) as threads:
        process = EdgeProcess(tmp_path / "edge", proxy.base_url, env={"TAILRACE_EDGE_RECENT_MS": "60000"})
        process.start()
        edge = Caller(process)
        name = _made(edge, "crossed", 1)
        proxy.before = hold
        try:
            early = threads.submit(edge, "GET", name)
            hold.wait_reached()
            tail = edge("POST", name, [1]).headers["stream-next-offset"]
            assert edge("GET", name).body == [0, 1]
        finally:
            hold.let_go()
        assert early.result().body == [0]
        for _ in range(3):
            reply = edge("GET", name)
            assert (reply.body, reply.headers["stream-next-offset"]) == ([0, 1], tail)
        process.stop()


def test_e9_who_wants_no_cache_is_never_behind(server: ServerProcess, tmp_path: Path) -> None:
    """E-9: written through one edge, read through another, which has an answer and is getting one."""
    hold = Hold("answer", b"[0]")
    recent = {"TAILRACE_EDGE_RECENT_MS": "60000"}
    with CuttingProxy(server.port) as proxy, ThreadPoolExecutor(1) as threads:
        first = EdgeProcess(tmp_path / "first", server.base_url, env=recent)
        second = EdgeProcess(tmp_path / "second", proxy.base_url, env=recent)
        for process in (first, second):
            process.start()
        writes, reads = Caller(first), Caller(second)
        name = _made(writes, "elsewhere", 1)
        assert cached(reads, name).body == [0]
        proxy.before = hold
        try:
            other = f"{name}?offset={START}"
            early = threads.submit(reads, "GET", other)
            hold.wait_reached()
            writes("POST", name, [1])
            for target in (name, other):
                for control in ("no-cache", "no-store", "max-age=0, No-Cache"):
                    reply = reads("GET", target, headers={"Cache-Control": control})
                    assert (reply.body, reply.headers["x-cache"]) == ([0, 1], "BYPASS")
        finally:
            hold.let_go()
        assert early.result().body == [0]
        for process in (first, second):
            process.stop()


@pytest.fixture
def told_edge(server: ServerProcess, start_edge: Start) -> EdgeProcess:
    """An edge that follows the registry, and would notice for itself only when the test is long over."""
    _made(Caller(server), "registered")
    edge = start_edge(TAILRACE_EDGE_CONFIRM_MS="600000")
    eventually(lambda: upstream_sockets(server), bool)
    return edge


def test_e13_what_was_deleted_is_not_served(server: ServerProcess, told_edge: EdgeProcess) -> None:
    """E-13: deleted through this edge, where the very next read knows, and behind its back."""
    edge, owner = Caller(told_edge), Caller(server)
    for deletes in (edge, owner):
        name = _made(edge, "deleted")
        assert cached(edge, name).body == [0, 1]
        assert deletes("DELETE", name).status == 204
        if deletes is owner:
            eventually(lambda: edge("GET", name).status, lambda status: status == 404)  # noqa: B023
        assert edge("GET", name).status == 404
        assert deletes("PUT", name, [7, 8, 9], headers=JSON).status == 201
        assert edge("GET", name).raw == b"[7,8]", "nothing that is not there is kept"
        assert cached(edge, name).body == [7, 8]
        # Deleted and made again before anybody looks.
        assert deletes("DELETE", name).status == 204
        assert deletes("PUT", name, [5, 6, 7], headers=JSON).status == 201
        if deletes is owner:
            eventually(lambda: edge("GET", name).raw, lambda raw: raw != b"[7,8]")  # noqa: B023
        assert edge("GET", name).raw == b"[5,6]"
        assert cached(edge, name).body == [5, 6]


def test_e13_a_source_that_is_gone_for_all_but_its_forks_is_not_served(
    server: ServerProcess, told_edge: EdgeProcess
) -> None:
    """E-13: its entries live on in the forks, and are no longer its own."""
    edge, owner = Caller(told_edge), Caller(server)
    for deletes in (edge, owner):
        name = _made(edge, "source")
        forked = {"Stream-Forked-From": f"/v1/stream/{name}"}
        assert owner("PUT", f"{name}/fork", headers=forked).status == 201
        assert cached(edge, name).body == [0, 1]
        assert cached(edge, f"{name}/fork").body == [0, 1]
        assert deletes("DELETE", name).status == 204
        if deletes is owner:
            eventually(lambda: edge("GET", name).status, lambda status: status == 410)  # noqa: B023
        assert edge("GET", name).status == 410
        assert edge("GET", f"{name}/fork").body == [0, 1]


def test_e13_an_answer_that_was_on_its_way_is_not_kept(server: ServerProcess, tmp_path: Path) -> None:
    """E-13: asked for before the stream was deleted and made anew, and arrived after."""
    hold = Hold("answer", b"[0,1]")
    args = ("--cache-dir", str(tmp_path / "slices"))
    with CuttingProxy(server.port) as proxy, ThreadPoolExecutor(1) as threads:
        process = EdgeProcess(tmp_path / "edge", proxy.base_url, args=args)
        process.start()
        edge = Caller(process)
        name = _made(edge, "flight")
        proxy.before = hold
        early = threads.submit(edge, "GET", name)
        hold.wait_reached()
        assert edge("DELETE", name).status == 204
        assert edge("GET", name).status == 404, "it does not wait for the answer that is under way"
        assert edge("PUT", name, [7, 8, 9], headers=JSON).status == 201
        hold.let_go()
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
