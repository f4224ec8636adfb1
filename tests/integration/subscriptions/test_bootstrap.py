"""Subscriptions and webhook keys after the disk is lost: restored, with cursors that still mean something."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import StartServer
from support.calls import Caller, eventually
from support.hooks import Hook
from support.loss import ENV, JSON, bootstrap, destroy, post, put, seal
from support.server import ServerProcess

KEY = {"TAILRACE_RECOVERY_KEY": "the operator keeps this one safe, far from the bucket"}


@pytest.fixture
def hook() -> Iterator[Hook]:
    receiver = Hook()
    yield receiver
    receiver.close()


def control(subscription: str, rest: str = "") -> str:
    return f"__ds/subscriptions/{subscription}{rest}"


def claim(call: Caller, subscription: str) -> dict[str, Any]:
    def ask() -> Any:
        return call("POST", control(subscription, "/claim"), {"worker": "w"})

    return eventually(ask, lambda reply: reply.status == 200).body


def ack(call: Caller, subscription: str, claimed: dict[str, Any], *acks: tuple[str, str]) -> Any:
    body = {
        "wake_id": claimed["wake_id"],
        "generation": claimed["generation"],
        "acks": [{"stream": stream, "offset": offset} for stream, offset in acks],
        "done": True,
    }
    return call("POST", control(subscription, "/ack"), body, token=claimed["token"])


def cursors(call: Caller, subscription: str) -> dict[str, str]:
    return {item["path"]: item["acked_offset"] for item in call("GET", control(subscription)).body["streams"]}


def record(call: Caller) -> None:
    """Everything but entries gets to the object store."""
    eventually(lambda: call("POST", "/v1/server/_seal?stream=other").status, lambda status: status == 200)


def configure(call: Caller, hook: Hook) -> None:
    pull = {"type": "pull-wake", "pattern": "p/*", "streams": ["later"], "wake_stream": "wake/p"}
    assert call("PUT", control("pull"), {**pull, "description": "größer"}).status == 201
    push = {"type": "webhook", "pattern": "h/*", "webhook": {"url": hook.url}}
    assert call("PUT", control("%F0%9F%8C%8A%20wave"), push).status == 201
    assert call("PUT", control("gone"), push).status == 201
    assert call("DELETE", control("gone")).status == 204


@pytest.mark.parametrize("env", [KEY, {}], ids=["with a key", "without"])
def test_subscriptions_go_on_where_they_can(
    tmp_path: Path, start_server: StartServer, running: list[ServerProcess], hook: Hook, env: dict[str, str]
) -> None:
    url = (tmp_path / "bucket").as_uri()
    server = start_server("--object-store", url, env={**ENV, **env})
    call = Caller(server)
    for name in ("other", "wake/p"):
        put(call, name, JSON)
    configure(call, hook)
    put(call, "p/a", JSON, b"[1,2]")
    put(call, "h/a", JSON, b"[1]")
    first = claim(call, "pull")
    sealed = call("HEAD", "p/a").headers["stream-next-offset"]
    assert ack(call, "pull", first, ("p/a", sealed)).status == 200
    delivered = hook.next()
    seal(call)
    # An ack of entries that are never sealed gets to the bucket before them.
    lost = post(call, "p/a", b"[3,4]", JSON)
    second = claim(call, "pull")
    assert ack(call, "pull", second, ("p/a", lost)).status == 200
    record(call)
    keys = call("GET", "__ds/jwks.json").body
    shown = {name: call("GET", control(name)).body for name in ("pull", "%F0%9F%8C%8A%20wave")}
    assert cursors(call, "pull") == {"p/a": lost, "later": "-1"}
    destroy(server)

    again = bootstrap(tmp_path / "again", url, env).start()
    running.append(again)
    call = Caller(again)
    assert (call("GET", "__ds/jwks.json").body == keys) == bool(env)
    assert cursors(call, "pull") == {"p/a": sealed, "later": "-1"}
    for name, before in shown.items():
        after = call("GET", control(name)).body
        same = ("id", "type", "pattern", "wake_stream", "lease_ttl_ms", "created_at", "description")
        assert {key: after[key] for key in same} == {key: before[key] for key in same}
    assert call("GET", control("gone")).status == 404
    assert "2 subscriptions" in again.log
    # A worker of before is not taken for one of now.
    assert ack(call, "pull", second).code == ("FENCED" if env else "TOKEN_INVALID")
    new = post(call, "p/a", b"[5]", JSON)
    third = claim(call, "pull")
    assert third["generation"] > second["generation"]
    assert ack(call, "pull", third, ("p/a", new)).status == 200
    assert cursors(call, "pull")["p/a"] == new
    # The hook is called again for what it had not acknowledged.
    wake = hook.next()
    assert wake.body["generation"] > delivered.body["generation"]
    assert wake.tails() == delivered.tails()
    _lose_again(again, url, tmp_path, env, running, third["generation"])


def _lose_again(
    server: ServerProcess,
    url: str,
    tmp_path: Path,
    env: dict[str, str],
    running: list[ServerProcess],
    generation: int,
) -> None:
    """Nothing of the first recovery was recorded but what the bootstrap itself wrote."""
    destroy(server)
    last = bootstrap(tmp_path / "last", url, env).start()
    running.append(last)
    call = Caller(last)
    post(call, "p/a", b"[6]", JSON)
    assert claim(call, "pull")["generation"] > generation


def test_another_key_is_told_and_new_keys_are_made(
    tmp_path: Path, start_server: StartServer, running: list[ServerProcess]
) -> None:
    url = (tmp_path / "bucket").as_uri()
    server = start_server("--object-store", url, env={**ENV, **KEY})
    call = Caller(server)
    put(call, "other", JSON)
    record(call)
    keys = call("GET", "__ds/jwks.json").body
    destroy(server)
    again = bootstrap(tmp_path / "again", url, {"TAILRACE_RECOVERY_KEY": "x" * 32}).start()
    running.append(again)
    assert "not encrypted with this recovery_key" in again.log
    assert Caller(again)("GET", "__ds/jwks.json").body != keys


def test_a_key_that_is_set_later_is_used_at_once(
    tmp_path: Path, start_server: StartServer, running: list[ServerProcess]
) -> None:
    url = (tmp_path / "bucket").as_uri()
    server = start_server("--object-store", url, env=ENV)
    call = Caller(server)
    put(call, "other", JSON)
    record(call)
    written = tmp_path / "bucket" / "meta" / "webhook-keys.json"
    assert not written.exists()
    server.env |= KEY
    server.restart()
    keys = call("GET", "__ds/jwks.json").body
    eventually(written.exists, bool)
    destroy(server)
    again = bootstrap(tmp_path / "again", url, KEY).start()
    running.append(again)
    assert Caller(again)("GET", "__ds/jwks.json").body == keys


def test_a_change_of_subscriptions_alone_gets_to_the_bucket(
    tmp_path: Path, start_server: StartServer
) -> None:
    env = {**ENV, "TAILRACE_SEAL_AGE_MS": "200", "TAILRACE_SEAL_INTERVAL_MS": "50"}
    server = start_server("--object-store", (tmp_path / "bucket").as_uri(), env=env)
    call = Caller(server)
    assert (
        call("PUT", control("s"), {"type": "pull-wake", "streams": ["a"], "wake_stream": "w"}).status == 201
    )
    written = tmp_path / "bucket" / "meta" / "subscriptions" / "s.json"

    def links() -> list[str]:
        return (
            [link["stream"] for link in json.loads(written.read_bytes())["links"]] if written.exists() else []
        )

    eventually(links, lambda found: found == ["a"])
    assert call("POST", control("s", "/streams"), {"streams": ["b"]}).status == 204
    eventually(links, lambda found: sorted(found) == ["a", "b"])
    assert call("DELETE", control("s")).status == 204
    eventually(links, lambda found: found == [])
    assert json.loads(written.read_bytes())["config"] is None
