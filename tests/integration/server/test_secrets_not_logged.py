"""A server that was given secrets of every kind, and asked in every wrong way, writes none of them down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import StartServer
from support.calls import Caller, eventually
from support.cli import tailrace
from support.collector import Collector
from support.edge import EdgeProcess
from support.hub_client import Actor
from support.mongo_server import MongoServer
from support.sources import wait_until
from support.wire import Wire, request_bytes
from tailrace.auth import create_token

JSON = "application/json"
SECRET = "shared-secret-4c1f0d2a9b8e7f60-and-more"
RECOVERY = "recovery-key-77aa55cc33ee11dd-and-more"
HMAC_SECRET = "ab" * 16 + "cd" * 16
PASSWORD = "hunter2-of-the-database"
SIGNING_KEY = "signing-key-of-the-edge-5566778899aabbcc"
QUERY_SECRET = "query-secret-90817263"


def secrets_of(tokens: list[str]) -> list[str]:
    """Whole, and what is left of them when somebody cuts off the name: signatures and secrets."""
    pieces = [piece for token in tokens for piece in (token, token.rpartition(".")[2], token[-24:])]
    return [SECRET, RECOVERY, HMAC_SECRET, PASSWORD, QUERY_SECRET, *pieces]


@pytest.mark.parametrize("form", ["json", "console"])
def test_no_secret_is_in_any_log(tmp_path: Path, start_server: StartServer, form: str) -> None:
    keys = tmp_path / "hub-keys.json"
    keys.write_text(json.dumps({"@(ada)": [{"id": "k1", "secret": HMAC_SECRET, "createdAt": 1}]}))
    mongo = MongoServer().start()
    collector = Collector()
    server = start_server(
        env={
            "TAILRACE_TRACES_URL": collector.base_url.replace("//", f"//user:{PASSWORD}@"),
            "TAILRACE_TRACES_ONE_IN": "1",
            "TAILRACE_AUTH_JWT_SECRET": SECRET,
            "TAILRACE_RECOVERY_KEY": RECOVERY,
            "TAILRACE_HUB_KEYS": str(keys),
            "TAILRACE_LOG_LEVEL": "debug",
            "TAILRACE_LOG_FORMAT": form,
            "TAILRACE_LOG_REQUESTS": "all",
            "PG_DSN_OF_THE_TEST": f"postgres://user:{PASSWORD}@127.0.0.1:1/none",
            "MONGO_DSN_OF_THE_TEST": mongo.dsn.replace("//", f"//user:{PASSWORD}@"),
        }
    )
    manager = create_token(SECRET, sub="manager", scopes=["manage"])
    expired = create_token(SECRET, sub="old", scopes=["manage"], lifetime_s=1)
    foreign = create_token(SECRET[::-1], sub="foreign", scopes=["manage"])
    call = Caller(server, manager)
    key = call("POST", "/v1/server/_keys", {"sub": "ci", "scopes": ["write"]}).body["key"]
    given = [manager, expired, foreign, key]
    _use(server.port, call, given)
    job = call("POST", "/v1/databases/default/summaries", {"seconds": 60}).body["token"]
    wake = _wake(call)
    actor = Actor(server, token=create_token(SECRET, sub="ada", scopes=["read"]))
    actor.close()
    for kind in ("postgres", "mongo"):
        dsn = {"env": "PG_DSN_OF_THE_TEST" if kind == "postgres" else "MONGO_DSN_OF_THE_TEST"}
        source = {"kind": kind, "dsn": dsn, "collections": {"a.b": {"collection": f"{kind}-c"}}}
        assert call("PUT", f"/v1/databases/default/sources/{kind}", source).status == 201
        path = f"/v1/databases/default/sources/{kind}"
        wait_until(lambda path=path: call("GET", path).body["status"]["error"], bool)
    for jti in ("some-token", *given):
        call("POST", "/v1/server/_revocations", {"jti": jti})
    call("DELETE", f"/v1/server/_keys/{key.split('_')[1]}")
    collector.wait_for("PUT /v1/stream/{name}")
    server.stop()
    collector.close()
    mongo.crash()
    log = server.log
    assert "API key revoked" in log, "the log is on"
    found = [secret for secret in secrets_of([*given, job, wake]) if secret in log]
    assert found == []
    files = [path for path in server.data_dir.glob("identity.json*") if path.is_file()]
    assert files, "where keys are kept"
    assert [secret for path in files for secret in secrets_of([key]) if secret in path.read_text()] == []


@pytest.mark.parametrize("form", ["json", "console"])
def test_no_secret_is_in_the_log_of_an_edge_or_of_workers(
    tmp_path: Path, start_server: StartServer, form: str
) -> None:
    """The edge has secrets of its own: what it signs with, and its token."""
    env = {
        "TAILRACE_AUTH_JWT_SECRET": SECRET,
        "TAILRACE_EDGE_SIGNING_KEY": SIGNING_KEY,
        "TAILRACE_LOG_LEVEL": "debug",
        "TAILRACE_LOG_FORMAT": form,
        "TAILRACE_LOG_REQUESTS": "all",
    }
    server = start_server("--workers", "2", env=env)
    own = create_token(SECRET, sub="edge", scopes=["read"])
    token_file = tmp_path / "token"
    token_file.write_text(own)
    args = ["--token-file", str(token_file)]
    edge = EdgeProcess(tmp_path / "edge" / "cache", server.base_url, args=args, env=env)
    edge.start()
    manager = create_token(SECRET, sub="manager", scopes=["manage"])
    foreign = create_token(SECRET[::-1], sub="foreign", scopes=["manage"])
    given = [manager, foreign]
    call = Caller(edge, manager)
    _use(edge.port, call, given)
    call("POST", "orders", [{"id": 1}])
    with Wire(edge.port).connect() as reader:
        bearer = {"Authorization": f"Bearer {manager}"}
        reader.send(request_bytes("GET", "/v1/stream/orders?offset=-1&live=sse", bearer))
        assert reader.read_head().status == 200
        assert b"data:" in reader.read_chunk()
    server.kill()  # whatever an edge has to say about a server that is gone
    eventually(lambda: call("GET", "orders?offset=now").status, lambda status: status == 503)
    edge.stop()
    logs = edge.log + server.log
    assert "stopping" in edge.log, "the log is on"
    assert '"worker"' in server.log or "worker=" in server.log, "that of workers, too"
    assert [secret for secret in [*secrets_of([*given, own]), SIGNING_KEY] if secret in logs] == []


def _use(port: int, call: Caller, tokens: list[str]) -> None:
    """In the right place and in the wrong ones: URLs, bodies, other headers, requests that cannot be read."""
    wire = Wire(port)
    for token in tokens:
        for path in ("/v1/streams", "orders", "/metrics", "/v1/server/_details", "/nowhere"):
            wire.get(path, {"Authorization": f"Bearer {token}"})
            wire.get(path, {"Authorization": token})
            wire.get(path, {"Authorization": f"Basic {token}"})
            wire.get(path, {"X-Api-Key": token, "Cookie": f"token={token}"})
        wire.get(f"/realtime/sse?database=default&collection=c&token={token}")
        wire.get(f"/v1/stream/orders?offset={token}&key={QUERY_SECRET}")
        wire.call("POST", "/v1/server/_keys", {"Content-Type": JSON}, json.dumps({"sub": token}))
        wire.call("PUT", f"/v1/stream/__ds/subscriptions/{token[:60]}", {"Content-Type": JSON}, token)
        broken = request_bytes("GET", "/v1/streams", {"Authorization": f"Bearer {token}\x01"})
        for sent in (broken, b"nonsense " + token.encode() + b"\r\n\r\n"):
            with wire.connect() as connection:
                connection.send(sent)
                connection.at_end()  # refused, or left
    wire.close()
    call("PUT", "orders", headers={"Content-Type": JSON})
    call("POST", "orders", b"{not json", headers={"Content-Type": JSON})


def _wake(call: Caller) -> str:
    """The token of a claimed wake."""
    call("PUT", "wakes", headers={"Content-Type": JSON})
    config = {"type": "pull-wake", "streams": ["orders"], "wake_stream": "wakes"}
    assert call("PUT", "/v1/stream/__ds/subscriptions/s1", config).status == 201
    call("POST", "orders", [{"id": 1}])
    claimed: Any = eventually(
        lambda: call("POST", "/v1/stream/__ds/subscriptions/s1/claim", {"worker": "w"}).body,
        lambda body: "token" in body,
    )
    wrong = {"wake_id": claimed["wake_id"], "generation": 99, "done": True}
    call("POST", "/v1/stream/__ds/subscriptions/s1/ack", wrong, token=claimed["token"])
    return claimed["token"]


def test_no_command_shows_what_it_was_given(tmp_path: Path) -> None:
    """Failures are explained without the token or the secret that they are about."""
    token = create_token(SECRET, sub="x", scopes=["read"])
    env = {
        "TAILRACE_AUTH_JWT_SECRET": SECRET,
        "TAILRACE_TOKEN": token,
        "TAILRACE_ENDPOINT": "http://127.0.0.1:1",
    }
    commands = (
        ("read", "orders"),
        ("token", "revoke", token),
        ("key", "list"),
        ("token", "create", "--sub", "x", "--scope", "nonsense"),
        ("serve", "--host", "not an address", "--data-dir", str(tmp_path / "data")),
        ("edge", "--upstream", f"http://user:{PASSWORD}@127.0.0.1:1"),
        ("ls", "--endpoint", f"http://user:{PASSWORD}@127.0.0.1:1"),
    )
    for command in commands:
        done = tailrace(*command, env=env)
        assert done.code != 0
        assert SECRET not in done.out + done.err
        assert token not in done.out + done.err
        assert PASSWORD not in done.out + done.err
