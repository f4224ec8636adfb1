"""Who may do what, over which connection: tokens, claims, TLS, and the rule that guards an open server."""

from __future__ import annotations

import datetime
import ipaddress
import json
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from support.cli import tailrace
from support.server import ServerProcess
from support.wire import Wire, fresh, request_bytes
from tailrace.auth.tokens import LEEWAY_S, create_token
from tailrace.common.clock import FakeClock

JSON, TEXT = "application/json", "text/plain"
SECRET = "a secret that is long enough for HS256, 32 bytes"

Login = Callable[..., Wire]


def token(*scopes: str, streams: list[str] | None = None, lifetime_s: int = 600) -> str:
    return create_token(SECRET, sub="tester", scopes=scopes, streams=streams, lifetime_s=lifetime_s)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("guarded") / "data"
    process = ServerProcess(directory, args=["--auth-jwt-secret", SECRET]).start()
    yield process
    process.stop()


@pytest.fixture
def login(guarded: ServerProcess) -> Iterator[Login]:
    wires: list[Wire] = []

    def open_wire(*scopes: str, streams: list[str] | None = None) -> Wire:
        bearer = token(*scopes, streams=streams) if scopes else None
        wires.append(Wire(guarded.port, bearer=bearer))
        return wires[-1]

    yield open_wire
    for wire in wires:
        wire.close()


CALLS = {
    "read": [
        ("GET", "{name}"),
        ("HEAD", "{name}"),
        ("GET", "{name}/pk/k"),
        ("GET", "{name}?offset=-1&live=long-poll"),
        ("GET", "{name}?offset=-1&live=sse"),
        ("GET", "{name}?offset=-1&live=ws"),
        ("GET", "/v1/streams"),
        ("GET", "{name}/_schema"),
        ("GET", "{name}/_details"),
        ("GET", "{name}/_index_status"),
        ("GET", "{name}/_routing_keys"),
    ],
    "write": [("PUT", "{name}"), ("POST", "{name}")],
    "manage": [
        ("DELETE", "{name}"),
        ("GET", "/metrics"),
        ("GET", "/v1/streams?system=true"),
        ("POST", "{name}/_schema"),
        ("GET", "/v1/server/_details"),
        ("GET", "/v1/server/_mem"),
    ],
}
OPEN = ["/healthz", "/health", "/readyz"]


@pytest.mark.parametrize("scope", CALLS)
def test_every_route_asks_for_its_scope(login: Login, scope: str) -> None:
    manager = login("manage")
    name = fresh()
    assert manager.put(name, TEXT, "x").status == 201
    for target in (name, fresh()):
        for method, template in CALLS[scope]:
            path = template.format(name=target)
            body = b"x" if method in ("PUT", "POST") else None
            anonymous = login().call(method, path, {"Content-Type": TEXT}, body)
            assert anonymous.status == 401
            assert anonymous["www-authenticate"].startswith("Bearer")
            for other in {"read", "write", "system"} - {scope}:
                refused = login(other).call(method, path, {"Content-Type": TEXT}, body)
                assert refused.status == 403, (other, method, path)
                assert refused.code in ("forbidden", None)
    # Refused before existence is revealed: the stream that is there and the one that is not answer alike.
    assert manager.get(name).body == b"x"


def test_what_everybody_may_ask(login: Login) -> None:
    anonymous = login()
    for path in OPEN:
        assert anonymous.get(path).status == 200
    name = fresh()
    login("manage").put(name, TEXT)
    login("manage").get(name)
    for path in (f"/v1/stream/{name}", f"/v1/stream/{fresh()}", "/v1/streams", "/metrics", "/nowhere"):
        assert anonymous.call("OPTIONS", path).status == 204, "a preflight carries no token"
    assert anonymous.get("/v1/stream/__ds/jwks.json").status == 200


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "Basic dXNlcjpwYXNz",
        "Bearer x",
        "Bearer a.b.c",
        "bearer  ",
        b"Bearer \xff\xfe",
        "Bearer " + "a" * 20_000,
    ],
)
def test_headers_that_are_no_token(guarded: ServerProcess, header: str | bytes) -> None:
    wire = Wire(guarded.port)
    answer = wire.get("/v1/streams", {"Authorization": header})
    assert (answer.status, answer.code) == (401, "unauthorized")
    assert answer["www-authenticate"].startswith("Bearer")
    wire.close()


def test_tokens_that_do_not_count(guarded: ServerProcess) -> None:
    good = token("read")
    header, payload, signature = good.split(".")
    forged = create_token("another secret that is long enough as well", sub="x", scopes=["manage"])
    unsigned = "eyJhbGciOiJub25lIiwidHlwIjoiSldUIn0." + payload + "."
    wire = Wire(guarded.port)
    for bad in (
        forged,
        unsigned,
        f"{header}.{payload}.{signature[:-4]}AAAA",
        f"{header}.{payload}",
        good + "x",
    ):
        assert wire.get("/v1/streams", {"Authorization": f"Bearer {bad}"}).status == 401
    assert wire.get("/v1/streams", {"Authorization": f"Bearer {good}"}).status == 200
    assert wire.get("/v1/streams", {"Authorization": f"bEARER {good}"}).status == 200
    twice = [("Authorization", f"Bearer {good}"), ("Authorization", f"Bearer {good}")]
    assert wire.get("/v1/streams", twice).status in (400, 401)
    assert good not in guarded.log
    wire.close()


def test_a_prefix_claim(login: Login) -> None:
    manager = login("manage")
    prefix = fresh("claimed")
    inside, outside = f"{prefix}/in", f"{prefix}-out"
    for name in (inside, outside):
        manager.put(name, TEXT, "x")
    limited = login("read", "write", streams=[f"{prefix}/"])
    assert limited.get(inside).body == b"x"
    assert limited.post(inside, TEXT, "y").status == 204
    assert limited.put(f"{prefix}/new", TEXT).status == 201
    for answer in (
        limited.get(outside),
        limited.head(outside),
        limited.post(outside, TEXT, "y"),
        limited.put(f"{prefix}-new", TEXT),
        limited.put(f"{prefix}/fork", stream_forked_from=outside),
        limited.put(f"{prefix}-fork", stream_forked_from=inside),
        limited.get(f"{prefix}-none"),
        limited.get("__registry__"),
        limited.get(f"{outside}/pk/k"),
    ):
        assert answer.status == 403
    assert limited.put(f"{prefix}/fork", stream_forked_from=inside).status == 201
    assert login("manage", streams=[f"{prefix}/"]).delete(outside).status == 403
    assert login("write", streams=[f"{prefix}/"]).put(f"{prefix}/f2", stream_forked_from=inside).status == 403


def test_listings_show_what_the_claim_covers(login: Login) -> None:
    manager = login("manage")
    prefix = fresh("shown")
    for letter in "abcdef":
        for number in range(3):
            manager.put(f"{prefix}/{letter}/{number}", TEXT)
    claimed = login("read", streams=[f"{prefix}/e/", f"{prefix}/b/", f"{prefix}/b/1", "nothing/"])
    expected = [f"{prefix}/{letter}/{number}" for letter in "be" for number in range(3)]

    def listed(query: str) -> list[str]:
        return [row["name"] for row in claimed.get(f"/v1/streams?{query}").json]

    assert listed("") == expected
    assert listed(f"prefix={prefix}/e") == expected[3:]
    assert listed(f"prefix={prefix}/c") == []
    found: list[str] = []
    while page := listed(f"limit=2&after={found[-1] if found else ''}"):
        assert len(page) == 2
        found += page
    assert found == expected
    assert "link" in claimed.get("/v1/streams?limit=5")
    assert "link" not in claimed.get("/v1/streams?limit=6")
    assert claimed.get("/v1/streams?system=true").status == 403


def test_system_streams_and_tokens(login: Login) -> None:
    assert login("read").get("__registry__").status == 200
    assert login("manage").get("__registry__").status == 200
    assert login("write").get("__registry__").status == 403
    for path in ("__changes__/x", "__deliveries__/x", "__subs__/x"):
        assert login("read").get(path).status == 403
        assert login("manage").get(path).status == 404
    for method in ("PUT", "POST", "DELETE"):
        assert login("manage").call(method, "__registry__", {"Content-Type": JSON}, b"[1]").status == 405


def test_cached_answers_are_private(login: Login) -> None:
    http = login("manage")
    name = fresh()
    http.put(name, TEXT, "x", stream_closed="true")
    assert http.get(name)["cache-control"] == "private, max-age=31536000, immutable"
    assert http.get(f"{name}?offset=-1&live=long-poll")["cache-control"] == "private, max-age=20"


def test_live_connections_end_with_their_token(guarded: ServerProcess, login: Login) -> None:
    http = login("manage")
    name = fresh()
    http.put(name, TEXT)
    # Tokens are accepted for a little while after they end, to allow for clocks that differ.
    clock = FakeClock(time.time_ns() - int(LEEWAY_S) * 10**9)
    ending = create_token(SECRET, sub="t", scopes=["read"], lifetime_s=5, clock=clock)
    short = {"Authorization": f"Bearer {ending}"}
    url = f"ws://127.0.0.1:{guarded.port}/v1/stream/{name}?offset=-1&live=ws"
    with (
        Wire(guarded.port).events(f"{name}?offset=-1&live=sse", short) as events,
        connect(url, additional_headers=short) as socket,
    ):
        events.control()
        socket.recv(timeout=20)
        assert events.next() is None
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=20)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1008


def test_a_websocket_needs_a_token_too(guarded: ServerProcess, login: Login) -> None:
    name = fresh()
    login("manage").put(name, TEXT)
    url = f"ws://127.0.0.1:{guarded.port}/v1/stream/{name}?offset=-1&live=ws"
    with pytest.raises(InvalidStatus) as refused, connect(url):
        pass
    assert refused.value.response.status_code == 401


# -- the listener


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com"])
def test_an_open_server_stays_on_this_machine(tmp_path: Path, host: str) -> None:
    done = tailrace("serve", "--host", host, "--port", "0", "--data-dir", str(tmp_path / "data"))
    assert done.code != 0
    assert "authentication" in done.err
    assert "--insecure" in done.err


class OpenProcess(ServerProcess):
    """Listens on every address."""

    def arguments(self) -> list[str]:
        return ["0.0.0.0" if word == "127.0.0.1" else word for word in super().arguments()]


@pytest.mark.parametrize("args", [("--insecure",), ("--auth-jwt-secret", SECRET)])
def test_with_a_guard_it_may_listen_everywhere(tmp_path: Path, args: tuple[str, ...]) -> None:
    server = OpenProcess(tmp_path / "data", args=args).start()
    assert server.status("/healthz") == 200
    server.stop()


def self_signed(directory: Path) -> tuple[str, str, ssl.SSLContext]:
    """Certificate, key, and a client that trusts them."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = directory / "cert.pem", directory / "key.pem"
    cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    key_file.write_bytes(private)
    return str(cert_file), str(key_file), ssl.create_default_context(cafile=str(cert_file))


def test_tls_by_files(tmp_path: Path) -> None:
    cert, key, context = self_signed(tmp_path)
    server = ServerProcess(tmp_path / "data", args=["--tls-cert", cert, "--tls-key", key]).start(ready=False)
    deadline = time.monotonic() + 60
    while "tailrace ready" not in server.log:
        assert time.monotonic() < deadline, server.log
        time.sleep(0.02)
    assert "https://127.0.0.1" in server.log
    http = Wire(server.port, tls=context)
    name = fresh()
    assert http.put(name, JSON)["location"] == f"https://tailrace.test/v1/stream/{name}"
    body = json.dumps(["x" * 1000] * 300)
    for _ in range(10):
        assert http.post(name, JSON, body).status == 204
    assert len(http.get(name).json) > 900
    with http.events(f"{name}?offset=now&live=sse") as events:
        events.control()
        http.post(name, JSON, "[1]")
        assert events.data() == b"[1]"
        with connect(
            f"wss://127.0.0.1:{server.port}/v1/stream/{name}?offset=now&live=ws", ssl=context
        ) as socket:
            assert json.loads(socket.recv(timeout=20))["upToDate"] is True
    plain = Wire(server.port)
    with plain.connect() as connection:
        connection.send(request_bytes("GET", "/healthz"))
        assert connection.at_end(), "no plain HTTP on a TLS port"
    http.close()
    server.stop()


@pytest.mark.parametrize("given", ["cert", "key", "missing", "swapped"])
def test_tls_files_that_do_not_fit(tmp_path: Path, given: str) -> None:
    cert, key, _ = self_signed(tmp_path)
    args = {
        "cert": ["--tls-cert", cert],
        "key": ["--tls-key", key],
        "missing": ["--tls-cert", str(tmp_path / "none"), "--tls-key", key],
        "swapped": ["--tls-cert", key, "--tls-key", cert],
    }[given]
    done = tailrace("serve", "--port", "0", "--data-dir", str(tmp_path / "data"), *args)
    assert done.code != 0
    assert "Traceback" not in done.err
    assert "tls" in done.err.lower() or "certificate" in done.err.lower()
