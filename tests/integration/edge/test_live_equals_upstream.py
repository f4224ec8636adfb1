"""What live readers of an edge are told, pair by pair: as by the owner, also when the owner is far away."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.calls import Caller, Reply, eventually
from support.cutting_proxy import CuttingProxy, Hold
from support.edge import CONTENT_TYPES, JSON_TYPE, Asked, EdgeProcess, metrics
from support.live_pairs import LivePairs, Pair
from support.server import ServerProcess
from support.wire import fresh

START = "0" * 26
LIVE = ("sse", "ws")
# Far ahead of every cursor that is handed out: what is given back has to be made for this reader.
FAR_CURSOR = 10**9


@pytest.fixture(scope="module")
def asked() -> Asked:
    return Asked()


@pytest.fixture(scope="module")
def proxy(server: ServerProcess, asked: Asked) -> Iterator[CuttingProxy]:
    with CuttingProxy(server.port, asked) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def edge(proxy: CuttingProxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EdgeProcess]:
    process = EdgeProcess(tmp_path_factory.mktemp("edge") / "cache", proxy.base_url)
    process.start()
    yield process
    process.stop()


def _made(call: Caller, content_type: str = JSON_TYPE) -> str:
    name = fresh("edge-pairs")
    assert call("PUT", name, headers={"Content-Type": content_type}).status == 201
    return name


def _post(call: Caller, name: str, body: object, content_type: str = JSON_TYPE) -> str:
    reply = call("POST", name, body, headers={"Content-Type": content_type})
    assert reply.status == 204
    return reply.headers["stream-next-offset"]


# -- E-5 ----------------------------------------------------------------------------------------------

BODIES: dict[str, list[bytes]] = {
    "application/json": [b'[1,{"two":"\xc3\xbc"}]', b'" three"', b"[[]]"],
    "text/plain": [b" two\nlines\n", b"\n", b"\xff\xfe not text", b" ", "größer".encode()],
    "application/octet-stream": [b"\0", b"\r\n\r\n", bytes(range(256))],
}


@pytest.mark.parametrize("content_type", CONTENT_TYPES)
def test_e5_events_from_a_ring_are_those_of_the_owner(
    server: ServerProcess, edge: EdgeProcess, asked: Asked, content_type: str
) -> None:
    """E-5: an open stream that is written while it is read, and once more as the ring remembers it."""
    owner = Caller(server)
    name = _made(owner, content_type)
    with ExitStack() as stack:

        def reader(port: int, mode: str) -> LivePairs:
            return stack.enter_context(LivePairs(port, name, mode, f"offset={START}"))

        direct = {mode: reader(server.port, mode) for mode in LIVE}
        shared = {mode: reader(edge.port, mode) for mode in LIVE}
        told: dict[str, list[Pair]] = {mode: [] for mode in LIVE}
        for body in (None, *BODIES[content_type]):
            if body is not None:
                _post(owner, name, body, content_type)
            for mode in LIVE:
                told[mode].append(direct[mode].take())
                assert shared[mode].take().lasting == told[mode][-1].lasting, (mode, body)
        for mode in LIVE:
            late = reader(edge.port, mode)
            replayed = [late.take() for _ in BODIES[content_type]]
            assert [pair.data for pair in replayed] == [pair.data for pair in told[mode][1:]]
            assert [pair.next for pair in replayed] == [pair.next for pair in told[mode][1:]]
            assert [pair.up_to_date for pair in replayed] == [False] * (len(replayed) - 1) + [True]
        assert asked.slices(name) == 0, "all of it came from the ring"


@pytest.mark.parametrize("content_type", CONTENT_TYPES)
def test_e5_long_polls_are_answered_as_the_owner_would(
    server: ServerProcess, edge: EdgeProcess, content_type: str
) -> None:
    """E-5: waiting at the tail, and behind it; bytes, tag and what may be kept of it."""
    owner, call = Caller(server), Caller(edge)
    name = _made(owner, content_type)
    tail = owner("HEAD", name).headers["stream-next-offset"]
    offsets = [tail]
    waiting = 'tailrace_edge_clients{mode="long-poll"}'
    with ThreadPoolExecutor(2) as threads:
        for body in BODIES[content_type]:
            target = f"{name}?offset={tail}&live=long-poll"
            waits = [threads.submit(caller, "GET", target) for caller in (owner, call)]
            eventually(lambda: metrics(edge)[waiting], lambda clients: clients == 1)
            _post(owner, name, body, content_type)
            direct, shared = (wait.result() for wait in waits)
            _compare(shared, direct)
            tail = direct.headers["stream-next-offset"]
            offsets.append(tail)
    for offset in ("-1", *offsets[:-1]):
        target = f"{name}?offset={offset}&live=long-poll"
        _compare(call("GET", target), owner("GET", target))
        plain = f"{name}?offset={offset}"
        _compare(call("GET", plain), owner("GET", plain))


def _compare(shared: Reply, direct: Reply) -> None:
    assert (shared.status, shared.raw) == (direct.status, direct.raw)
    for header in (
        "etag",
        "cache-control",
        "content-type",
        "stream-next-offset",
        "stream-end-offset",
        "stream-up-to-date",
        "stream-closed",
    ):
        assert shared.headers.get(header) == direct.headers.get(header), header


# -- E-6 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", LIVE)
def test_e6_cursors_of_live_readers_grow(server: ServerProcess, edge: EdgeProcess, mode: str) -> None:
    """E-6: in every control, from a slice, from the ring, and without any data."""
    owner = Caller(server)
    name = _made(owner)
    tail = _post(owner, name, [1, 2])
    cursor = FAR_CURSOR
    for offset in ("-1", tail, "now"):
        for _ in range(3):
            with LivePairs(edge.port, name, mode, f"offset={offset}&cursor={cursor}") as reader:
                first = reader.take()
                _post(owner, name, [3])
                last = first
                while last.entries != [3] or not last.up_to_date:
                    assert int(last.control["streamCursor"]) > cursor
                    last = reader.take()
                assert int(last.control["streamCursor"]) > cursor
                cursor = int(last.control["streamCursor"])


# -- E-7 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", LIVE)
def test_e7_nobody_is_up_to_date_while_the_owner_is_away(
    server: ServerProcess, tmp_path: Path, mode: str
) -> None:
    """E-7: a ring that is replayed during a loss, what is missing after it, and a replay of all of that."""
    owner = Caller(server)
    name = _made(owner)
    with CuttingProxy(server.port) as proxy:
        edge = EdgeProcess(tmp_path / "edge", proxy.base_url)
        edge.start()
        with LivePairs(edge.port, name, mode) as early:
            assert early.take().up_to_date
            tails = [_post(owner, name, number) for number in range(3)]
            assert early.take_entries(3)[-1].up_to_date
            proxy.shut()
            lost = 'tailrace_edge_reconnects_total{reason="lost"}'
            eventually(lambda: metrics(edge).get(lost, 0), bool)
            tails += [_post(owner, name, number) for number in range(3, 8)]
            with LivePairs(edge.port, name, mode, f"offset={START}") as late:
                replayed = late.take_entries(3)
                assert not any(pair.up_to_date for pair in replayed), "there is more, and nobody here knows"
                proxy.open()
                for reader in (early, late):
                    rest = reader.take_entries(5)
                    assert [entry for pair in rest for entry in pair.entries] == list(range(3, 8))
                    while not rest[-1].up_to_date:
                        rest.append(reader.take())
                    assert [pair.up_to_date for pair in rest] == [pair.next == tails[-1] for pair in rest]
            with LivePairs(edge.port, name, mode, f"offset={START}") as again:
                pairs = again.take_entries(8)
                assert [pair.up_to_date for pair in pairs] == [pair.next == tails[-1] for pair in pairs]
        edge.stop()


# -- E-8 ----------------------------------------------------------------------------------------------


def test_e8_now_is_not_where_a_channel_is_that_was_held_back(
    server: ServerProcess, proxy: CuttingProxy, edge: EdgeProcess, asked: Asked
) -> None:
    """E-8: what was acknowledged is still on its way to the edge; readers from now never see it."""
    owner, call = Caller(server), Caller(edge)
    name = _made(owner)
    mark = f"held-back-{name}"
    hold = Hold("answer", mark.encode())
    with LivePairs(edge.port, name, "sse") as early, ThreadPoolExecutor(1) as threads, ExitStack() as stack:
        assert early.take().up_to_date
        proxy.before = hold
        try:
            tail = _post(owner, name, mark)
            hold.wait_reached()
            readers = [stack.enter_context(LivePairs(edge.port, name, mode, "offset=now")) for mode in LIVE]
            for reader in readers:
                first = reader.take()
                assert (first.data, first.next) == (None, tail)
            poll = threads.submit(call, "GET", f"{name}?offset=now&live=long-poll")
            # From here on it knows where now was.
            eventually(lambda: asked.reads(name, f"?offset={tail}&live="), bool)
            after = _post(owner, name, "after")
            for reader in readers:
                pair = reader.take_entries(1)[0]
                assert (pair.entries, pair.next) == (["after"], after)
        finally:
            hold.let_go()
        caught_up = early.take_entries(2)
        assert [entry for pair in caught_up for entry in pair.entries] == [mark, "after"]
        answer = poll.result()
        assert (answer.body, answer.headers["stream-next-offset"]) == (["after"], after)
        # Nothing is written, and yet all of them come to share the socket that has arrived at last.
        private = "tailrace_edge_private_sockets"
        eventually(lambda: metrics(edge)[private], lambda sockets: sockets == 0)
        last = _post(owner, name, "shared")
        for reader in (early, *readers):
            pair = reader.take_entries(1)[0]
            assert (pair.entries, pair.next) == (["shared"], last)
