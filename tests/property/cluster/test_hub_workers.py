"""H-41: the same program of clients has the same results with one, two and four workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.calls import Caller
from support.hub_client import Actor, Frame, now_ms
from support.server import ServerProcess

WORKERS = (1, 2, 4)
ACTORS = range(3)
LISTED_MAX = 1000
# Whether a rate is kept depends on how quick a server is, which is not what is compared here.
UNHURRIED = {"TAILRACE_HUB_BROADCASTS_PER_S": "1000"}
_programs = count()

actor = st.sampled_from(ACTORS)
topic = st.sampled_from(["news", "news/local", "other"])
step = st.one_of(
    st.tuples(st.just("register"), actor),
    st.tuples(st.just("unregister"), actor),
    st.tuples(st.just("come back"), actor),
    st.tuples(st.just("discover"), actor),
    st.tuples(st.just("list"), actor),
    st.tuples(st.just("broadcast"), actor),
    st.tuples(st.just("ask"), actor, actor),
    st.tuples(st.just("post"), actor, actor),
    st.tuples(st.just("send"), actor, actor),
    st.tuples(st.just("publish"), actor, topic),
    st.tuples(st.just("subscribe"), actor, st.sampled_from(["news", "news/#", "+"])),
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    directory = tmp_path_factory.mktemp("hubs")
    with ExitStack() as running:
        started: list[ServerProcess] = []
        for workers in WORKERS:
            args = ("--workers", str(workers))
            process = ServerProcess(directory / f"of-{workers}", args=args, env=UNHURRIED)
            started.append(process.start())
            running.callback(process.stop)
        yield started


class Play:
    """One program on one server. Addresses and topics are its own."""

    def __init__(self, server: ServerProcess, number: int, opened: ExitStack) -> None:
        self._server = server
        self._call = Caller(server)
        self._prefix = f"p{number}"
        self._opened = opened
        self._actors = [self._connect(index) for index in ACTORS]
        self._said = count()

    def _address(self, index: int) -> str:
        return f"@({self._prefix}/{index})"

    def _connect(self, index: int) -> Actor:
        made = Actor(self._server, self._address(index))
        self._opened.callback(made.close)
        return made

    def run(self, program: list[tuple[Any, ...]]) -> list[Any]:
        """What everybody was told at each step."""
        seen: list[Any] = []
        for kind, index, *rest in program:
            seen.append(self._step(kind, index, rest))
            seen.append([[self._shown(frame) for frame in one.quiet()] for one in self._actors])
        return seen

    def _step(self, kind: str, index: int, rest: list[Any]) -> Any:
        one = self._actors[index]
        if kind == "register":
            return self._shown(one.ask("hub:register", {"actorAddress": one.address, "capabilities": ["x"]}))
        if kind == "unregister":
            return self._shown(one.ask("hub:unregister", {"actorAddress": one.address}))
        if kind == "come back":
            left = one.ask("hub:disconnect")["type"]
            self._actors[index] = self._connect(index)
            return left
        if kind == "discover":
            found = one.ask("hub:discover", {"pattern": f"@({self._prefix}/*)"})
            return self._seen(found)
        if kind == "list":
            return self._seen(one.ask("hub:list_actors", {"limit": LISTED_MAX}))
        data = next(self._said)
        if kind == "broadcast":
            message = {"type": "told", "data": data, "pattern": f"@({self._prefix}/*)"}
            return self._shown(one.ask("hub:broadcast", message))
        if kind == "ask":
            return self._ask(one, rest[0] if rest[0] != index else (index + 1) % len(ACTORS), data)
        if kind == "post":
            return self._post(one, rest[0], data)
        if kind == "send":
            message = {"to": self._address(rest[0]), "type": "said", "data": data, "ack": "accepted"}
            return self._shown(one.ask("hub:send", message))
        topic = f"{self._prefix}/{rest[0]}"
        if kind == "publish":
            return self._shown(one.ask("hub:publish", {"topic": topic, "type": "told", "data": data}))
        return self._shown(one.ask("hub:subscribe", {"topic": topic}))

    def _seen(self, found: Frame) -> list[tuple[str, bool]]:
        """Of the actors of this program; others may be leaving."""
        actors = found["payload"]["actors"]
        assert not found["payload"]["hasMore"]
        mine = [(one["address"], one["online"]) for one in actors]
        return sorted(one for one in mine if one[0].startswith(f"@({self._prefix}/"))

    def _ask(self, one: Actor, other: int, data: int) -> list[Any]:
        """A question, and the reply of whoever gets it."""
        message = {"to": self._address(other), "type": "asked", "data": data, "expectReply": True}
        asked = one.write("hub:send", message, pattern="ask")
        got = [frame for frame in self._actors[other].quiet() if frame["type"] == "asked"]
        for frame in got:
            reply = {"ok": True, "data": data + 1}
            self._actors[other].write("hub:reply", reply, correlationId=frame["id"])
        answer = one.find(lambda frame: frame["correlationId"] == asked)
        return [*map(self._shown, got), self._shown(answer)]

    def _post(self, one: Actor, other: int, data: int) -> Any:
        """A message without a session."""
        message = {"to": self._address(other), "type": "said", "data": data, "ack": "accepted"}
        frame = {"from": one.address, "type": "hub:send", "pattern": "ask", "payload": message}
        reply = self._call("POST", "/hub/messages", {"id": f"post-{data}", **frame, "timestamp": now_ms()})
        return reply.status, reply.body["type"] if reply.status == 200 else reply.code

    @staticmethod
    def _shown(frame: Frame) -> Any:
        """Without what is another one each time: ids, times, versions."""
        payload = frame["payload"]
        if frame["type"] in ("said", "told", "asked"):
            return frame["type"], frame["from"], payload
        kept = (
            *("status", "code", "actorAddress", "topic", "delivered", "recipients", "reason", "ok", "data"),
            *("deliveredCount", "queuedCount", "failedCount", "total"),
        )
        told = payload if isinstance(payload, dict) else {}
        return frame["type"], {key: told[key] for key in kept if key in told}


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=st.lists(step, min_size=1, max_size=12))
def test_h41_any_number_of_workers_is_one_hub(
    servers: list[ServerProcess], program: list[tuple[Any, ...]]
) -> None:
    number = next(_programs)
    with ExitStack() as opened:
        results = [Play(server, number, opened).run(program) for server in servers]
    assert results[1:] == results[:1] * (len(WORKERS) - 1)
