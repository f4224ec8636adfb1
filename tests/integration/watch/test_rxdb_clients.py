"""RxDB from npm, unchanged, against a server: clients and server come to hold the same, whatever happens."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import jwt
import pytest

from conftest import StartServer
from support.calls import Caller, eventually
from support.cutting_proxy import CuttingProxy, at_random
from support.replica import Replica
from support.rxdb import Clients
from support.server import ServerProcess

BASE = "/v1/databases/default"
KINDS = ("ws", "http")
SECRET = "a secret that is long enough for the server to accept it"
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def clients() -> Iterator[Clients]:
    with Clients() as found:
        yield found


class Party:
    """Some clients of one collection, and the server's word on it."""

    def __init__(self, clients: Clients, server: ServerProcess, call: Caller | None = None) -> None:
        self.clients = clients
        self.call = call or Caller(server)
        self._server = server
        self.collection = f"party{next(_numbers)}"
        self.names: list[str] = []

    def join(self, kind: str, base_url: str | None = None, query: str = "", **more: Any) -> str:
        name = f"{self.collection}-{len(self.names)}"
        url = base_url or self._server.base_url
        where = {
            "ws": f"{url.replace('http', 'ws')}/replication/ws?database=default{query}",
            "http": f"{url}/replication/v1/databases/default",
        }
        self.clients.do("open", name, kind=kind, url=where[kind], collection=self.collection, **more)
        self.names.append(name)
        return name

    def put(self, client: str, name: str, n: int) -> None:
        self.clients.do("put", client, id=name, data={"n": n})

    def remove(self, client: str, name: str) -> bool:
        return self.clients.do("remove", client, id=name)["found"]

    def server_put(self, name: str, n: int) -> None:
        assert self.call("PUT", f"{BASE}/docs/{self.collection}/{name}", {"n": n}).status in (200, 201)

    def server_documents(self) -> dict[str, Any]:
        answer = self.call("POST", f"{BASE}/query", {"collection": self.collection, "limit": 1000})
        return {one["id"]: one["data"] for one in answer.body["documents"]}

    def agree(self, wanted: dict[str, int] | None = None) -> dict[str, Any]:
        """Waits until everybody holds the same, which is what the server has."""

        def look() -> list[dict[str, Any]]:
            return [self.server_documents(), *(self.clients.documents(name) for name in self.names)]

        def agreed(found: list[dict[str, Any]]) -> bool:
            right = wanted is None or found[0] == {name: {"n": n} for name, n in wanted.items()}
            return right and all(one == found[0] for one in found)

        return eventually(look, agreed)[0]

    def conflicts(self) -> int:
        return sum(self.clients.conflicts(name) for name in self.names)

    def leave(self) -> None:
        for name in self.names:
            self.clients.do("close", name)


@pytest.mark.parametrize("kind", KINDS)
def test_edits_deletes_and_documents_that_come_back(
    clients: Clients, server: ServerProcess, kind: str
) -> None:
    party = Party(clients, server)
    for i in range(25):
        party.server_put(f"s{i}", i)
    one, other = party.join(kind), party.join(kind)
    party.agree({f"s{i}": i for i in range(25)})
    party.put(one, "a", 1)
    party.put(other, "b", 2)
    party.server_put("c", 3)
    expected = {**{f"s{i}": i for i in range(25)}, "a": 1, "b": 2, "c": 3}
    party.agree(expected)
    assert party.remove(one, "b")
    assert party.remove(other, "s0")
    party.call("DELETE", f"{BASE}/docs/{party.collection}/s1")
    for gone in ("b", "s0", "s1"):
        del expected[gone]
    party.agree(expected)
    party.put(other, "b", 20)
    party.server_put("s0", 100)
    party.agree({**expected, "b": 20, "s0": 100})
    assert party.conflicts() == 0
    party.leave()


@pytest.mark.parametrize("kind", KINDS)
def test_w41_quick_edits_of_one_client_are_all_kept(
    clients: Clients, server: ServerProcess, kind: str
) -> None:
    """Echoes of its own writes come back with stamps while it goes on writing: no conflict, nothing lost."""
    party = Party(clients, server)
    one, other = party.join(kind), party.join(kind)
    for edit in range(12):
        for i in range(20):
            party.put(one, f"d{i}", edit)
        if edit % 2:
            # As soon as the server has the first of them, while the others and their echoes are under way.
            eventually(party.server_documents, lambda found, edit=edit: found.get("d0") == {"n": edit})
    party.agree({f"d{i}": 11 for i in range(20)})
    assert party.conflicts() == 0
    assert clients.do("state", other)["errors"] == 0
    party.leave()


@pytest.mark.parametrize("kind", KINDS)
def test_true_conflicts_are_found_and_only_those(clients: Clients, server: ServerProcess, kind: str) -> None:
    party = Party(clients, server)
    with CuttingProxy(server.port) as proxy:
        one, other = party.join(kind), party.join(kind, proxy.base_url)
        for i in range(4):
            party.put(one, f"d{i}", 0)
        party.agree({f"d{i}": 0 for i in range(4)})
        clients.do("settle", other)
        proxy.decide = _cut
        proxy.cut_all()
        # Both change d0; one deletes d1 while the other edits it; only the one away changes d2.
        party.put(one, "d0", 1)
        assert party.remove(one, "d1")
        for name in ("d0", "d1", "d2"):
            party.put(other, name, 2)
        eventually(party.server_documents, lambda found: found["d0"] == {"n": 1} and "d1" not in found)
        proxy.decide = _pass
        party.agree({"d0": 1, "d2": 2, "d3": 0})
        assert [clients.conflicts(name) for name in (one, other)] == [0, 2]
        party.leave()


def test_a_server_that_is_killed_and_comes_back(clients: Clients, start_server: StartServer) -> None:
    server = start_server()
    party = Party(clients, server)
    one, other = (party.join(kind) for kind in KINDS)
    for i in range(12):
        party.put(one, f"d{i}", i)
    party.agree({f"d{i}": i for i in range(12)})
    for name in (one, other):
        clients.do("settle", name)
    server.kill()
    party.put(one, "d0", 100)
    party.put(other, "new", 200)
    assert party.remove(other, "d1")
    server.start()
    expected = {**{f"d{i}": i for i in range(2, 12)}, "d0": 100, "new": 200}
    party.agree(expected)
    assert party.conflicts() == 0
    party.leave()


@pytest.mark.parametrize("kind", KINDS)
def test_a_resync_takes_back_what_may_not_be_read(clients: Clients, server: ServerProcess, kind: str) -> None:
    party = Party(clients, server)
    one = party.join(kind)
    for i in range(30):
        party.server_put(f"d{i}", i)
    party.agree({f"d{i}": i for i in range(30)})
    url = f"{BASE}/collections/{party.collection}"
    assert party.call("PUT", url, {"readRule": "doc.n >= 15"}).status == 200
    clients.await_documents(one, {f"d{i}": {"n": i} for i in range(15, 30)})
    party.server_put("d3", 33)
    party.server_put("d20", 0)
    shown = {**{f"d{i}": {"n": i} for i in range(15, 30)}, "d3": {"n": 33}}
    del shown["d20"]
    clients.await_documents(one, shown)
    assert party.call("PUT", url, {"readRule": None}).status == 200
    clients.await_documents(one, party.server_documents())
    party.leave()


def test_clients_that_take_nothing_but_their_schema(clients: Clients, server: ServerProcess) -> None:
    """A validator refuses what the schema does not name; then the server leaves its stamps out."""
    party = Party(clients, server)
    for i in range(3):
        party.server_put(f"d{i}", i)
    one, other = (party.join("ws", query="&stamps=0", strict=True) for _ in range(2))
    party.agree({"d0": 0, "d1": 1, "d2": 2})
    party.put(one, "d0", 10)
    party.agree({"d0": 10, "d1": 1, "d2": 2})
    assert party.remove(other, "d1")
    party.put(other, "new", 5)
    party.agree({"d0": 10, "d2": 2, "new": 5})
    assert [clients.do("state", name)["errors"] for name in (one, other)] == [0, 0]
    party.leave()


def test_w43_a_push_whose_answer_is_lost_has_one_effect(clients: Clients, server: ServerProcess) -> None:
    party = Party(clients, server)
    left = [3]

    def lose(direction: str, piece: bytes) -> bool:
        lost = direction == "answer" and b'{"conflicts":' in piece and left[0] > 0
        left[0] -= lost
        return lost

    with CuttingProxy(server.port, lose) as proxy:
        one = party.join("http", proxy.base_url)
        for i in range(5):
            party.put(one, f"d{i}", i)
        eventually(lambda: left[0], lambda found: found == 0)
        clients.do("settle", one)
        party.agree({f"d{i}": i for i in range(5)})
        assert party.conflicts() == 0
        documents, _ = Replica(party.call, party.collection).walk()
        assert {one["version"] for one in documents} == {1}
        party.leave()


def test_connections_that_break_at_any_moment(clients: Clients, server: ServerProcess) -> None:
    """Over HTTP RxDB repeats what was cut off, before or after the server obeyed it."""
    party = Party(clients, server)
    with CuttingProxy(server.port, at_random(11, 0.1)) as proxy:
        one, other = party.join("http", proxy.base_url), party.join("http", proxy.base_url)
        edit = 0
        while edit < 4 or proxy.cuts < 6:  # without edits nothing passes that could be cut, but heartbeats
            edit += 1
            for i in range(8):
                party.put(one, f"a{i}", edit)
                party.put(other, f"b{i}", edit)
        proxy.decide = _pass
        party.agree({f"{who}{i}": edit for who in "ab" for i in range(8)})
        assert party.conflicts() == 0
        party.leave()


def test_tokens_travel_in_the_first_frame(clients: Clients, start_server: StartServer) -> None:
    server = start_server(env={"TAILRACE_AUTH_JWT_SECRET": SECRET})
    claims = {"sub": "u", "scope": "read write", "db": ["default"], "exp": 4_000_000_000}
    token = jwt.encode(claims, SECRET, "HS256")
    party = Party(clients, server, Caller(server, token))
    one = party.join("ws", headers={"authorization": f"Bearer {token}"})
    party.put(one, "a", 1)
    party.agree({"a": 1})
    clients.do("settle", one)
    server.kill()
    party.put(one, "b", 2)
    server.start()
    party.agree({"a": 1, "b": 2})
    party.leave()


def test_clients_that_write_agree_after_restarts(clients: Clients, start_server: StartServer) -> None:
    """A stop with requests under way: the plugin never asks again for what was not answered."""
    server = start_server()
    for _ in range(3):
        party = Party(clients, server)
        one, other = party.join("ws"), party.join("ws")
        for edit in range(300):
            party.put(one, f"a{edit % 5}", edit)
            party.put(other, f"b{edit % 5}", edit)
        server.stop()
        party.put(one, "late", 1)
        server.start()
        party.put(other, "later", 2)
        expected = {f"{who}{edit % 5}": edit for who in "ab" for edit in range(295, 300)}
        party.agree({**expected, "late": 1, "later": 2})
        party.leave()


def _cut(_direction: str, _piece: bytes) -> bool:
    return True


def _pass(_direction: str, _piece: bytes) -> bool:
    return False


def _random_life(party: Party, proxies: list[CuttingProxy], chance: random.Random, steps: int) -> None:
    """Edits, deletes and re-creations everywhere, now and then without a connection."""
    clients, ids = party.clients, [f"d{i}" for i in range(12)]
    away = [False] * len(proxies)
    for step in range(steps):
        name = chance.choice(party.names)
        act = chance.random()
        if act < 0.7:
            party.put(name, chance.choice(ids), step)
        elif act < 0.85:
            party.remove(name, chance.choice(ids))
        elif act < 0.92:
            party.server_put(chance.choice(ids), step)
        else:
            place = chance.randrange(len(proxies))
            if not away[place]:
                # The plugin waits for ever for an answer that was lost with its connection.
                clients.do("settle", party.names[place])
            away[place] = chance.random() < 0.6
            proxies[place].decide = _cut if away[place] else _pass
            if away[place]:
                proxies[place].cut_all()
    for proxy in proxies:
        proxy.decide = _pass


def _together(clients: Clients, server: ServerProcess, seed: int, steps: int) -> None:
    chance = random.Random(seed)
    party = Party(clients, server)
    proxies = [CuttingProxy(server.port) for _ in range(4)]
    for proxy, kind in zip(proxies, itertools.cycle(KINDS), strict=False):
        proxy.__enter__()
        party.join(kind, proxy.base_url)
    try:
        _random_life(party, proxies, chance, steps)
        party.agree()
        party.leave()
    finally:
        for proxy in proxies:
            proxy.__exit__(None, None, None)


def test_w41_everybody_agrees_in_the_end(clients: Clients, server: ServerProcess) -> None:
    _together(clients, server, seed=7, steps=120)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20))
def test_w41_everybody_agrees_in_the_end_at_length(
    clients: Clients, server: ServerProcess, seed: int
) -> None:
    _together(clients, server, seed=seed, steps=600)
