from __future__ import annotations

import base64
import hashlib
import hmac
import json
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt import algorithms

from tailrace.auth import ANONYMOUS, TokenVerifier, check_listen_address, create_token, inspect_token
from tailrace.auth import verifier as verifier_module
from tailrace.common.clock import FakeClock
from tailrace.common.errors import TailraceError
from tailrace.common.settings import Settings

SECRET = "a shared secret that is long enough to be used"


@pytest.fixture(scope="module")
def rsa_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def public_jwk(private_key: Any, **more: Any) -> dict[str, Any]:
    names = {
        rsa.RSAPrivateKey: algorithms.RSAAlgorithm,
        ec.EllipticCurvePrivateKey: algorithms.ECAlgorithm,
        ed25519.Ed25519PrivateKey: algorithms.OKPAlgorithm,
    }
    algorithm = next(maker for kind, maker in names.items() if isinstance(private_key, kind))
    return {**algorithm.to_jwk(private_key.public_key(), as_dict=True), **more}


def raw_token(header: dict[str, Any], claims: Any, signature: bytes = b"") -> bytes:
    def segment(value: Any) -> bytes:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=")

    return b".".join([segment(header), segment(claims), base64.urlsafe_b64encode(signature).rstrip(b"=")])


def hs256(claims: Any, secret: str = SECRET) -> bytes:
    signed = raw_token({"alg": "HS256", "typ": "JWT"}, claims).rpartition(b".")[0]
    signature = hmac.digest(secret.encode(), signed, hashlib.sha256)
    return signed + b"." + base64.urlsafe_b64encode(signature).rstrip(b"=")


def verifier(clock: FakeClock | None = None, **settings: Any) -> TokenVerifier:
    settings.setdefault("auth_jwt_secret", SECRET)
    return TokenVerifier(Settings(**settings), clock or FakeClock())


def assert_refused(check: TokenVerifier, authorization: bytes | None) -> TailraceError:
    with pytest.raises(TailraceError) as caught:
        check.verify(authorization)
    assert caught.value.code == "unauthorized"
    assert caught.value.status == 401
    challenge = dict(caught.value.headers)["WWW-Authenticate"]
    assert challenge.startswith('Bearer realm="tailrace"')
    return caught.value


def test_without_auth_everyone_is_anonymous() -> None:
    check = TokenVerifier(Settings(), FakeClock())
    assert not check.enabled
    assert check.verify(None) is ANONYMOUS
    assert ANONYMOUS.scopes == {"read", "write", "manage"}


def test_a_good_token_becomes_an_identity() -> None:
    clock = FakeClock()
    token = create_token(
        SECRET,
        sub="alice",
        scopes=["read", "write"],
        streams=["orders/"],
        dbs=["app"],
        actor_id="@(svc/alice)",
        lifetime_s=60,
        clock=clock,
    )
    identity = verifier(clock).verify(b"Bearer " + token.encode())
    assert identity.sub == "alice"
    assert identity.scopes == {"read", "write"}
    assert identity.streams == ("orders/",)
    assert identity.dbs == ("app",)
    assert identity.actor_id == "svc/alice"
    assert identity.expires_at == clock.now_ns() / 1e9 + 60
    assert not identity.anonymous


def test_absent_claims_are_not_empty_claims() -> None:
    identity = verifier().verify(b"bearer  " + hs256({"sub": "bob"}))
    assert identity.scopes == frozenset()
    assert identity.streams is None
    assert identity.dbs is None
    assert identity.actor_id == "bob"
    nothing = verifier().verify(b"BEARER " + hs256({"streams": [], "db": []}))
    assert nothing.streams == ()
    assert nothing.dbs == ()


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ("read write", {"read", "write"}),
        (["read", "manage"], {"read", "manage"}),
        ("openid profile read", {"read"}),
        ("", set()),
        ("READ readwrite", set()),
        ("system", {"system"}),
    ],
)
def test_scope_is_a_string_or_a_list(scope: Any, expected: set[str]) -> None:
    assert verifier().verify(b"Bearer " + hs256({"scope": scope})).scopes == expected


@pytest.mark.parametrize(
    "claims",
    [
        {"scope": 1},
        {"scope": ["read", 1]},
        {"scope": None},
        {"streams": "orders/"},
        {"streams": None},
        {"streams": [1]},
        {"streams": [""]},
        {"streams": {"orders/": True}},
        {"db": "app"},
        {"db": None},
        {"sub": 7},
        {"actorId": 7},
        {"actorId": None},
        {"exp": "tomorrow"},
        {"exp": None},
        {"exp": True},
        {"exp": 1e300},
        {"nbf": "x"},
        {"iat": []},
        ["not", "an", "object"],
        "text",
    ],
)
def test_malformed_claims_are_refused(claims: Any) -> None:
    assert_refused(verifier(), b"Bearer " + hs256(claims))


def test_database_synonyms() -> None:
    check = verifier()
    assert check.verify(b"Bearer " + hs256({"databases": ["a", "b"]})).dbs == ("a", "b")
    assert check.verify(b"Bearer " + hs256({"database": "a"})).dbs == ("a",)
    # Two claims that disagree grant what both grant.
    assert check.verify(b"Bearer " + hs256({"db": ["a", "b"], "databases": ["b", "c"]})).dbs == ("b",)


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        b"Basic dXNlcjpwYXNz",
        b"Bearer not-a-jwt",
        b"Bearer a.b",
        b"Bearer a.b.c",
        b"Bearer ....",
        b"Bearer \xff\xfe.\xff.\xff",
        b"Bearer " + b"a" * 9000,
        b"Bearer " + hs256({"scope": "read"}) + b", Bearer " + hs256({"scope": "manage"}),
    ],
)
def test_headers_that_are_no_token_are_refused(authorization: bytes | None) -> None:
    assert_refused(verifier(), authorization)


def test_the_challenge_names_the_error_only_when_a_token_was_given() -> None:
    assert dict(assert_refused(verifier(), None).headers)["WWW-Authenticate"] == 'Bearer realm="tailrace"'
    refused = assert_refused(verifier(), b"Bearer x.y.z")
    assert 'error="invalid_token"' in dict(refused.headers)["WWW-Authenticate"]


def test_a_changed_or_foreign_signature_is_refused() -> None:
    token = hs256({"scope": "read"})
    signed, _, signature = token.rpartition(b".")
    flipped = (b"A" if signature[:1] != b"A" else b"B") + signature[1:]
    assert_refused(verifier(), b"Bearer " + signed + b"." + flipped)
    assert_refused(verifier(), b"Bearer " + signed + b".")
    assert_refused(
        verifier(), b"Bearer " + hs256({"scope": "read"}, "another secret, also long enough to use")
    )


@pytest.mark.parametrize(
    "algorithm", ["none", "None", "NONE", "", "HS384", "HS512", "RS256", "PS256", None, 5]
)
def test_other_algorithms_are_refused(algorithm: Any) -> None:
    assert_refused(verifier(), b"Bearer " + raw_token({"alg": algorithm}, {"scope": "manage"}))
    hmac_signed = hs256({"scope": "manage"})
    header = raw_token({"alg": algorithm}, {}).partition(b".")[0]
    assert_refused(verifier(), b"Bearer " + header + b"." + hmac_signed.partition(b".")[2])


def test_critical_extensions_are_refused() -> None:
    header = {"alg": "HS256", "crit": ["b64"], "b64": True}
    assert_refused(verifier(), b"Bearer " + raw_token(header, {"scope": "read"}, b"x"))


def test_times_have_a_small_leeway() -> None:
    clock = FakeClock()
    now_s = clock.now_ns() // 10**9
    check = verifier(clock)
    assert check.verify(b"Bearer " + hs256({"exp": now_s - 29}))
    assert_refused(check, b"Bearer " + hs256({"exp": now_s - 30}))
    assert check.verify(b"Bearer " + hs256({"nbf": now_s + 29}))
    assert_refused(check, b"Bearer " + hs256({"nbf": now_s + 31}))
    assert_refused(check, b"Bearer " + hs256({"iat": now_s + 31}))
    assert check.verify(b"Bearer " + hs256({"exp": now_s + 0.5})).expires_at == now_s + 0.5


def test_a_cached_token_expires() -> None:
    clock = FakeClock()
    check = verifier(clock)
    header = b"Bearer " + hs256({"exp": clock.now_ns() // 10**9 + 10})
    first = check.verify(header)
    assert check.verify(header) is first
    clock.advance(39)
    assert check.verify(header) is first
    clock.advance(1)
    assert_refused(check, header)
    assert_refused(check, header)


def test_the_cache_is_bounded_by_count_and_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = [b"Bearer " + hs256({"sub": str(number)}) for number in range(5)]
    monkeypatch.setattr(verifier_module, "CACHED_TOKENS_MAX", 2)
    check = verifier()
    first = check.verify(headers[0])
    check.verify(headers[1])
    assert check.verify(headers[0]) is first  # used again, so the other one is the oldest
    check.verify(headers[2])
    assert check.verify(headers[0]) is first
    monkeypatch.setattr(verifier_module, "CACHED_TOKEN_BYTES_MAX", len(headers[0]) + 1)
    check = verifier()
    first = check.verify(headers[0])
    assert check.verify(headers[0]) is first
    check.verify(headers[3])
    assert check.verify(headers[0]) is not first


def test_issuer_and_audience() -> None:
    check = verifier(auth_issuer="https://issuer.example", auth_audience="tailrace")
    good = {"iss": "https://issuer.example", "aud": "tailrace"}
    assert check.verify(b"Bearer " + hs256(good))
    assert check.verify(b"Bearer " + hs256({**good, "aud": ["other", "tailrace"]}))
    for bad in (
        {"iss": "https://other.example"},
        {"aud": "other"},
        {"aud": []},
        {"iss": ""},
        {"aud": "tail"},
    ):
        assert_refused(check, b"Bearer " + hs256({**good, **bad}))
    assert_refused(check, b"Bearer " + hs256({"aud": "tailrace"}))
    # Not configured, not required.
    assert verifier().verify(b"Bearer " + hs256({"iss": "anyone", "aud": "anything"}))


def key_file(directory: Path, *keys: dict[str, Any]) -> str:
    path = directory / "jwks.json"
    path.write_text(json.dumps({"keys": list(keys)}))
    return str(path)


def test_asymmetric_tokens_by_key_file(tmp_path: Path, rsa_key: rsa.RSAPrivateKey) -> None:
    curve = ec.generate_private_key(ec.SECP256R1())
    edwards = ed25519.Ed25519PrivateKey.generate()
    path = key_file(
        tmp_path,
        public_jwk(rsa_key, kid="r"),
        public_jwk(curve, kid="c", use="sig"),
        public_jwk(edwards, kid="e", alg="EdDSA"),
    )
    check = verifier(auth_jwks_file=path, auth_jwt_secret="")
    for key, algorithm, kid in ((rsa_key, "RS256", "r"), (curve, "ES256", "c"), (edwards, "EdDSA", "e")):
        token = jwt.encode({"scope": "read system"}, key, algorithm=algorithm, headers={"kid": kid})
        # `system` is the server's own to give: an identity provider cannot.
        assert check.verify(b"Bearer " + token.encode()).scopes == {"read"}
        without_id = jwt.encode({"scope": "read"}, key, algorithm=algorithm)
        assert check.verify(b"Bearer " + without_id.encode()).scopes == {"read"}
        wrong_id = jwt.encode({}, key, algorithm=algorithm, headers={"kid": "x"})
        assert_refused(check, b"Bearer " + wrong_id.encode())
        other_key = jwt.encode({}, key, algorithm=algorithm, headers={"kid": "r" if kid != "r" else "c"})
        assert_refused(check, b"Bearer " + other_key.encode())
    # No shared secret is configured, so nothing symmetric passes.
    assert_refused(check, b"Bearer " + hs256({"scope": "manage"}))


def test_a_public_key_is_never_an_hmac_secret(tmp_path: Path, rsa_key: rsa.RSAPrivateKey) -> None:
    path = key_file(tmp_path, public_jwk(rsa_key, kid="r"))
    pem = (
        rsa_key.public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        .decode()
    )
    for check in (verifier(auth_jwks_file=path, auth_jwt_secret=""), verifier(auth_jwks_file=path)):
        assert_refused(check, b"Bearer " + hs256({"scope": "manage"}, pem))
        signed = raw_token({"alg": "HS256", "kid": "r"}, {"scope": "manage"}).rpartition(b".")[0]
        signature = hmac.digest(pem.encode(), signed, hashlib.sha256)
        forged = signed + b"." + base64.urlsafe_b64encode(signature).rstrip(b"=")
        assert_refused(check, b"Bearer " + forged)
    # With both configured each kind works with its own key.
    both = verifier(auth_jwks_file=path)
    assert both.verify(b"Bearer " + hs256({"scope": "read"})).scopes == {"read"}
    rs256 = jwt.encode({"scope": "write"}, rsa_key, algorithm="RS256", headers={"kid": "r"})
    assert both.verify(b"Bearer " + rs256.encode()).scopes == {"write"}


def test_a_key_is_good_for_one_algorithm(tmp_path: Path, rsa_key: rsa.RSAPrivateKey) -> None:
    check = verifier(auth_jwks_file=key_file(tmp_path, public_jwk(rsa_key, kid="r")))
    for algorithm in ("RS384", "RS512", "PS256"):
        token = jwt.encode({"scope": "read"}, rsa_key, algorithm=algorithm, headers={"kid": "r"})
        assert_refused(check, b"Bearer " + token.encode())


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"keys":1}', '{"keys":[]}', '{"keys":[1,{"kty":"oct","k":"AA"}]}']
)
def test_a_useless_key_file_stops_the_start(tmp_path: Path, content: str) -> None:
    path = tmp_path / "jwks.json"
    path.write_text(content)
    with pytest.raises(TailraceError, match="key set"):
        verifier(auth_jwks_file=str(path))


def test_bad_settings_stop_the_start(tmp_path: Path) -> None:
    with pytest.raises(TailraceError, match="at least 32 bytes"):
        verifier(auth_jwt_secret="short")
    with pytest.raises(TailraceError, match="key set"):
        verifier(auth_jwks_file=str(tmp_path / "missing.json"))
    with pytest.raises(TailraceError, match="cannot be combined"):
        verifier(auth_jwks_file="x", auth_jwks_url="https://x.example/jwks")
    with pytest.raises(TailraceError, match="must be https"):
        verifier(auth_jwks_url="http://issuer.example/jwks")
    with pytest.raises(TailraceError, match="must be https"):
        verifier(auth_jwks_url="ftp://issuer.example/jwks")


def test_create_token_refuses_nonsense() -> None:
    nonsense: list[dict[str, Any]] = [{"scopes": ["admin"]}, {"streams": [""]}, {"lifetime_s": 0}]
    for arguments in nonsense:
        with pytest.raises(TailraceError) as caught:
            create_token(SECRET, sub="x", **arguments)
        assert caught.value.code == "invalid_request"
    with pytest.raises(TailraceError, match="32 bytes"):
        create_token("short", sub="x")


def test_a_token_is_for_somebody() -> None:
    with pytest.raises(TailraceError, match="subject of a token must not be empty"):
        create_token(SECRET, sub="")


def test_inspect_token_shows_what_is_wrong() -> None:
    clock = FakeClock()
    token = create_token(SECRET, sub="x", scopes=["read"], streams=["a/"], lifetime_s=60, clock=clock)
    report = inspect_token("Bearer " + token, clock=clock)
    assert report.header["alg"] == "HS256"
    assert report.claims["sub"] == "x"
    assert report.scopes == ["read"]
    assert report.streams == ["a/"]
    assert report.dbs is None
    assert report.expires_in_s == 60
    assert report.problems == []
    clock.advance(120)
    assert inspect_token(token, clock=clock).problems == ["the token has expired"]
    endless = create_token(SECRET, sub="x", lifetime_s=None, clock=clock)
    assert inspect_token(endless, clock=clock).expires_in_s is None
    assert inspect_token(hs256({"scope": 7}).decode(), clock=clock).problems == [
        "a claim of the token is malformed"
    ]
    with pytest.raises(TailraceError):
        inspect_token("nonsense", clock=clock)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_auth(host: str) -> None:
    assert Settings().loopback_only, "which is where a server listens unless told otherwise"
    check_listen_address(Settings(host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com", ""])
def test_beyond_loopback_needs_auth_or_insecure(host: str) -> None:
    with pytest.raises(TailraceError, match="--insecure") as caught:
        check_listen_address(Settings(host=host))
    assert caught.value.code == "invalid_request"
    check_listen_address(Settings(host=host, insecure=True))
    check_listen_address(Settings(host=host, auth_jwt_secret=SECRET))
    check_listen_address(Settings(host=host, auth_jwks_url="https://issuer.example/jwks"))
