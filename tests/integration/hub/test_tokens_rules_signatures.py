"""The hub of a server with tokens, rules and signatures, set up as an operator would."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
from websockets.sync.client import connect

from support.hub_client import Actor, registered
from support.hub_clients import QUICK, next_of
from support.server import ServerProcess
from tailrace.client import ClientError
from tailrace.client.hub import Hub, SigningKey

SECRET = "a-shared-secret-of-more-than-32-bytes!"


def token(sub: str, **claims: Any) -> str:
    now_s = int(time.time())
    given = {"sub": sub, "scope": "read write", "iat": now_s, "exp": now_s + 3600, **claims}
    return jwt.encode(given, SECRET, algorithm="HS256")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "rules.json").write_text(rules("@(shared/*)", "@(browser/*)"))
    now_ms = int(time.time() * 1000)
    keys = {f"@({path})": [key_of(path, now_ms)] for path in ("signed/a", "signed/b", "op")}
    (tmp_path / "keys.json").write_text(json.dumps(keys))
    return tmp_path


def rules(*register: str) -> str:
    return json.dumps({"actors": [{"match": "@(browser/*)", "register": list(register)}]})


def key_of(path: str, now_ms: int) -> dict[str, Any]:
    return {"id": "k1", "secret": path.encode().ljust(32, b"-").hex(), "createdAt": now_ms, "retiredAt": None}


def serve(directory: Path, **more: str) -> ServerProcess:
    env = {
        "TAILRACE_AUTH_JWT_SECRET": SECRET,
        "TAILRACE_HUB_POLICY": str(directory / "rules.json"),
        "TAILRACE_HUB_KEYS": str(directory / "keys.json"),
    }
    return ServerProcess(directory / "data", env=env | more).start()


def test_a_reload_ends_the_sessions_that_the_new_rules_do_not_allow(directory: Path) -> None:
    server = serve(directory)
    try:
        stays = registered(server, "@(browser/1)", token=token("browser/1"))
        goes = Actor(server, "@(browser/2)", token=token("browser/2"))
        goes.register("@(shared/x)")
        (directory / "rules.json").write_text("nonsense")
        server.signal(signal.SIGHUP)
        (directory / "rules.json").write_text(rules("@(browser/*)"))
        server.signal(signal.SIGHUP)
        assert goes.of("hub:disconnect")["payload"]["reason"] == "unauthorized"
        assert goes.closed() == 1008
        assert stays.quiet() == []
        again = Actor(server, "@(browser/2)", token=token("browser/2"))
        refused = again.ask("hub:register", {"actorAddress": "@(shared/x)", "capabilities": ["x"]})
        assert refused["payload"]["code"] == "unauthorized"
        again.close()
        stays.close()
    finally:
        server.stop()


def test_tokens_grow_old_and_new_ones_are_made(directory: Path) -> None:
    server = serve(directory, TAILRACE_HUB_MINT_TOKENS="yes")
    try:
        now_s = int(time.time())
        old = Actor(server, "@(svc/a)", token=token("svc/a", iat=now_s - 2 * 86_400))
        assert old.connected["payload"]["details"]["reason"] == "the token was issued too long ago"
        assert old.closed() == 1008
        first = token("svc/a", jti="first")
        actor = Actor(server, "@(svc/a)", token=first)
        given = actor.ask("hub:refresh_token", {"token": first})["payload"]
        claims = jwt.decode(given["token"], SECRET, algorithms=["HS256"])
        assert (claims["sub"], claims["jti"] != "first") == ("svc/a", True)
        assert given["tokenExpiresAt"] == claims["exp"] * 1000
        again = actor.ask("hub:refresh_token", {"token": given["token"]})["payload"]
        assert (again["code"], again["details"]["kind"]) == ("rate_limited", "refresh")
        second = Actor(server, "@(svc/a)", token=given["token"])
        assert second.connected["metadata"]["actorIdentity"] == "@(svc/a)"
        assert actor.of("hub:disconnect")["payload"]["reason"] == "duplicate_connection"
        stranger = second.ask("hub:refresh_token", {"token": token("svc/b")})["payload"]
        assert stranger["code"] == "unauthorized"
        second.close()
    finally:
        server.stop()


def test_signatures_where_they_are_required(directory: Path) -> None:
    server = serve(directory, TAILRACE_HUB_SIGNATURES="required")
    try:
        unsigned = Actor(server, "@(signed/a)", token=token("signed/a"))
        assert unsigned.connected["payload"]["code"] == "invalid_signature"
        assert unsigned.closed() == 1008

        def opened(path: str, secret_of: str | None = None) -> Hub:
            secret = (secret_of or path).encode().ljust(32, b"-")
            key = SigningKey(secret, "k1")
            return Hub(server.base_url, token=token(path), retries=QUICK, signing_key=key)

        with pytest.raises(ClientError) as forged:
            opened("signed/a", "signed/b").__enter__()
        assert forged.value.code == "invalid_signature"
        with opened("signed/a") as one, opened("signed/b") as two:
            two.register()
            one.send("@(signed/b)", "t", 1, ack="delivered")
            message = next_of(two)
            assert (message.sender, message.metadata["verified"]) == ("@(signed/a)", "hmac")
    finally:
        server.stop()


def test_messages_are_compressed_where_that_is_asked_for(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data", env={"TAILRACE_HUB_DEFLATE": "yes"}).start()
    try:
        url = f"ws://127.0.0.1:{server.port}/hub/ws"
        with connect(url, compression="deflate", max_size=None) as socket:
            assert socket.response is not None
            assert "permessage-deflate" in socket.response.headers["Sec-WebSocket-Extensions"]
            frame = {"id": "1", "from": "@(z/a)", "type": "hub:connect", "timestamp": int(time.time() * 1000)}
            frame |= {"pattern": "ask", "metadata": {"protocolVersion": "0.1.0", "capabilities": ["x"]}}
            socket.send(json.dumps(frame))
            assert json.loads(socket.recv(timeout=30))["type"] == "hub:connected"
            register = {"actorAddress": "@(z/a)", "capabilities": ["x"]}
            socket.send(json.dumps(frame | {"id": "2", "type": "hub:register", "payload": register}))
            assert json.loads(socket.recv(timeout=30))["type"] == "hub:registered"
            payload = {"to": "@(z/a)", "type": "t", "data": "x" * 500_000}
            socket.send(json.dumps(frame | {"id": "3", "type": "hub:send", "payload": payload}))
            kinds = [json.loads(socket.recv(timeout=30))["type"] for _ in range(2)]
            assert sorted(kinds) == ["hub:delivery_ack", "t"]
    finally:
        server.stop()
