"""Upstreams that are lost in worse ways than by a cut: silent ones, refusing ones, and doors that are out."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable

import pytest
from websockets.asyncio.client import ClientConnection, connect

from conftest import StartServer
from support.calls import Caller, eventually
from support.cutting_proxy import CuttingProxy, Direction
from support.edge import EdgeProcess, Follower, StartEdge, Writer, all_live, metrics
from support.scripted_owner import Asked, ScriptedOwner, answer, opened
from support.wire import Connection, request_bytes
from tailrace.protocol import offsets

JSON = {"Content-Type": "application/json"}


class Silence:
    """Keeps what passes a proxy, be it all or only some of it, until it is over."""

    def __init__(self, proxy: CuttingProxy, applies: Callable[[Direction, bytes], bool]) -> None:
        self._over = threading.Event()
        self._applies = applies
        proxy.before = self._wait

    def _wait(self, direction: Direction, piece: bytes) -> None:
        if self._applies(direction, piece):
            self._over.wait()

    def end(self) -> None:
        self._over.set()


def _all(_direction: Direction, _piece: bytes) -> bool:
    return True


def _follow(edge: EdgeProcess, name: str, offset: str, more: str = "") -> connect:
    return connect(f"ws://127.0.0.1:{edge.port}/v1/stream/{name}?offset={offset}&live=ws{more}", proxy=None)


async def _code_of(socket: ClientConnection) -> int | None:
    async with asyncio.timeout(30):
        await socket.wait_closed()
    return socket.close_code


TAIL = offsets.encode_offset(0, 1)
HEAD = {"Content-Type": "application/json", "Stream-Next-Offset": TAIL}
CONTROL = {"type": "control", "streamNextOffset": TAIL, "streamCursor": "1", "upToDate": True}
READY = answer(200, body=b'{"deployment":"one"}')


def test_a_handshake_that_is_not_answered_ends(start_edge: StartEdge) -> None:
    """Whoever waits for it gets 503, and the next reader does not wait for the same thing."""
    over, handshakes = threading.Event(), list[Asked]()

    def script(asked: Asked) -> bytes:
        if asked.target == "/readyz":
            return READY
        if not asked.is_socket:
            return answer(404 if "__registry__" in asked.target else 200, HEAD)
        handshakes.append(asked)
        if len(handshakes) == 1:
            over.wait()
        return opened(asked, json.dumps(CONTROL).encode())

    with ScriptedOwner(script) as owner:
        edge = start_edge(owner.base_url, edge_answer_ms="300")
        assert Caller(edge)("GET", f"held?offset={TAIL}&live=long-poll").status == 503
        with Connection(edge.port) as reader:
            reader.send(request_bytes("GET", f"/v1/stream/held?offset={TAIL}&live=sse"))
            assert reader.read_head().status == 200
            assert b'"upToDate":true' in reader.read_chunk()
        over.set()


def test_e17_readers_are_let_go_in_time_whatever_the_owner_is_asked(
    start_server: StartServer, start_edge: StartEdge
) -> None:
    """E-17: an owner that takes connections and says nothing is waited for as long as one that is away."""
    server = start_server()
    Writer(server, "mute").append()
    with CuttingProxy(server.port) as proxy:
        edge = start_edge(proxy.base_url, edge_hold_ms="500", edge_answer_ms="600000")

        async def watch() -> int | None:
            async with _follow(edge, "mute", "now") as socket:
                assert json.loads(await socket.recv())["upToDate"] is True
                silence = Silence(proxy, _all)
                await asyncio.to_thread(proxy.cut_all)
                code = await _code_of(socket)
                silence.end()
                return code

        assert asyncio.run(watch()) == 1013


@pytest.mark.parametrize("reopening", ["refused", "sent away"])
def test_an_owner_that_refuses_is_asked_less_and_less(start_edge: StartEdge, reopening: str) -> None:
    """Be it that it answers 503, or that it opens every socket and closes it at once, with 1001."""
    followed = threading.Event()

    def script(asked: Asked) -> bytes:
        if asked.target == "/readyz":
            return READY
        if "__registry__" in asked.target:
            return opened(asked, close=1000) if asked.is_socket else answer(200, HEAD)
        if asked.is_socket:
            first = not followed.is_set()
            followed.set()
            close = 1001 if first or reopening == "sent away" else None
            return opened(asked, json.dumps(CONTROL).encode(), close=close)
        return answer(503 if followed.is_set() and reopening == "refused" else 200, HEAD)

    async def watch(edge: EdgeProcess, owner: ScriptedOwner) -> None:
        async with _follow(edge, "refused", TAIL):
            checks = owner.counts["GET /readyz"] + 2
            await asyncio.to_thread(eventually, lambda: owner.counts["GET /readyz"], lambda n: n >= checks)

    with ScriptedOwner(script) as owner:
        asyncio.run(watch(start_edge(owner.base_url), owner))
        assert 2 <= owner.counts["HEAD /v1/stream/refused"] <= 20
        assert 2 <= owner.counts["GET /v1/stream/__registry__"] <= 20


def test_e21_what_goes_through_a_door_that_is_out_goes_through_another(
    start_server: StartServer, start_edge: StartEdge
) -> None:
    """E-21: a door that takes connections and says nothing keeps no reader once it is seen to be out."""
    server = start_server()
    writer = Writer(server, "doors")
    with CuttingProxy(server.port) as one, CuttingProxy(server.port) as two:
        used: list[CuttingProxy] = []
        for door in (one, two):

            def note(_direction: Direction, piece: bytes, door: CuttingProxy = door) -> bool:
                if piece.startswith(b"GET /v1/stream/doors?live=ws"):
                    used.append(door)
                return False

            door.decide = note
        edge = start_edge(one.base_url, two.base_url, mode="any", edge_answer_ms="200")
        followers = [Follower(edge.port, "doors", mode) for mode in ("sse", "ws")]

        def doors_well() -> float:
            """Each read that is not answered counts against the door that it went through."""
            Caller(edge)("GET", "doors?offset=-1")
            return sum(
                well
                for name, well in metrics(edge).items()
                if name.startswith("tailrace_edge_upstream_healthy")
            )

        async def watch() -> None:
            tasks = [asyncio.ensure_future(follower.run()) for follower in followers]
            await all_live(followers)
            silence = Silence(used[0], _all)
            await asyncio.to_thread(eventually, doors_well, lambda count: count == 1)
            for _ in range(3):
                await asyncio.to_thread(writer.append)
            await asyncio.to_thread(writer.close)
            async with asyncio.timeout(30):
                await asyncio.gather(*tasks)
            silence.end()

        asyncio.run(watch())
        assert used[0] is not used[-1]
    assert all(follower.entries == list(range(writer.count)) for follower in followers)
    assert {follower.connections for follower in followers} == {1}


def test_readers_that_catch_up_are_kept_as_those_at_the_tail_are(
    start_server: StartServer, start_edge: StartEdge
) -> None:
    """Their server is out in the middle of their slices: they are let go when their time is over."""
    servers = [start_server(env={"TAILRACE_READ_PAGE_ENTRIES": "1"}) for _ in range(2)]
    with CuttingProxy(servers[0].port) as one, CuttingProxy(servers[1].port) as two:
        edge = start_edge(one.base_url, two.base_url, mode="sharded", edge_hold_ms="2500")
        writer = Writer(edge, "behind")
        for _ in range(3):
            writer.append()
        home = one if Caller(servers[0])("HEAD", "behind").status == 200 else two
        seen: list[bytes] = []

        def cut_from_the_second_slice_on(direction: Direction, piece: bytes) -> bool:
            if direction == "request" and piece.startswith(b"GET /v1/stream/behind?offset"):
                seen.append(piece)
            return len(seen) > 1

        async def watch() -> int | None:
            home.decide = cut_from_the_second_slice_on
            async with _follow(edge, "behind", "-1") as socket:
                return await _code_of(socket)

        assert asyncio.run(watch()) == 1013
        eventually(lambda: metrics(edge)["tailrace_edge_ready"], lambda ready: ready == 0)


def test_readers_that_catch_up_outlast_refusals_that_pass(start_edge: StartEdge) -> None:
    """A server that answers 503 in the middle of their slices is asked again."""
    start, tail = offsets.encode_offset(0, 0), offsets.encode_offset(0, 2)
    slices = {
        start: answer(200, {**HEAD, "Cache-Control": "no-store", "ETag": '"a"'}, b"[1]"),
        TAIL: answer(200, {**HEAD, "Stream-Next-Offset": tail, "Cache-Control": "no-store"}, b"[2]"),
    }
    refusals = iter([answer(503), answer(429)])

    def script(asked: Asked) -> bytes:
        if asked.target == "/readyz":
            return READY
        if asked.is_socket:
            control = {**CONTROL, "streamNextOffset": tail}
            return opened(asked, json.dumps(control).encode())
        if asked.method == "HEAD":
            return answer(
                404 if "__registry__" in asked.target else 200, {**HEAD, "Stream-Next-Offset": tail}
            )
        offset = asked.target.partition("offset=")[2]
        return slices[offset] if offset == start else next(refusals, slices[offset])

    async def watch(edge: EdgeProcess) -> list[str]:
        found: list[str] = []
        async with asyncio.timeout(30), _follow(edge, "passing", start) as socket:
            while len(found) < 2:
                message = json.loads(await socket.recv())
                found += [message["payload"]] if message["type"] == "data" else []
        return found

    with ScriptedOwner(script) as owner:
        assert asyncio.run(watch(start_edge(owner.base_url))) == ["[1]", "[2]"]


def test_e13_an_old_deletion_does_not_end_the_readers_of_a_new_stream(
    start_server: StartServer, start_edge: StartEdge
) -> None:
    """What the registry tells late may be of a stream that had the name before."""
    server = start_server()
    call = Caller(server)
    call("PUT", "again", [1], headers=JSON)
    with CuttingProxy(server.port) as proxy:
        edge = start_edge(proxy.base_url)
        silence = Silence(proxy, lambda way, piece: way == "answer" and b'"operation":"delete"' in piece)
        eventually(
            lambda: metrics(server)['tailrace_live_connections{mode="ws"}'], lambda sockets: sockets == 1
        )
        dropped = 'tailrace_edge_cache_invalidations_total{reason="registry"}'

        async def watch() -> int | None:
            for method in ("DELETE", "PUT"):
                await asyncio.to_thread(call, method, "again", headers=JSON)
            async with _follow(edge, "again", "-1") as socket:
                assert json.loads(await socket.recv())["upToDate"] is True
                silence.end()
                await asyncio.to_thread(
                    eventually, lambda: metrics(edge).get(dropped, 0), lambda count: count >= 2
                )
                await asyncio.to_thread(call, "POST", "again", [2])
                async with asyncio.timeout(30):
                    assert json.loads(json.loads(await socket.recv())["payload"]) == [2]
                await asyncio.to_thread(call, "DELETE", "again")
                return await _code_of(socket)

        assert asyncio.run(watch()) == 4404


def test_e7_who_caught_up_while_the_owner_was_lost_is_told_when_it_is_back(
    start_server: StartServer, start_edge: StartEdge
) -> None:
    """From the ring, without a word on whether that is all; it is said as soon as the owner says so."""
    server = start_server()
    call = Caller(server)
    call("PUT", "quiet", headers=JSON)
    start = call("POST", "quiet", [1]).headers["stream-next-offset"]
    with CuttingProxy(server.port) as proxy:
        edge = start_edge(proxy.base_url)
        lost = 'tailrace_edge_reconnects_total{reason="lost"}'

        async def watch() -> list[bool]:
            async with _follow(edge, "quiet", "now") as first:
                await first.recv()
                await asyncio.to_thread(call, "POST", "quiet", [2])
                assert json.loads(await first.recv())["type"] == "data"
                silence = Silence(proxy, _all)
                await asyncio.to_thread(proxy.cut_all)
                await asyncio.to_thread(eventually, lambda: lost in metrics(edge), bool)
                async with _follow(edge, "quiet", start) as second:
                    said: list[bool] = []
                    async with asyncio.timeout(30):
                        while True not in said:
                            message = json.loads(await second.recv())
                            if message["type"] == "control":
                                said.append(message["upToDate"])
                                silence.end()
                    return said

        assert asyncio.run(watch()) == [False, True]
        observed = metrics(edge)["tailrace_edge_delivery_seconds_count"]
        assert observed == metrics(edge)["tailrace_edge_batches_total"] == 1, "a control is no delivery"
