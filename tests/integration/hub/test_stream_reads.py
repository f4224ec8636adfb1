"""The hub's streams, read by HTTP: a token gets there what the hub itself would give it, and no more."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from typing import Any

import jwt
import pytest

from support.calls import Caller, eventually
from support.hub_client import registered
from support.server import ServerProcess
from support.wire import Wire, request_bytes

SECRET = "a-shared-secret-of-more-than-32-bytes!"
# Connections are spread by the kernel: so many reach both workers.
MANY = 8
TOPIC = "hub/topic/jobs/secret"
LIVE = (
    "?offset=-1",
    "?offset=now",
    "?offset=-1&live=long-poll",
    "?offset=-1&live=sse",
    "/_details",
    "/_search?q=x",
)


def token(sub: str, scope: str = "read write", **claims: Any) -> str:
    now_s = int(time.time())
    given = {"sub": sub, "scope": scope, "iat": now_s, "exp": now_s + 3600, **claims}
    return jwt.encode(given, SECRET, algorithm="HS256")


def rules(*subscribers: str) -> str:
    blind = {"match": "@(blind/*)", "discover": False}
    return json.dumps(
        {"actors": [blind], "topics": [{"topic": "jobs/secret", "subscribers": list(subscribers)}]}
    )


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two workers"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("hub")
    (directory / "rules.json").write_text(rules("@(svc/alice)"))
    env = {
        "TAILRACE_AUTH_JWT_SECRET": SECRET,
        "TAILRACE_HUB_POLICY": str(directory / "rules.json"),
        "TAILRACE_HUB_DURABLE_TOPICS": "jobs/*",
    }
    process = ServerProcess(directory / "data", args=("--workers", str(request.param)), env=env).start()
    boss = registered(process, "@(svc/boss)", token=token("svc/boss"))
    assert (
        boss.ask("hub:publish", {"topic": "jobs/secret", "type": "t", "data": 1})["type"] == "hub:published"
    )
    boss.close()
    yield process
    process.stop()


def by_hub(server: ServerProcess, sub: str) -> str:
    """What the hub answers to somebody who subscribes."""
    actor = registered(server, f"@({sub})", token=token(sub))
    answer = actor.ask("hub:subscribe", {"topic": "jobs/secret"})
    actor.close()
    return answer["payload"].get("code", "subscribed")


def test_topics_are_read_by_whom_the_hub_lets_subscribe(server: ServerProcess) -> None:
    alice, bob = Caller(server, token("svc/alice")), Caller(server, token("svc/bob"))
    assert (by_hub(server, "svc/alice"), by_hub(server, "svc/bob")) == ("subscribed", "unauthorized")
    for _ in range(MANY):
        assert [entry["payload"] for entry in alice("GET", f"{TOPIC}?offset=-1").body] == [1]
        for asked in LIVE:
            assert bob("GET", TOPIC + asked).code == "forbidden", asked
        assert bob("HEAD", TOPIC).status == 403
        fork = {"Stream-Forked-From": f"/v1/stream/{TOPIC}"}
        assert bob("PUT", "copy", headers=fork).code == "forbidden"
    operator = Caller(server, token("op", "manage"))
    assert operator("GET", f"{TOPIC}?offset=-1").status == 200


def test_the_registry_is_read_by_whom_the_hub_lets_discover(server: ServerProcess) -> None:
    blind = registered(server, "@(blind/1)", token=token("blind/1"))
    assert blind.ask("hub:discover", {"pattern": "*"})["payload"]["code"] == "unauthorized"
    blind.close()
    for _ in range(MANY):
        assert Caller(server, token("blind/1"))("GET", "hub/registry?offset=-1").code == "forbidden"
        assert Caller(server, token("svc/bob"))("GET", "hub/registry?offset=-1").status == 200
        for name in ("hub/dead-letters", "hub/audit", "hub/trace", "hub/broadcast/0"):
            assert Caller(server, token("svc/bob"))("GET", f"{name}?offset=-1").code == "forbidden"


def test_readers_that_new_rules_do_not_allow_are_sent_away(server: ServerProcess) -> None:
    bearer = {"Authorization": f"Bearer {token('svc/carol')}"}
    policy = server.data_dir.parent / "rules.json"
    policy.write_text(rules("@(svc/alice)", "@(svc/carol)"))
    server.signal(signal.SIGHUP)
    carol = Caller(server, token("svc/carol"))
    eventually(lambda: carol("GET", f"{TOPIC}?offset=-1").status, lambda status: status == 200)
    with Wire(server.port).connect() as events, Wire(server.port).connect() as poll:
        events.send(request_bytes("GET", f"/v1/stream/{TOPIC}?offset=now&live=sse", bearer))
        assert events.read_head().status == 200
        poll.send(
            request_bytes("GET", f"/v1/stream/{TOPIC}?offset=now&live=long-poll&timeout_ms=60000", bearer)
        )
        policy.write_text(rules("@(svc/alice)"))
        server.signal(signal.SIGHUP)
        assert poll.read_head().status == 403
        while events.read_chunk():
            pass  # it ends
