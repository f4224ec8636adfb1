"""Two workers behind TLS, with tokens and a listener for metrics; and how they stop."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jwt
import pytest

from support.ports import free_port
from support.server import ServerProcess
from support.workers import names_of

SECRET = "0123456789abcdef0123456789abcdef"
WORKERS = 2
JSON = {"Content-Type": "application/json"}


class TlsServer(ServerProcess):
    """Asked for its readiness over TLS, as it is served."""

    def connection(self) -> http.client.HTTPSConnection:
        context = ssl.create_default_context(cafile=str(self.data_dir / "tls" / "cert.pem"))
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=60, context=context)

    def status(self, path: str, method: str = "GET") -> int | None:
        try:
            return self.call(method, path)[0]
        except (OSError, http.client.HTTPException):
            return None

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        token: str = "",
    ) -> tuple[int, Mapping[str, str], Any]:
        sent = dict(headers or {}) | ({"Authorization": f"Bearer {token}"} if token else {})
        connection = self.connection()
        try:
            raw = None if body is None else json.dumps(body)
            connection.request(method, path, raw, sent)
            response = connection.getresponse()
            data = response.read()
            found = {name.lower(): value for name, value in response.getheaders()}
            is_json = found.get("content-type", "").startswith("application/json")
            return response.status, found, json.loads(data) if data and is_json else data
        finally:
            connection.close()


def token(scope: str, **claims: Any) -> str:
    return jwt.encode({"sub": "ada", "scope": scope, "exp": 4_000_000_000, **claims}, SECRET, "HS256")


@pytest.fixture(scope="module")
def metrics_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, metrics_port: int) -> Iterator[TlsServer]:
    flags = ("--workers", str(WORKERS), "--tls-self-signed", "--metrics-port", str(metrics_port))
    env = {"TAILRACE_AUTH_JWT_SECRET": SECRET}
    process = TlsServer(tmp_path_factory.mktemp("door") / "data", args=flags, env=env)
    process.start()
    yield process
    if process.running:
        process.stop()


def names(prefix: str) -> list[str]:
    return [next(names_of(worker, WORKERS, prefix)) for worker in range(WORKERS)]


def test_relayed_requests_know_how_their_client_came(server: TlsServer) -> None:
    writer = token("write read")
    for name in names("secure/"):
        path = f"/v1/stream/{name}"
        status, headers, _ = server.call("PUT", path, [1], JSON, writer)
        assert (status, headers["location"]) == (201, f"https://127.0.0.1:{server.port}{path}")
        for _ in range(8):
            assert server.call("POST", path, 2, JSON, writer)[0] == 204
            assert server.call("GET", f"{path}?offset=-1", token=writer)[2][0] == 1


def test_every_worker_asks_for_tokens(server: TlsServer) -> None:
    mine, manager = token("write read", streams=["mine/"]), token("manage")
    own, other = names("mine/"), names("other/")
    for name in own:
        assert server.call("PUT", f"/v1/stream/{name}", [1], JSON, mine)[0] == 201
    for name in other:
        assert server.call("PUT", f"/v1/stream/{name}", [1], JSON, mine)[0] == 403
        assert server.call("PUT", f"/v1/stream/{name}", [1], JSON)[0] == 401
        assert server.call("PUT", f"/v1/stream/{name}", [1], JSON, manager)[0] == 201
        fork = {"Stream-Forked-From": f"/v1/stream/{name}"}
        for target in (*names("mine/fork"), *names("fork/")):
            assert server.call("PUT", f"/v1/stream/{target}", None, fork, mine)[0] == 403
    for _ in range(8):
        assert server.call("GET", "/v1/streams")[0] == 401
        seen = [one["name"] for one in server.call("GET", "/v1/streams", token=mine)[2]]
        assert seen == sorted(own)
        assert server.call("GET", "/metrics", token=mine)[0] == 403


def test_metrics_have_a_listener_of_their_own(server: TlsServer, metrics_port: int) -> None:
    context = ssl.create_default_context(cafile=str(server.data_dir / "tls" / "cert.pem"))
    for path, wanted in (("metrics", 'tailrace_worker_up{worker="1"} 1'), ("readyz", '"worker":1')):
        url = f"https://127.0.0.1:{metrics_port}/{path}"
        with urllib.request.urlopen(url, context=context, timeout=60) as answer:
            assert wanted in answer.read().decode()


def test_live_readers_are_told_to_come_back_when_all_stop(server: TlsServer) -> None:
    """TLS connections are never handed over: some of these are relayed to the end."""
    writer, readers = token("write read"), []
    for name in names("last/"):
        server.call("PUT", f"/v1/stream/{name}", [1], JSON, writer)
        for _ in range(6):
            connection = server.connection()
            path = f"/v1/stream/{name}?offset=-1&live=sse"
            connection.request("GET", path, headers={"Authorization": f"Bearer {writer}"})
            response = connection.getresponse()
            assert response.readline() == b"event: data\n"
            readers.append((connection, response))

    def read(connection: http.client.HTTPSConnection, response: http.client.HTTPResponse) -> None:
        response.read()  # raises if it was cut off in the middle
        connection.close()

    with ThreadPoolExecutor(len(readers)) as reading:
        ends = [reading.submit(read, *reader) for reader in readers]
        server.stop()
        for end in ends:
            end.result()
