"""A server behind a proxy: it writes the URLs that clients know, and counts clients, not the proxy."""

from __future__ import annotations

import json

import pytest

from conftest import StartServer
from support.calls import Caller
from support.server import ServerProcess
from support.wire import fresh
from tailrace.auth import create_token

SECRET = "a secret that is long enough for HS256, 32 bytes"
SAID = {"X-Forwarded-Proto": "https", "X-Forwarded-Host": "api.example"}
HOOK = {"type": "webhook", "pattern": "a/*", "webhook": {"url": "http://127.0.0.1:9/hook"}}


@pytest.mark.parametrize("workers", ["1", "2"])
def test_urls_are_those_of_a_trusted_proxy(start_server: StartServer, workers: str) -> None:
    trusting = Caller(start_server("--trusted-proxies", "127.0.0.0/8", "--workers", workers))
    wary = Caller(start_server("--trusted-proxies", "192.0.2.1", "--workers", workers))
    for call, base in ((trusting, "https://api.example/"), (wary, "http://127.0.0.1:")):
        for _ in range(4):
            assert call("PUT", fresh("proxied"), headers=SAID).headers["location"].startswith(base)
        made = call("PUT", "/v1/stream/__ds/subscriptions/s", HOOK, headers=SAID)
        assert made.status == 201, made.raw
        assert base in json.dumps(made.body)
        assert call("GET", "/hub/shards", headers=SAID).body["shards"][0]["url"].startswith("ws" + base[4:])


def read_for(server: ServerProcess, client: str) -> int:
    return Caller(server)("GET", "news/1?offset=-1", headers={"X-Forwarded-For": client}).status


def test_public_readers_are_counted_by_their_own_address(start_server: StartServer) -> None:
    env = {
        "TAILRACE_AUTH_JWT_SECRET": SECRET,
        "TAILRACE_AUTH_PUBLIC_STREAMS": "news/",
        "TAILRACE_IDENTITY_OPS_PER_S": "1",
        "TAILRACE_LOG_REQUESTS": "all",
    }
    for trusted, statuses in (("127.0.0.1", {200}), ("", {200, 429})):
        server = start_server(env={**env, "TAILRACE_TRUSTED_PROXIES": trusted})
        writer = Caller(server, create_token(SECRET, sub="w", scopes=["write"]))
        assert writer("PUT", "news/1", [1]).status == 201
        seen = {read_for(server, f"203.0.113.{number}") for number in range(20)}
        assert seen == statuses
        assert ("203.0.113.7" in server.log) == bool(trusted)
        # One client has as many addresses of IPv6 as it likes, and is counted once.
        one = {read_for(server, f"2001:db8::{number}") for number in range(20)}
        assert 429 in one
