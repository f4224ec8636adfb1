from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, NoReturn

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt import algorithms

from tailrace.auth import TokenVerifier, jwks
from tailrace.common.clock import FakeClock
from tailrace.common.errors import TailraceError
from tailrace.common.settings import Settings


def public_jwk(key: ed25519.Ed25519PrivateKey, **more: Any) -> dict[str, Any]:
    return {**algorithms.OKPAlgorithm.to_jwk(key.public_key(), as_dict=True), **more}


class KeyServer:
    """An issuer: a real HTTP server whose answer tests can change."""

    def __init__(self) -> None:
        self.status = 200
        self.body = b"{}"
        self.requests = 0
        self.gate = threading.Event()
        self.gate.set()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.requests += 1
                owner.gate.wait(10)
                self.send_response(owner.status)
                if owner.status == 302:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", str(len(owner.body)))
                self.end_headers()
                self.wfile.write(owner.body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/jwks.json"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def publish(self, *keys: dict[str, Any]) -> None:
        self.body = json.dumps({"keys": list(keys)}).encode()

    def close(self) -> None:
        self.gate.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def issuer() -> Iterator[KeyServer]:
    server = KeyServer()
    yield server
    server.close()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def verifier(issuer: KeyServer, clock: FakeClock) -> Iterator[TokenVerifier]:
    check = TokenVerifier(Settings(auth_jwks_url=issuer.url), clock)
    yield check
    issuer.gate.set()
    check.close()


def bearer(key: ed25519.Ed25519PrivateKey, key_id: str) -> bytes:
    return (
        b"Bearer " + jwt.encode({"scope": "read"}, key, algorithm="EdDSA", headers={"kid": key_id}).encode()
    )


def code_of(check: TokenVerifier, header: bytes) -> str:
    with pytest.raises(TailraceError) as caught:
        check.verify(header)
    return caught.value.code


def test_keys_come_from_the_url(issuer: KeyServer, verifier: TokenVerifier) -> None:
    key = ed25519.Ed25519PrivateKey.generate()
    issuer.publish(public_jwk(key, kid="one"))
    verifier.start()
    assert verifier.wait_keys(60)
    assert verifier.verify(bearer(key, "one")).scopes == {"read"}
    assert issuer.requests == 1


def test_until_the_first_keys_arrive_tokens_are_neither_good_nor_bad(
    issuer: KeyServer, verifier: TokenVerifier
) -> None:
    key = ed25519.Ed25519PrivateKey.generate()
    issuer.publish(public_jwk(key, kid="one"))
    issuer.gate.clear()
    verifier.start()
    assert code_of(verifier, bearer(key, "one")) == "unavailable"
    issuer.gate.set()
    assert verifier.wait_keys(60)
    assert verifier.verify(bearer(key, "one"))


def test_an_unknown_key_id_fetches_at_most_once_per_interval(
    issuer: KeyServer, verifier: TokenVerifier, clock: FakeClock
) -> None:
    old, new = ed25519.Ed25519PrivateKey.generate(), ed25519.Ed25519PrivateKey.generate()
    issuer.publish(public_jwk(old, kid="old"))
    verifier.start()
    assert verifier.wait_keys(60)
    issuer.publish(public_jwk(old, kid="old"), public_jwk(new, kid="new"))
    # Just fetched: whoever makes up key ids does not make us fetch again.
    for number in range(5):
        assert code_of(verifier, bearer(new, f"made-up-{number}")) == "unauthorized"
    assert issuer.requests == 1
    clock.advance(jwks.REFRESH_INTERVAL_S_MIN)
    assert code_of(verifier, bearer(new, "new")) == "unavailable"
    assert verifier.wait_keys(60)
    assert issuer.requests == 2
    assert verifier.verify(bearer(new, "new"))
    assert verifier.verify(bearer(old, "old"))


def test_a_withdrawn_key_ends_what_it_vouched_for(
    issuer: KeyServer, verifier: TokenVerifier, clock: FakeClock
) -> None:
    old, new = ed25519.Ed25519PrivateKey.generate(), ed25519.Ed25519PrivateKey.generate()
    issuer.publish(public_jwk(old, kid="old"))
    verifier.start()
    assert verifier.wait_keys(60)
    header = bearer(old, "old")
    assert verifier.verify(header) is verifier.verify(header)
    issuer.publish(public_jwk(new, kid="new"))
    clock.advance(jwks.REFRESH_INTERVAL_S_MIN)
    assert code_of(verifier, bearer(new, "new")) == "unavailable"
    assert verifier.wait_keys(60)
    assert code_of(verifier, header) == "unauthorized"


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (500, b"{}"),
        (302, b""),
        (200, b"not json"),
        (200, b" " * (jwks.DOCUMENT_BYTES_MAX + 1)),
        (200, b'{"keys":[]}'),
    ],
)
def test_a_failing_issuer_does_not_lock_anyone_out(
    issuer: KeyServer, verifier: TokenVerifier, clock: FakeClock, status: int, body: bytes
) -> None:
    key = ed25519.Ed25519PrivateKey.generate()
    issuer.publish(public_jwk(key, kid="one"))
    verifier.start()
    assert verifier.wait_keys(60)
    issuer.status, issuer.body = status, body
    clock.advance(jwks.REFRESH_INTERVAL_S_MIN)
    assert code_of(verifier, bearer(key, "two")) == "unavailable"
    assert verifier.wait_keys(60)
    assert issuer.requests == 2
    assert verifier.verify(bearer(key, "one"))
    assert code_of(verifier, bearer(key, "two")) == "unauthorized"


def test_an_issuer_that_is_down_at_the_start(verifier: TokenVerifier, issuer: KeyServer) -> None:
    issuer.status = 503
    verifier.start()
    assert verifier.wait_keys(60)
    assert code_of(verifier, bearer(ed25519.Ed25519PrivateKey.generate(), "one")) == "unavailable"


def test_no_failure_ends_the_looks_at_the_key_set(
    issuer: KeyServer, verifier: TokenVerifier, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that nobody has thought of: the next look finds the new key."""
    old, new = ed25519.Ed25519PrivateKey.generate(), ed25519.Ed25519PrivateKey.generate()
    issuer.publish(public_jwk(old, kid="one"))
    verifier.start()
    assert verifier.wait_keys(60)
    issuer.publish(public_jwk(new, kid="two"))

    def fail(document: bytes) -> NoReturn:
        raise RuntimeError("a defect")

    with monkeypatch.context() as patched:
        patched.setattr(jwks, "parse_key_set", fail)
        clock.advance(jwks.REFRESH_INTERVAL_S_MIN)
        assert code_of(verifier, bearer(new, "two")) == "unavailable"
        assert verifier.wait_keys(60)
    assert verifier.verify(bearer(old, "one"))
    clock.advance(2 * jwks.REFRESH_INTERVAL_S_MIN)
    assert code_of(verifier, bearer(new, "two")) == "unavailable"
    assert verifier.wait_keys(60)
    assert verifier.verify(bearer(new, "two"))


def test_a_slow_issuer_is_given_up(issuer: KeyServer) -> None:
    issuer.gate.clear()
    with pytest.raises(OSError):
        jwks.fetch(issuer.url, timeout_s=0.05)


def test_fetch_is_bounded(issuer: KeyServer) -> None:
    issuer.body = b"x" * (jwks.DOCUMENT_BYTES_MAX + 1)
    with pytest.raises(ValueError, match="larger"):
        jwks.fetch(issuer.url)
    issuer.body = b"x" * jwks.DOCUMENT_BYTES_MAX
    assert len(jwks.fetch(issuer.url)) == jwks.DOCUMENT_BYTES_MAX


def test_only_fitting_keys_are_bound() -> None:
    edwards = ed25519.Ed25519PrivateKey.generate()
    weak = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    other_curve = ec.generate_private_key(ec.SECP384R1())
    refused = [
        public_jwk(edwards, kid="enc", use="enc"),
        public_jwk(edwards, kid="alg", alg="ES256"),
        public_jwk(edwards, kid="ops", key_ops=["sign"]),
        public_jwk(edwards, kid=7),
        {"kty": "OKP", "crv": "Ed25519", "kid": "x", "x": "short"},
        {"kty": "OKP", "crv": ["Ed25519"], "kid": "x"},
        {"kty": "oct", "k": "c2VjcmV0", "kid": "oct"},
        {"kid": "no kind"},
        algorithms.RSAAlgorithm.to_jwk(weak.public_key(), as_dict=True),
        algorithms.ECAlgorithm.to_jwk(other_curve.public_key(), as_dict=True),
    ]
    with pytest.raises(ValueError, match="no usable key"):
        jwks.parse_key_set(json.dumps({"keys": refused}).encode())
    keys = jwks.parse_key_set(json.dumps({"keys": [*refused, public_jwk(edwards, kid="good")]}).encode())
    assert keys.size == 1
    assert keys.find("EdDSA", "good") is not None
    assert keys.find("EdDSA", None) is not None
    assert keys.find("ES256", "good") is None


def test_a_token_without_key_id_needs_a_set_without_choice() -> None:
    one, two = ed25519.Ed25519PrivateKey.generate(), ed25519.Ed25519PrivateKey.generate()
    keys = jwks.parse_key_set(
        json.dumps({"keys": [public_jwk(one, kid="1"), public_jwk(two, kid="2")]}).encode()
    )
    assert keys.find("EdDSA", None) is None


def test_url_rules() -> None:
    jwks.check_url("https://issuer.example/keys", insecure=False)
    jwks.check_url("http://127.0.0.1:8080/keys", insecure=False)
    jwks.check_url("http://[::1]/keys", insecure=False)
    jwks.check_url("http://issuer.example/keys", insecure=True)
    for url in (
        "http://issuer.example/keys",
        "file:///etc/passwd",
        "https://",
        "http://127.0.0.1.evil.example/",
    ):
        with pytest.raises(TailraceError):
            jwks.check_url(url, insecure=False)


def test_a_failing_issuer_is_asked_less_and_less_often(
    issuer: KeyServer, verifier: TokenVerifier, clock: FakeClock
) -> None:
    key = ed25519.Ed25519PrivateKey.generate()
    issuer.publish(public_jwk(key, kid="one"))
    verifier.start()
    assert verifier.wait_keys(60)
    issuer.status = 503
    pause_s = jwks.REFRESH_INTERVAL_S_MIN
    for asked in range(2, 8):
        clock.advance(pause_s - 1)
        assert code_of(verifier, bearer(key, "unknown")) == "unauthorized", "too soon"
        clock.advance(1)
        assert code_of(verifier, bearer(key, "unknown")) == "unavailable"
        assert verifier.wait_keys(60)
        assert issuer.requests == asked
        pause_s = min(pause_s * 2, jwks.REFRESH_INTERVAL_S_MAX)
    assert verifier.verify(bearer(key, "one")), "what is known stays good"
    issuer.publish(public_jwk(key, kid="unknown"))
    issuer.status = 200
    verifier.reload()
    assert verifier.wait_keys(60)
    assert verifier.verify(bearer(key, "unknown")), "somebody who knows better is obeyed at once"


def test_another_key_under_the_same_id_vouches_for_nothing_of_the_old_one(
    issuer: KeyServer, verifier: TokenVerifier
) -> None:
    """Also where no key has an id: the set has one key, and tomorrow another one."""
    old, new = ed25519.Ed25519PrivateKey.generate(), ed25519.Ed25519PrivateKey.generate()
    issuer.publish(public_jwk(old, kid="k"))
    verifier.start()
    assert verifier.wait_keys(60)
    identity = verifier.verify(bearer(old, "k"))
    assert verifier.poll_changes()
    assert verifier.is_valid(identity)
    issuer.publish(public_jwk(old, kid="k", use="sig"), public_jwk(new, kid="next"))
    verifier.reload()
    assert verifier.wait_keys(60)
    assert verifier.poll_changes()
    assert verifier.is_valid(identity), "the same key, described in another way"
    issuer.publish(public_jwk(new, kid="k"))
    verifier.reload()
    assert verifier.wait_keys(60)
    assert verifier.poll_changes()
    assert not verifier.is_valid(identity)
    assert code_of(verifier, bearer(old, "k")) == "unauthorized"


def test_a_url_with_a_password_is_refused() -> None:
    """It would be of no use, and in every log."""
    with pytest.raises(TailraceError) as caught:
        jwks.check_url("https://user:hunter2@issuer.example/keys", insecure=False)
    assert "hunter2" not in caught.value.message
