"""Made-up tokens, headers and paths: nothing gets in, nothing breaks, and nothing is told."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from support.edge import EdgeProcess
from support.server import ServerProcess
from support.wire import Wire, request_bytes
from tailrace.auth import Identity, IdentityStore, TokenVerifier, create_api_key, create_token
from tailrace.auth.identities import IdentityFile
from tailrace.common.clock import FakeClock
from tailrace.common.errors import TailraceError
from tailrace.common.settings import Settings

SECRET = "a secret that no test is able to guess, 32 bytes"
CLOCK = FakeClock()
HIDDEN = b"what-nobody-may-see"
REFUSED = {400, 401, 403, 404, 405, 413}

GOOD = create_token(SECRET, sub="ada", scopes=["read"], clock=CLOCK)


@pytest.fixture(scope="module")
def verifier() -> Iterator[tuple[TokenVerifier, str]]:
    """With an API key, so that both kinds of tokens are tried."""
    with tempfile.TemporaryDirectory() as directory:
        key, text = create_api_key(sub="ci", scopes=["read"], clock=CLOCK)
        IdentityStore(IdentityFile(Path(directory) / "identity.json"), CLOCK).add_key(key)
        yield TokenVerifier(Settings(auth_jwt_secret=SECRET, data_dir=Path(directory)), CLOCK), text


def identity_of(check: TokenVerifier, header: bytes) -> Identity | None:
    """None for a refusal; any other failure is one of ours."""
    try:
        return check.verify(header)
    except TailraceError as error:
        refusal = error
    assert refusal.code == "unauthorized"
    for name, value in refusal.headers:
        assert name == "WWW-Authenticate"
        assert value.isprintable()
    bare = header.partition(b" ")[2].decode("latin-1").strip()
    if len(bare) > 8:
        assert bare not in refusal.message
    return None


def segment(value: Any) -> str:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
ALGORITHMS = st.sampled_from(
    ["none", "None", "HS256", "hs256", "HS512", "RS256", "ES256", "EdDSA", "", "PS256"]
)
HEADERS = st.fixed_dictionaries(
    {"alg": ALGORITHMS | JSON_VALUES},
    optional={
        "kid": JSON_VALUES,
        "typ": JSON_VALUES,
        "crit": JSON_VALUES,
        "jwk": JSON_VALUES,
        "b64": JSON_VALUES,
    },
)
CLAIMS = st.dictionaries(
    st.sampled_from(["sub", "scope", "streams", "db", "exp", "nbf", "iat", "jti", "aud", "iss", "x"]),
    JSON_VALUES,
)


@given(st.binary(max_size=200))
@example(b"Bearer ")
@example(b"Bearer  " + GOOD.encode())
@example(b"bearer\t" + GOOD.encode())
@example(b"Bearer " + GOOD.encode() + b", Bearer " + GOOD.encode())
@example(b"Bearer trk_\xff\xfe_\x00")
def test_any_bytes_as_a_header(verifier: tuple[TokenVerifier, str], header: bytes) -> None:
    found = identity_of(verifier[0], header)
    assert found is None or header.split()[-1] == GOOD.encode()


@given(header=HEADERS | JSON_VALUES, claims=CLAIMS | JSON_VALUES, signature=st.binary(max_size=64))
def test_made_up_tokens(
    verifier: tuple[TokenVerifier, str], header: Any, claims: Any, signature: bytes
) -> None:
    token = ".".join((segment(header), segment(claims), segment(signature)))
    assert identity_of(verifier[0], b"Bearer " + token.encode()) is None


@given(place=st.integers(0, 10_000), change=st.integers(1, 255), whole=st.booleans())
def test_a_good_token_with_one_byte_changed(
    verifier: tuple[TokenVerifier, str], place: int, change: int, whole: bool
) -> None:
    check, key = verifier
    for good in (GOOD, key):
        raw = bytearray(good.encode())
        raw[place % len(raw)] = raw[place % len(raw)] ^ change
        changed = bytes(raw) if whole else bytes(raw)[: place % len(raw)]
        found = identity_of(check, b"Bearer " + changed)
        if found is not None:
            # The last character of a part carries bits that decode to nothing, and spaces are left out.
            assert _decoded(changed) == _decoded(good.encode())


def _decoded(token: bytes) -> list[bytes]:
    parts = token.strip().split(b".")
    return [base64.urlsafe_b64decode(part + b"=" * (-len(part) % 4)) for part in parts]


@given(claims=CLAIMS)
def test_claims_of_any_form_make_a_token_invalid_never_stronger(
    verifier: tuple[TokenVerifier, str], claims: dict[str, Any]
) -> None:
    """Signed with the right secret by somebody who makes mistakes."""
    try:
        body = segment(json.dumps(claims, allow_nan=False).encode())
    except ValueError:
        return
    signed = f"{segment({'alg': 'HS256'})}.{body}"
    mac = hmac.digest(SECRET.encode(), signed.encode(), hashlib.sha256)
    found = identity_of(verifier[0], f"Bearer {signed}.{segment(mac)}".encode())
    if found is not None:
        words = claims.get("scope", "")
        said = set(words.split(" ")) if isinstance(words, str) else set(words)
        assert found.scopes <= said
        assert (found.streams is None) == ("streams" not in claims)


# -- a real server, and a real edge


@pytest.fixture(scope="module", params=["server", "edge"])
def guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    """A server, and the same server behind an edge that checks tokens itself."""
    env = {"TAILRACE_AUTH_JWT_SECRET": SECRET, "TAILRACE_AUTH_PUBLIC_STREAMS": "public/"}
    process = ServerProcess(tmp_path_factory.mktemp("fuzz") / "data", env=env).start()
    door = process
    if request.param == "edge":
        shown = {**env, "TAILRACE_EDGE_EXPOSE_SERVER": "true"}  # else there is less to get at
        door = EdgeProcess(tmp_path_factory.mktemp("fuzz") / "edge", process.base_url, env=shown)
        door.start()
    manager = Wire(door.port, bearer=create_token(SECRET, sub="m", scopes=["manage"]))
    for name in ("secret/one", "mine/one", "public/one"):
        body = HIDDEN if name.startswith("secret") else b"open"
        assert manager.put(name, "text/plain", body).status == 201
        assert manager.get(f"/v1/stream/{name}").body == body, "an edge may have it in its cache"
    manager.close()
    wire = Wire(door.port)
    yield wire
    wire.close()
    if door is not process:
        door.stop()
    process.stop()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    value=st.binary(max_size=120).map(lambda raw: raw.translate(None, b"\r\n\x00")),
    doubled=st.booleans(),
    target=st.sampled_from(["secret/one", "/v1/streams", "/metrics", "/v1/server/_keys", "__registry__"]),
)
def test_any_authorization_header_is_answered(
    guarded: Wire, value: bytes, doubled: bool, target: str
) -> None:
    items: list[tuple[str, str | bytes]] = [("Authorization", value)]
    if doubled:
        # A good token beside it does not help: nobody can say which of the two was meant.
        good = create_token(SECRET, sub="m", scopes=["manage"])
        items.append(("Authorization", f"Bearer {good}"))
    answer = guarded.call("GET", target, items)
    assert answer.status in (400, 401), answer.body
    assert HIDDEN not in answer.body


TRICKS = [
    "../secret/one",
    "%2e%2e/secret/one",
    "..%2fsecret%2fone",
    "mine/../secret/one",
    "mine/%2e%2e/secret/one",
    "mine%2f..%2fsecret%2fone",
    "mine/..%2Fsecret/one",
    "mine//../secret/one",
    "mine/./../secret/one",
    "public/../secret/one",
    "public%2f..%2fsecret%2fone",
    "public/%252e%252e/secret/one",
    "%73ecret/one",
    "secret%2Fone",
    "secret/one/",
    "/secret/one",
    "secret/one%00",
    "secret/one%20",
    "secret/one;mine/",
    "secret\\one",
    "mine\\..\\secret\\one",
    "secret/one?offset=-1&x=mine/",
    "secret/one#mine/",
    "secret/one/pk/k",
    "secret/one/_details",
    "%5f%5fregistry__",
    "_%5Fregistry__",
    "mine/../__registry__",
    "public/%2e%2e%2f__registry__",
    "__ds/../secret/one",
    "__ds/%2e%2e/secret/one",
    "__ds/subscriptions/..%2f..%2fsecret",
    "\uff0e\uff0e/secret/one",
    "%c0%ae%c0%ae/secret/one",
    "%ff%fe",
]
WHOLE = [
    "//v1/stream/secret/one",
    "/v1//stream/secret/one",
    "/v1/./stream/secret/one",
    "/healthz/../v1/stream/secret/one",
    "/healthz/%2e%2e/metrics",
    "/healthz;/../metrics",
    "/metrics/",
    "/metrics/.",
    "/metrics%00",
    "/METRICS",
    "/%6detrics",
    "/V1/stream/secret/one",
    "/v1/streams/",
    "/v1/server/_keys/",
    "/v1/server/_keys/../_details",
    "/v1/server/%5fkeys",
    "/openapi.json/../v1/streams",
    "http://tailrace.test/v1/stream/secret/one",
    "http://tailrace.test/metrics",
    "http://other.test/v1/stream/secret/one",
    "/hub/health/../shards",
    "/realtime/sse/../../metrics",
]


def check_kept_out(guarded: Wire, target: bytes, bearer: str | None) -> None:
    headers = {} if bearer is None else {"Authorization": f"Bearer {bearer}"}
    with guarded.connect() as connection:
        connection.send(request_bytes("GET", target, {**headers, "Connection": "close"}))
        answer = connection.read_answer()
    assert answer.status in REFUSED, (target, answer.status, answer.body)
    assert HIDDEN not in answer.body


@pytest.mark.parametrize("scopes", [(), ("read", "write"), ("read", "write", "manage")])
def test_no_spelling_of_a_path_leads_around_the_policy(guarded: Wire, scopes: tuple[str, ...]) -> None:
    """Without a token, and with one for other streams."""
    bearer = create_token(SECRET, sub="x", scopes=scopes, streams=["mine/"]) if scopes else None
    for trick in TRICKS:
        if "manage" in scopes and "registry" in trick:
            continue  # which whoever manages may read
        target = f"/v1/stream/{trick}".encode()
        check_kept_out(guarded, target, bearer)
    if "manage" not in scopes:
        for whole in WHOLE:
            check_kept_out(guarded, whole.encode(), bearer)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.lists(
        st.sampled_from(
            [
                "..",
                ".",
                "",
                "%2e",
                "%2E%2e",
                "%2f",
                "/",
                "mine",
                "public",
                "secret",
                "one",
                "%00",
                "pk",
                "__ds",
            ]
        )
        | st.text(max_size=3).map(lambda text: quote(text, safe="")),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from(["/", "%2f", "//", "\\"]),
    st.booleans(),
)
def test_no_mixture_of_parts_leads_there_either(
    guarded: Wire, parts: list[str], joint: str, named: bool
) -> None:
    bearer = create_token(SECRET, sub="x", scopes=["read"], streams=["mine/"]) if named else None
    headers = {} if bearer is None else {"Authorization": f"Bearer {bearer}"}
    target = f"/v1/stream/{joint.join(parts)}".encode()
    answer = guarded.call("GET", target, headers)
    assert HIDDEN not in answer.body
