"""Rights that end while connections are open: revoked tokens and keys, and what was opened with them."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from jwt import algorithms
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from conftest import StartServer
from support.calls import Caller, Reply, eventually
from support.cli import tailrace
from support.hub_client import Actor
from support.server import ServerProcess
from support.watch_client import Live
from support.wire import Wire, fresh, request_bytes
from support.workers import names_of
from tailrace.auth import create_token

JSON = "application/json"
SECRET = "a secret that is long enough for HS256, 32 bytes"
WAIT_S = 30


def token(*scopes: str, sub: str = "m", **more: Any) -> str:
    return create_token(SECRET, sub=sub, scopes=scopes, **more)


MANAGER = token("manage", sub="manager")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    env = {"TAILRACE_AUTH_JWT_SECRET": SECRET}
    process = ServerProcess(tmp_path_factory.mktemp("revoking") / "data", env=env).start()
    yield process
    process.stop()


@pytest.fixture
def call(server: ServerProcess) -> Caller:
    return Caller(server, MANAGER)


@pytest.fixture
def name(call: Caller) -> str:
    found = fresh("revoked")
    assert call("PUT", found, headers={"Content-Type": JSON}).status == 201
    return found


def made_key(call: Caller, sub: str, *scopes: str, **more: Any) -> tuple[str, str]:
    """Its id, and the key."""
    answer = call("POST", "/v1/server/_keys", {"sub": sub, "scopes": scopes, **more})
    assert answer.status == 201, answer.raw
    return answer.body["id"], answer.body["key"]


class Connections:
    """Every kind of connection that stays open, opened with one token."""

    def __init__(self, server: ServerProcess, name: str, bearer: str) -> None:
        self._stack = ExitStack()
        wire = Wire(server.port, bearer=bearer)
        header = {"Authorization": f"Bearer {bearer}"}
        base = f"ws://127.0.0.1:{server.port}"
        self.events = self._stack.enter_context(wire.events(f"{name}?offset=now&live=sse"))
        self.events.control()
        live = f"{base}/v1/stream/{name}?offset=now&live=ws"
        self.socket = self._stack.enter_context(connect(live, additional_headers=header))
        self.socket.recv(timeout=WAIT_S)
        self.poll = self._stack.enter_context(wire.connect())
        target = f"/v1/stream/{name}?offset=now&live=long-poll&timeout=60s"
        self.poll.send(request_bytes("GET", target, header))
        self.realtime = Live(server, token=bearer, path="/realtime/ws?database=default")
        self._stack.callback(self.realtime.close)
        feed = f"{base}/replication/ws?database=default"
        self.replication = self._stack.enter_context(connect(feed, additional_headers=header))
        self.actor = Actor(server, token=bearer, words=["resume"])
        self._stack.callback(self.actor.close)

    def __enter__(self) -> Connections:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def check_ended(self) -> None:
        assert self.events.next() is None
        assert close_code(self.socket) == 1008
        answer = self.poll.read_answer()
        assert (answer.status, answer.code) == (401, "unauthorized")
        assert self.realtime.closed() == 4401
        assert close_code(self.replication) == 4401
        assert self.actor.closed() == 1008

    def check_open(self, call: Caller, name: str) -> None:
        assert call("POST", name, [{"n": 1}]).status == 204
        assert json.loads(self.events.data()) == [{"n": 1}]
        assert json.loads(self.socket.recv(timeout=WAIT_S))
        assert self.poll.read_answer().json == [{"n": 1}]
        self.realtime.send("heartbeat", "h")
        self.realtime.take_until("heartbeat")
        assert self.actor.ask("hub:heartbeat", {"timestamp": 1})["type"] == "hub:heartbeat_ack"


def close_code(socket: ClientConnection) -> int:
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            socket.recv(timeout=WAIT_S)
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code


def check_revoked(
    server: ServerProcess, call: Caller, name: str, bearer: str, revoke: Callable[[], object]
) -> None:
    """Whoever is revoked is sent away everywhere; somebody else with the same rights notices nothing."""
    before = ended_connections(call)
    other = token("read", "write", sub="kept", dbs=["default"])
    with Connections(server, name, other) as kept, Connections(server, name, bearer) as lost:
        revoke()
        lost.check_ended()
        assert Caller(server, bearer)("GET", name).code == "unauthorized"
        kept.check_open(call, name)
    assert ended_connections(call) >= before + 6


def ended_connections(call: Caller) -> float:
    lines = call("GET", "/metrics").raw.decode().splitlines()
    found = [line for line in lines if line.startswith("tailrace_connections_revoked_total ")]
    return float(found[0].split()[1])


def run(server: ServerProcess, *args: str) -> str:
    """A command with the rights of a manager."""
    env = {"TAILRACE_ENDPOINT": server.base_url, "TAILRACE_TOKEN": MANAGER}
    done = tailrace(*args, env=env)
    assert done.code == 0, done.err
    return done.out


def test_a_revoked_token_loses_its_connections(server: ServerProcess, call: Caller, name: str) -> None:
    bearer = token("read", "write", sub="ada", dbs=["default"])
    check_revoked(server, call, name, bearer, lambda: run(server, "token", "revoke", bearer))
    newer = token("read", sub="ada")
    assert Caller(server, newer)("GET", name).status == 200, "one token, not its subject"


def test_a_revoked_subject_loses_everything(server: ServerProcess, call: Caller, name: str) -> None:
    bearer = token("read", "write", sub="bob", dbs=["default"])
    check_revoked(server, call, name, bearer, lambda: run(server, "token", "revoke", "--sub", "bob"))
    listed = call("GET", "/v1/server/_revocations").body
    assert "bob" in [one.get("sub") for one in listed["revocations"]]


def test_a_revoked_key_loses_its_connections(server: ServerProcess, call: Caller, name: str) -> None:
    made = run(
        server, "key", "create", "--sub", "ci", "--scope", "read", "--scope", "write", "--db", "default"
    )
    bearer = made.strip()
    assert Caller(server, bearer)("GET", "/metrics").status == 403
    assert bearer.split("_")[1] in run(server, "key", "list")
    check_revoked(server, call, name, bearer, lambda: run(server, "key", "revoke", bearer))
    assert bearer.split("_")[1] not in run(server, "key", "list")


def test_a_ticket_ends_with_its_token(server: ServerProcess, call: Caller) -> None:
    """What a browser was given instead of a header is no way around."""
    key_id, bearer = made_key(call, "browser", "read", databases=["default"])
    asked = {"database": "default", "subscriptions": [{"id": "1", "query": {"collection": "c"}}]}
    given = Caller(server, bearer)("POST", "/realtime/sse", asked, headers={"Accept": JSON})
    assert given.status == 200, given.raw
    path = f"/realtime/sse?ticket={given.body['ticket']}"
    nobody = Wire(server.port)
    with nobody.connect() as connection:
        connection.send(request_bytes("GET", path))
        assert connection.read_head().status == 200
        assert call("DELETE", f"/v1/server/_keys/{key_id}").status == 204
        while connection.read_chunk():
            pass
    assert nobody.get(path).status == 401
    nobody.close()


def test_a_job_loses_what_it_was_given(server: ServerProcess, call: Caller) -> None:
    """The token of a job is for one stream, and ends with the token it was asked for with."""
    key_id, manager = made_key(call, "jobs", "manage")
    answer = Caller(server, manager)("POST", "/v1/databases/default/summaries", {"seconds": 3600})
    assert answer.status == 200, answer.raw
    job, stream = Caller(server, answer.body["token"]), answer.body["deliveries"]
    entry = [{"v": 1, "kind": "control", "control": "test"}]
    assert job("HEAD", stream).status == 200
    assert job("POST", stream, entry).status == 204
    for method, path in (
        ("GET", "/metrics"),
        ("GET", "/v1/server/_details"),
        ("GET", "/v1/pipeline/plan"),
        ("GET", "/v1/server/_keys"),
        ("GET", "__registry__"),
        ("GET", answer.body["stream"]),
        ("GET", "/v1/databases/default/status"),
        ("GET", "orders"),
        ("PUT", "orders"),
        ("DELETE", stream),
        ("POST", "__registry__"),
        ("POST", "__deliveries__/another"),
    ):
        refused = job(method, path, entry if method == "POST" else None)
        assert refused.status in (403, 405), (method, path, refused.raw)
    assert call("DELETE", f"/v1/server/_keys/{key_id}").status == 204
    assert job("POST", stream, entry).code == "unauthorized"


def test_revocations_outlive_the_server(start_server: StartServer) -> None:
    server = start_server(env={"TAILRACE_AUTH_JWT_SECRET": SECRET})
    call = Caller(server, MANAGER)
    _, key = made_key(call, "ci", "read")
    bearer = token("read", sub="ada")
    assert call("POST", "/v1/server/_revocations", {"sub": "ada"}).status == 200
    server.restart(kill=True)
    assert Caller(server, bearer)("GET", "/v1/streams").code == "unauthorized"
    assert Caller(server, key)("GET", "/v1/streams").status == 200


def test_the_first_key_is_made_before_the_first_server(tmp_path: Path, start_server: StartServer) -> None:
    """Keys alone are enough; the server does what the file says, with or without a signal."""
    file = tmp_path / "keys.json"
    at = ("--file", str(file))
    admin = tailrace("key", "create", *at, "--sub", "admin", "--scope", "manage").out.strip()
    reader = tailrace("key", "create", *at, "--sub", "r", "--scope", "read", "--expires", "8h").out.strip()
    server = start_server("--auth-keys-file", str(file))
    assert Caller(server)("GET", "/v1/streams").status == 401
    assert Caller(server, admin)("PUT", "orders", headers={"Content-Type": JSON}).status == 201
    with Wire(server.port, bearer=reader).events("orders?offset=now&live=sse") as events:
        events.control()
        register = json.loads(file.read_text())
        register["keys"][1]["scopes"] = ["write"]
        file.write_text(json.dumps(register))
        server.signal(signal.SIGHUP)
        assert events.next() is None
    assert Caller(server, reader)("GET", "orders").code == "forbidden"
    assert tailrace("key", "revoke", reader, *at).code == 0
    eventually(lambda: Caller(server, reader)("GET", "orders").status, lambda status: status == 401)
    assert tailrace("token", "revoke", "--sub", "admin", *at).code == 0
    eventually(lambda: Caller(server, admin)("GET", "orders").status, lambda status: status == 401)


def test_a_key_taken_out_of_the_set_ends_what_it_signed(tmp_path: Path, start_server: StartServer) -> None:
    """The old key is good until it is gone."""
    old, new = ed25519.Ed25519PrivateKey.generate(), ed25519.Ed25519PrivateKey.generate()
    file = tmp_path / "jwks.json"

    def publish(**keys: ed25519.Ed25519PrivateKey) -> None:
        shown = [
            {**algorithms.OKPAlgorithm.to_jwk(key.public_key(), as_dict=True), "kid": key_id}
            for key_id, key in keys.items()
        ]
        file.write_text(json.dumps({"keys": shown}))

    def signed(key: ed25519.Ed25519PrivateKey, key_id: str) -> str:
        return jwt.encode({"scope": "manage"}, key, algorithm="EdDSA", headers={"kid": key_id})

    publish(old=old)
    server = start_server("--auth-jwks-file", str(file))
    first, second = Caller(server, signed(old, "old")), Caller(server, signed(new, "new"))
    assert first("PUT", "orders", headers={"Content-Type": JSON}).status == 201
    publish(old=old, new=new)
    server.signal(signal.SIGHUP)
    eventually(lambda: second("GET", "orders").status, lambda status: status == 200)
    with Wire(server.port, bearer=signed(old, "old")).events("orders?offset=now&live=sse") as events:
        events.control()
        assert first("GET", "orders").status == 200
        publish(new=new)
        server.signal(signal.SIGHUP)
        assert events.next() is None
    assert first("GET", "orders").status in (401, 503)
    assert second("GET", "orders").status == 200


def test_who_may_make_keys(server: ServerProcess, call: Caller) -> None:
    """Whoever manages a part cannot make a key for the whole."""
    asked = {"sub": "x", "scopes": ["manage"]}
    for bearer in (
        token("read", "write", "system"),
        token("manage", streams=["a/"]),
        token("manage", dbs=["default"]),
    ):
        answer = Caller(server, bearer)("POST", "/v1/server/_keys", asked)
        assert answer.code == "forbidden"
    for wrong in (
        {},
        {"sub": "x"},
        {"sub": "x", "scopes": []},
        {"sub": "x", "scopes": ["system"]},
        {"sub": "", "scopes": ["read"]},
        {"sub": "x", "scopes": ["read"], "streams": [""]},
        {"sub": "x", "scopes": ["read"], "expiresIn": 0},
        {"sub": "x", "scopes": ["read"], "more": 1},
    ):
        assert call("POST", "/v1/server/_keys", wrong).code == "invalid_request", wrong
    for wrong in (
        {},
        {"jti": "a", "sub": "b"},
        {"jti": ""},
        {"jti": 7},
        {"jti": MANAGER},
        {"jti": "trk_1_x"},
    ):
        assert call("POST", "/v1/server/_revocations", wrong).code == "invalid_request", wrong
    assert call("DELETE", "/v1/server/_keys/nothing").code == "not_found"


def test_without_authentication_there_are_no_keys(http: Wire) -> None:
    for method, path in (("GET", "_keys"), ("POST", "_keys"), ("GET", "_revocations"), ("DELETE", "_keys/x")):
        assert http.call(method, f"/v1/server/{path}").code == "conflict"


# -- rates


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    env = {
        "TAILRACE_AUTH_JWT_SECRET": SECRET,
        "TAILRACE_AUTH_PUBLIC_STREAMS": "public/",
        "TAILRACE_IDENTITY_OPS_PER_S": "1",
        "TAILRACE_IDENTITY_BYTES_PER_S": "1000",
    }
    process = ServerProcess(tmp_path_factory.mktemp("slow") / "data", env=env).start()
    yield process
    process.stop()


def test_one_identity_cannot_ask_everything(slow: ServerProcess) -> None:
    def statuses(bearer: str | None) -> list[int]:
        wire = Wire(slow.port, bearer=bearer)
        found = [wire.get("public/x").status for _ in range(20)]
        wire.close()
        return found

    first = statuses(token("read", sub="greedy"))
    assert first[0] == 404
    assert 429 in first
    again = Caller(slow, token("read", sub="greedy"))("GET", "public/x")
    assert again.status in (404, 429), "another token of the same subject is the same identity"
    assert statuses(token("read", sub="modest"))[0] == 404, "others are not held up"
    everybody = statuses(None)
    assert everybody[0] == 404
    assert 429 in everybody
    assert slow.status("/healthz") == 200


def test_bytes_are_counted_too(slow: ServerProcess) -> None:
    """What is larger than the bound is taken once, and paid for with a pause."""
    call = Caller(slow, token("write", sub="large"))
    assert call("PUT", "public/large", b"x" * 50_000, headers={"Content-Type": "text/plain"}).status == 201
    refused = call("POST", "public/large", b"x" * 100, headers={"Content-Type": "text/plain"})
    assert (refused.status, refused.code) == (429, "overloaded")
    assert int(refused.headers["retry-after"]) > 10


# -- tokens that the hub makes


def test_what_the_hub_makes_of_a_token_is_no_more_than_the_token(
    tmp_path: Path, start_server: StartServer
) -> None:
    """A provider cannot hand out `system` by way of the hub, and a revoked token leaves no offspring."""
    key = ed25519.Ed25519PrivateKey.generate()
    shown = {**algorithms.OKPAlgorithm.to_jwk(key.public_key(), as_dict=True), "kid": "k"}
    file = tmp_path / "jwks.json"
    file.write_text(json.dumps({"keys": [shown]}))
    env = {"TAILRACE_AUTH_JWT_SECRET": SECRET, "TAILRACE_HUB_MINT_TOKENS": "yes"}
    server = start_server("--auth-jwks-file", str(file), env=env)
    claims = {"sub": "ada", "scope": "read system", "jti": "first"}
    first = jwt.encode(claims, key, algorithm="EdDSA", headers={"kid": "k"})
    actor = Actor(server, token=first)
    made = actor.ask("hub:refresh_token", {"token": first})["payload"]["token"]
    actor.close()
    holder = Caller(server, made)
    assert holder("GET", "/v1/streams").status == 200
    assert holder("POST", "__registry__", [{}]).code == "read_only_stream"
    assert jwt.decode(made, SECRET, algorithms=["HS256"])["scope"] == "read"
    assert Caller(server, MANAGER)("POST", "/v1/server/_revocations", {"jti": "first"}).status == 200
    for bearer in (first, made):
        assert Caller(server, bearer)("GET", "/v1/streams").code == "unauthorized"


# -- several processes


def test_every_worker_follows_a_revocation(start_server: StartServer) -> None:
    """Whichever worker is asked: the others see the file, and close what they hold."""
    server = start_server("--workers", "2", env={"TAILRACE_AUTH_JWT_SECRET": SECRET})
    call = Caller(server, MANAGER)
    names = [fresh("shared") for _ in range(8)]  # of both workers
    for name in names:
        assert call("PUT", name, headers={"Content-Type": JSON}).status == 201
    key_id, key = made_key(call, "ci", "read")
    reader = Caller(server, key)
    for name in names:
        eventually(lambda name=name: reader("GET", name).status, lambda status: status == 200)
    with ExitStack() as stack:
        wire = Wire(server.port, bearer=key)
        streams = [stack.enter_context(wire.events(f"{name}?offset=now&live=sse")) for name in names]
        for events in streams:
            events.control()
        assert call("DELETE", f"/v1/server/_keys/{key_id}").status == 204
        for events in streams:
            assert events.next() is None
    for name in names:
        eventually(lambda name=name: reader("GET", name).status, lambda status: status == 401)


def until_refused(reader: Caller, path: str) -> Reply:
    """Waits for one change after the other."""
    while True:
        shown = reader("GET", path)
        if shown.status == 200:
            known = {"If-None-Match": shown.headers["etag"]}
            shown = reader("GET", f"{path}?live=long-poll&timeout_ms=60000", headers=known)
        if shown.status not in (200, 304):
            return shown


def test_waits_end_with_the_right_to_wait(start_server: StartServer) -> None:
    """Also those that are for no entry: for touches, and for what is told about a stream."""
    env = {"TAILRACE_AUTH_JWT_SECRET": SECRET, "TAILRACE_DETAILS_MAX_WAIT_MS": "60000"}
    server = start_server("--workers", "2", env=env)
    call = Caller(server, MANAGER)
    profile = {"profile": {"kind": "state-protocol", "touch": {"enabled": True}}}
    names = [next(names_of(worker, 2, "waited/")) for worker in range(2)]
    for name in names:
        assert call("PUT", name, headers={"Content-Type": JSON}).status == 201
        assert call("POST", f"{name}/_profile", profile).status == 200
    key_id, key = made_key(call, "ci", "read")
    reader = Caller(server, key)
    for name in names:
        eventually(lambda name=name: reader("GET", name).status, lambda status: status == 200)
    waited = {"cursor": "now", "keys": ["0123456789abcdef"], "exact": True, "timeoutMs": 120_000}
    with ThreadPoolExecutor(2 * len(names)) as waiting, ExitStack() as later:
        # Whatever goes wrong, nobody waits for two minutes.
        later.callback(call, "DELETE", f"/v1/server/_keys/{key_id}")
        waits = [waiting.submit(reader, "POST", f"{name}/touch/wait", waited) for name in names]
        waits += [waiting.submit(until_refused, reader, f"{name}/_details") for name in names]
        for name in names:
            eventually(
                lambda name=name: call("GET", f"{name}/touch/meta").body["activeWaiters"],
                lambda count: count == 1,
            )
        shown = "/v1/server/_mem"
        eventually(
            lambda: call("GET", shown).body["runtime_counts"]["live_connections"],
            lambda count: count == len(names),
        )
        later.close()
        for wait in waits:
            answer = wait.result(60)
            assert (answer.status, answer.code) == (401, "unauthorized")


def test_a_rate_holds_for_all_workers_together(start_server: StartServer) -> None:
    env = {
        "TAILRACE_AUTH_JWT_SECRET": SECRET,
        "TAILRACE_IDENTITY_OPS_PER_S": "1",
        "TAILRACE_IDENTITY_BYTES_PER_S": "1000",
    }
    server = start_server("--workers", "2", env=env)
    here, there = (next(names_of(worker, 2, "large/")) for worker in range(2))
    plain = {"Content-Type": "text/plain"}
    call = Caller(server, token("write", sub="large"))
    assert call("PUT", here, b"x" * 500_000, headers=plain).status == 201
    refused = call("PUT", there, b"x" * 100, headers=plain)
    assert (refused.status, refused.code) == (429, "overloaded"), "one worker knows what another has given"
    assert int(refused.headers["retry-after"]) > 10
    # What all workers answer together is one request all the same: two are allowed at once.
    assert Caller(server, token("read", sub="modest"))("GET", "/v1/streams").status == 200
    # So is a fork, which one worker finds the place of and another may make.
    homes = [names_of(worker, 2, "forked/") for worker in range(2)]
    for sources, forks in (homes, reversed(homes)):
        source, fork = next(sources), next(forks)
        call = Caller(server, token("write", "read", sub=f"forks {source}"))
        assert call("PUT", source, b"x", headers=plain).status == 201
        assert call("PUT", fork, headers={"Stream-Forked-From": f"/v1/stream/{source}"}).status == 201


def test_what_is_given_to_token_revoke_is_never_kept(tmp_path: Path) -> None:
    """A key is revoked as a key, and whatever is no id is not taken for one."""
    file = tmp_path / "keys.json"
    at = ("--file", str(file))
    for command in (("token", "revoke", "some-id"), ("token", "revoke", "--sub", "ada")):
        done = tailrace(*command, *at)
        assert (done.code, "nothing was revoked" in done.err, file.exists()) == (2, True, False)
    keys = [tailrace("key", "create", *at, "--sub", "x", "--scope", "read").out.strip() for _ in range(2)]
    assert tailrace("token", "revoke", keys[0], *at).code == 0
    assert tailrace("token", "revoke", keys[1].rpartition("_")[0], *at).code == 0
    refused = tailrace("token", "revoke", "trg_" + "x" * 43, *at)
    assert (refused.code, "cannot be revoked" in refused.err) == (2, True)
    assert json.loads(file.read_text())["keys"] == []
    assert not any(secret.split("_", 2)[2] in file.read_text() for secret in keys)
    assert "trg_" not in file.read_text()


def test_a_key_can_be_given_to_token_revoke(server: ServerProcess, call: Caller) -> None:
    _, bearer = made_key(call, "ci", "read")
    run(server, "token", "revoke", bearer)
    assert Caller(server, bearer)("GET", "/v1/streams").code == "unauthorized"


def test_commands_say_what_is_wrong(tmp_path: Path) -> None:
    at = ("--file", str(tmp_path / "keys.json"))
    wrong: list[tuple[tuple[str, ...], int, str]] = [
        (("token", "revoke", *at), 2, "give a token or its id"),
        (("token", "revoke", jwt.encode({"sub": "x"}, SECRET), *at), 2, "revoke its subject"),
        (("key", "revoke", "0123456789abcdef", *at), 1, "API key not found"),
        (("key", "create", *at, "--sub", "x", "--scope", "system"), 1, "cannot have the scope"),
        (("key", "create", *at, "--sub", "x", "--scope", "read", "--expires", "soon"), 2, "not a duration"),
    ]
    for command, code, message in wrong:
        done = tailrace(*command)
        assert (done.code, message in done.err) == (code, True), done.err
    shown = tailrace("key", "create", *at, "--sub", "x", "--scope", "read", "--json").rows[0]
    assert shown["key"].startswith(f"trk_{shown['id']}_")
    assert [row["id"] for row in tailrace("key", "list", *at, "--json").rows] == [shown["id"]]
