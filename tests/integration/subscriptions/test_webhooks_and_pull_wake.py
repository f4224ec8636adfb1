"""Subscriptions against a real server: webhooks, pull-wake, restarts, refusals."""

from __future__ import annotations

import base64
import itertools
import re
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from conftest import StartServer
from support.calls import Caller, Reply, eventually
from support.hooks import Call, Hook
from support.server import ServerProcess

# A lease that runs out is soon over; one that must not outlasts whatever a busy machine does meanwhile.
SHORT_MS = 1000
LEASE_MS = 30_000
START = "0" * 26
_numbers = itertools.count(1)


@pytest.fixture
def hook() -> Iterator[Hook]:
    receiver = Hook()
    yield receiver
    receiver.close()


@pytest.fixture
def call(server: ServerProcess) -> Caller:
    return Caller(server)


@pytest.fixture
def space() -> str:
    """A name that no other test uses: of the subscription, and the first segment of its streams."""
    return f"space-{next(_numbers)}"


def control(subscription: str, rest: str = "") -> str:
    return f"__ds/subscriptions/{subscription}{rest}"


def webhook(space: str, url: str, **more: Any) -> dict[str, Any]:
    return {
        "type": "webhook",
        "pattern": f"{space}/*",
        "webhook": {"url": url},
        "lease_ttl_ms": LEASE_MS,
        **more,
    }


def pull(space: str, **more: Any) -> dict[str, Any]:
    return {
        "type": "pull-wake",
        "pattern": f"{space}/*",
        "wake_stream": f"wake/{space}",
        "lease_ttl_ms": LEASE_MS,
        **more,
    }


def make(call: Caller, space: str, config: dict[str, Any]) -> dict[str, Any]:
    reply = call("PUT", control(space), config)
    assert reply.status == 201, reply
    return reply.body


def append(call: Caller, stream: str, *values: Any) -> str:
    reply = call("POST", stream, list(values) or [{"n": 1}])
    assert reply.status == 204
    return reply.headers["stream-next-offset"]


def create(call: Caller, stream: str, body: Any = None) -> str:
    reply = call("PUT", stream, body, headers={"Content-Type": "application/json"})
    assert reply.status == 201
    return reply.headers["stream-next-offset"]


def callback(
    call: Caller, delivery: Call, *acks: tuple[str, str], done: bool = True, token: str = ""
) -> Reply:
    body = delivery.body
    path = body["callback_url"].partition("/v1/stream/")[2]
    answer = {
        "wake_id": body["wake_id"],
        "generation": body["generation"],
        "acks": [{"stream": stream, "offset": offset} for stream, offset in acks],
        "done": done,
    }
    return call("POST", path, answer, token=token or body["callback_token"])


def cursors(call: Caller, space: str) -> dict[str, str]:
    return {item["path"]: item["acked_offset"] for item in call("GET", control(space)).body["streams"]}


def decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


# -- configuration ----------------------------------------------------------------------------------------


def test_put_get_delete(call: Caller, space: str, hook: Hook, server: ServerProcess) -> None:
    create(call, f"{space}/old", [1, 2])
    config = webhook(space, hook.url, streams=["not/there"], description="mine")
    made = make(call, space, config)
    assert made["id"] == made["subscription_id"] == space
    assert made["type"] == "webhook"
    assert made["pattern"] == f"{space}/*"
    assert made["wake_stream"] is None
    assert made["lease_ttl_ms"] == LEASE_MS
    assert made["status"] == "active"
    assert made["description"] == "mine"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", made["created_at"])
    signing = made["webhook"]["signing"]
    assert signing["alg"] == "ed25519"
    assert signing["jwks_url"] == f"{server.base_url}/v1/stream/__ds/jwks.json"
    assert sorted(made["streams"], key=lambda item: item["path"]) == [
        {"path": "not/there", "link_type": "explicit", "acked_offset": "-1"},
        {"path": f"{space}/old", "link_type": "glob", "acked_offset": "00000000000000000008000000"},
    ]
    again = call("PUT", control(space), config)
    assert again.status == 200
    assert again.body == made
    assert call("GET", control(space)).body == made
    other = call("PUT", control(space), {**config, "description": "other"})
    assert (other.status, other.code) == (409, "SUBSCRIPTION_ALREADY_EXISTS")
    for _ in range(2):
        assert call("DELETE", control(space)).status == 204
    assert call("GET", control(space)).code == "SUBSCRIPTION_NOT_FOUND"
    assert call("DELETE", control("never-made")).status == 204


def test_the_key_set(call: Caller) -> None:
    reply = call("GET", "__ds/jwks.json")
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/jwk-set+json"
    assert reply.headers["cache-control"] == "public, max-age=300"
    assert [set(key) for key in reply.body["keys"]] == [{"kty", "crv", "kid", "use", "alg", "x"}]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "__ds", 404, "not_found"),
        ("GET", "__ds/", 404, "not_found"),
        ("GET", "__ds/other", 404, "not_found"),
        ("GET", "__ds/subscriptions", 404, "not_found"),
        ("GET", "__ds/jwks.json/x", 404, "not_found"),
        ("POST", control("s", "/unknown"), 404, "not_found"),
        ("POST", control("s", "/claim/x"), 404, "not_found"),
        ("POST", "__ds/jwks.json", 405, "method_not_allowed"),
        ("POST", control("s"), 405, "method_not_allowed"),
        ("GET", control("s", "/claim"), 405, "method_not_allowed"),
        ("GET", control("s", "/streams/a"), 405, "method_not_allowed"),
        ("GET", control("unknown"), 404, "SUBSCRIPTION_NOT_FOUND"),
        ("POST", control("unknown", "/streams"), 404, "SUBSCRIPTION_NOT_FOUND"),
        ("DELETE", control("unknown", "/streams/a"), 404, "SUBSCRIPTION_NOT_FOUND"),
        ("POST", control("unknown", "/claim"), 404, "SUBSCRIPTION_NOT_FOUND"),
        ("POST", control("unknown", "/ack"), 401, "TOKEN_INVALID"),
        ("POST", control("unknown", "/release"), 401, "TOKEN_INVALID"),
        ("POST", control("unknown", "/callback"), 401, "TOKEN_INVALID"),
        ("PUT", control("."), 400, "INVALID_REQUEST"),
        ("PUT", control("%ff"), 400, "INVALID_REQUEST"),
        ("PUT", control("a%2Fb"), 400, "INVALID_REQUEST"),
        ("PUT", control("x" * 257), 400, "INVALID_REQUEST"),
        ("PUT", control("no-body"), 400, "INVALID_REQUEST"),
    ],
)
def test_paths_and_methods(call: Caller, method: str, path: str, status: int, code: str) -> None:
    reply = call(method, path)
    assert (reply.status, reply.code) == (status, code)
    assert reply.headers["cache-control"] == "no-store"
    assert ("allow" in reply.headers) == (status == 405)
    assert ("www-authenticate" in reply.headers) == (status == 401)


def test_bad_bodies(call: Caller, space: str, hook: Hook) -> None:
    for body in (b"{", b"[]", b"\xff", b'{"type":"webhook"}', b'{"type":"x","pattern":"a"}'):
        assert call("PUT", control(space), body).code == "INVALID_REQUEST"
    for url in ("http://10.0.0.1/hook", "https://127.0.0.1/", "ftp://x.example/", "http://user@127.0.0.1/"):
        reply = call("PUT", control(space), webhook(space, url))
        assert (reply.status, reply.code) == (400, "WEBHOOK_URL_REJECTED")
    assert call("GET", control(space)).status == 404
    make(call, space, pull(space))
    for path, bodies in {
        "/streams": (b"", b'{"streams":[]}', b'{"streams":["a//b"]}'),
        "/claim": (b"", b"{}", b'{"worker":""}', b'{"worker":7}'),
    }.items():
        for body in bodies:
            assert call("POST", control(space, path), body).code == "INVALID_REQUEST"
    other = f"{space}-hook"
    make(call, other, webhook(space, hook.url))
    assert call("POST", control(other, "/claim"), {"worker": "w"}).code == "INVALID_REQUEST"


def test_a_name_that_does_not_resolve_yet_is_accepted(call: Caller, space: str) -> None:
    assert make(call, space, webhook(space, "https://worker.invalid/hook"))["status"] == "active"


# -- webhooks ---------------------------------------------------------------------------------------------


def test_a_delivery_is_signed_and_complete(
    call: Caller, space: str, hook: Hook, server: ServerProcess
) -> None:
    made = make(call, space, webhook(space, hook.url))
    tail = create(call, f"{space}/a", [{"n": 1}])
    delivery = hook.next()
    assert delivery.path == "/hook"
    assert delivery.headers["content-type"] == "application/json"
    body = delivery.body
    assert body["subscription_id"] == space
    assert body["generation"] == 1
    assert body["callback_url"] == f"{server.base_url}/v1/stream/{control(space, '/callback')}"
    assert body["streams"] == [
        {
            "path": f"{space}/a",
            "link_type": "glob",
            "acked_offset": START,
            "tail_offset": tail,
            "has_pending": True,
        }
    ]
    match = re.fullmatch(
        r"t=(\d+),kid=([^,]+),ed25519=([A-Za-z0-9_-]+)", delivery.headers["webhook-signature"]
    )
    assert match is not None
    assert match[2] == made["webhook"]["signing"]["kid"]
    keys = {key["kid"]: key for key in call("GET", "__ds/jwks.json").body["keys"]}
    public = Ed25519PublicKey.from_public_bytes(decoded(keys[match[2]]["x"]))
    public.verify(decoded(match[3]), f"{match[1]}.".encode() + delivery.raw)
    assert callback(call, delivery, (f"{space}/a", tail)).body == {"ok": True, "next_wake": False}
    assert cursors(call, space) == {f"{space}/a": tail}


def test_done_in_the_answer_acks_and_newer_data_wakes_again(call: Caller, space: str, hook: Hook) -> None:
    hook.answer = b'{"done":true}'
    make(call, space, webhook(space, hook.url))
    create(call, f"{space}/a")
    for generation in (1, 2, 3):
        tail = append(call, f"{space}/a")
        delivery = hook.next()
        assert delivery.body["generation"] == generation
        assert delivery.tails() == {f"{space}/a": tail}
        eventually(lambda: cursors(call, space)[f"{space}/a"], lambda seen, tail=tail: seen == tail)


def test_an_empty_stream_does_not_wake_its_first_append_does(call: Caller, space: str, hook: Hook) -> None:
    make(call, space, webhook(space, hook.url))
    create(call, f"{space}/a")
    eventually(lambda: cursors(call, space), lambda seen: seen == {f"{space}/a": START})
    assert hook.calls.empty()
    append(call, f"{space}/a")
    assert f"{space}/a" in hook.next().tails()


def test_fencing_and_acks(call: Caller, space: str, hook: Hook) -> None:
    make(call, space, webhook(space, hook.url))
    stream = f"{space}/a"
    tail = create(call, stream, [1, 2, 3])
    first = hook.next()
    for bad in ((f"{space}/b", tail), (stream, "-1"), (stream, "now"), (stream, "x"), (stream, "7" * 26)):
        reply = callback(call, first, bad, done=False)
        assert (reply.status, reply.code) == (409, "INVALID_OFFSET")
    middle = "00000000000000000004000000"
    assert callback(call, first, (stream, middle), done=False).body == {"ok": True, "next_wake": False}
    assert cursors(call, space) == {stream: middle}
    assert callback(call, first, (stream, START), done=False).code == "INVALID_OFFSET"
    # The decimal alias and lower case are offsets too.
    assert callback(call, first, (stream, "0000000000000000_0000000000000002"), done=False).status == 200
    assert cursors(call, space) == {stream: "00000000000000000008000000"}
    # Not everything is acked: ending this wake brings the next.
    assert callback(call, first, done=True).body == {"ok": True, "next_wake": True}
    second = hook.next()
    assert second.body["generation"] == 2
    assert second.body["wake_id"] != first.body["wake_id"]
    assert callback(call, first, (stream, tail)).code == "FENCED"
    assert callback(call, second, (stream, tail), token=first.body["callback_token"]).code == "FENCED"
    refused = callback(call, second, (stream, tail), token="not.a-token")
    assert (refused.status, refused.code) == (401, "TOKEN_INVALID")
    assert cursors(call, space) == {stream: "00000000000000000008000000"}
    assert callback(call, second, (stream, tail)).body == {"ok": True, "next_wake": False}


def test_a_lease_that_runs_out_brings_a_new_wake(call: Caller, space: str, hook: Hook) -> None:
    make(call, space, webhook(space, hook.url, lease_ttl_ms=SHORT_MS))
    tail = create(call, f"{space}/a", [1])
    first, second = hook.next(), hook.next()
    assert [first.body["generation"], second.body["generation"]] == [1, 2]
    assert callback(call, first, (f"{space}/a", tail)).code == "FENCED"


@pytest.mark.parametrize("trouble", ["500", "redirect", "nothing"])
def test_failed_deliveries_are_tried_again(call: Caller, space: str, hook: Hook, trouble: str) -> None:
    make(call, space, webhook(space, hook.url))
    if trouble == "nothing":
        # A hook that is not there: its port is closed.
        gone = Hook()
        gone.close()
        call("DELETE", control(space))
        make(call, space, webhook(space, gone.url))
    else:
        hook.status = 500 if trouble == "500" else 307
        hook.headers = {"Location": hook.url + "-elsewhere"}
    create(call, f"{space}/a", [1])
    eventually(lambda: call("GET", control(space)).body["status"], lambda status: status == "failed")
    if trouble == "nothing":
        return
    first = hook.next()
    hook.status, hook.answer, hook.headers = 200, b'{"done":true}', {}
    again = hook.next()
    assert again.path == "/hook"
    assert again.body["wake_id"] == first.body["wake_id"]
    assert again.body["generation"] == first.body["generation"]
    eventually(lambda: call("GET", control(space)).body["status"], lambda status: status == "active")


def test_a_long_answer_is_cut(call: Caller, space: str, hook: Hook) -> None:
    hook.answer = b'{"done":true,"x":"' + b"x" * 200_000 + b'"}'
    make(call, space, webhook(space, hook.url))
    tail = create(call, f"{space}/a", [1])
    delivery = hook.next()
    # Accepted, but nobody read as far as to know what it says.
    assert callback(call, delivery, (f"{space}/a", tail)).status == 200


def test_explicit_streams(call: Caller, space: str, hook: Hook) -> None:
    make(call, space, webhook(space, hook.url, lease_ttl_ms=SHORT_MS))
    create(call, f"{space}/a", [1])
    hook.answer = b'{"done":true}'
    named = f"other/{space}/x y"
    assert call("POST", control(space, "/streams"), {"streams": [named, f"{space}/a"]}).status == 204
    assert cursors(call, space)[named] == "-1"
    create(call, named.replace(" ", "%20"), ["first"])
    while named not in hook.next().tails():
        pass
    encoded = named.replace("/", "%2F").replace(" ", "%20")
    assert call("DELETE", control(space, f"/streams/{encoded}")).status == 204
    assert call("DELETE", control(space, f"/streams/{space}/a")).status == 204
    shown = call("GET", control(space)).body["streams"]
    assert [(item["path"], item["link_type"]) for item in shown] == [(f"{space}/a", "glob")]


def test_a_deleted_stream_is_unlinked_and_comes_back(call: Caller, space: str, hook: Hook) -> None:
    hook.answer = b'{"done":true}'
    stream = f"{space}/a"
    named = f"other/{space}"
    create(call, stream, [1])
    create(call, named, [1])
    make(call, space, webhook(space, hook.url, streams=[named]))
    assert call("DELETE", stream).status == 204
    assert call("DELETE", named).status == 204
    eventually(lambda: cursors(call, space), lambda seen: seen == {named: "-1"})
    tail = create(call, stream, [1])
    assert hook.next().tails() == {stream: tail}
    assert tail > "00000020000000000000000000"


def test_system_streams_are_linked_by_name_only(call: Caller, space: str, hook: Hook) -> None:
    hook.answer = b'{"done":true}'
    made = make(call, space, {**webhook(space, hook.url), "pattern": "**"})
    assert not [item for item in made["streams"] if item["path"].startswith("__")]
    assert call("DELETE", control(space)).status == 204
    make(call, space, {**webhook(space, hook.url), "pattern": None, "streams": ["__registry__"]})
    create(call, f"{space}/new")
    assert "__registry__" in hook.next().tails()


# -- pull-wake --------------------------------------------------------------------------------------------


def claim(call: Caller, space: str, worker: str = "w1") -> dict[str, Any]:
    reply = call("POST", control(space, "/claim"), {"worker": worker})
    assert reply.status == 200, reply
    return reply.body


def answer(call: Caller, space: str, verb: str, claimed: dict[str, Any], **more: Any) -> Reply:
    body = {"wake_id": claimed["wake_id"], "generation": claimed["generation"], **more}
    return call("POST", control(space, f"/{verb}"), body, token=claimed["token"])


def wake_events(call: Caller, space: str) -> list[dict[str, Any]]:
    return call("GET", f"wake/{space}").body


def test_pull_wake_from_claim_to_release(call: Caller, space: str) -> None:
    create(call, f"wake/{space}")
    make(call, space, pull(space))
    nothing = call("POST", control(space, "/claim"), {"worker": "w1"})
    assert (nothing.status, nothing.code) == (409, "NO_PENDING_WORK")
    stream = f"{space}/a"
    tail = create(call, stream, [1, 2])
    (event,) = eventually(lambda: wake_events(call, space), bool)
    assert event | {"ts": 0} == {
        "type": "wake",
        "subscription_id": space,
        "stream": stream,
        "generation": 1,
        "ts": 0,
    }
    claimed = claim(call, space)
    assert claimed["generation"] == 1
    assert claimed["lease_ttl_ms"] == 30_000
    assert claimed["streams"][0]["tail_offset"] == tail
    busy = call("POST", control(space, "/claim"), {"worker": "w2"})
    assert busy.code == "ALREADY_CLAIMED"
    assert busy.body["error"]["current_holder"] == "w1"
    assert busy.body["error"]["generation"] == 1
    assert answer(call, space, "ack", claimed).body == {"ok": True, "next_wake": False}
    assert answer(call, space, "release", claimed).status == 204
    assert answer(call, space, "ack", claimed).code == "FENCED"
    events = eventually(lambda: wake_events(call, space), lambda seen: len(seen) == 2)
    assert events[1]["generation"] == 2
    claimed = claim(call, space, "w2")
    done = answer(call, space, "ack", claimed, acks=[{"stream": stream, "offset": tail}], done=True)
    assert done.body == {"ok": True, "next_wake": False}
    assert cursors(call, space) == {stream: tail}


def test_a_claim_straight_after_an_append(call: Caller, space: str) -> None:
    make(call, space, pull(space))
    create(call, f"{space}/a")
    for generation in range(1, 20):
        tail = append(call, f"{space}/a")
        claimed = claim(call, space)
        assert claimed["generation"] == generation
        acks = [{"stream": f"{space}/a", "offset": tail}]
        assert answer(call, space, "ack", claimed, acks=acks, done=True).body["next_wake"] is False


def test_a_missing_wake_stream_gets_its_event_when_it_appears(call: Caller, space: str) -> None:
    make(call, space, pull(space))
    create(call, f"{space}/a", [1])
    eventually(lambda: cursors(call, space), bool)
    create(call, f"wake/{space}")
    (event,) = eventually(lambda: wake_events(call, space), bool)
    assert event["generation"] == 1
    assert claim(call, space)["generation"] == 1


def test_the_wake_stream_does_not_wake_its_own_subscription(call: Caller, space: str) -> None:
    create(call, f"{space}/wake")
    make(call, space, pull(space, wake_stream=f"{space}/wake"))
    create(call, f"{space}/a", [1])
    eventually(lambda: call("GET", f"{space}/wake").body, bool)
    assert set(cursors(call, space)) == {f"{space}/a"}


def test_answers_to_the_wrong_kind(call: Caller, space: str, hook: Hook) -> None:
    make(call, space, pull(space))
    create(call, f"{space}/a", [1])
    claimed = claim(call, space)
    assert answer(call, space, "callback", claimed).code == "INVALID_REQUEST"
    for body in (b"", b"{}", b'{"wake_id":1,"generation":1}', b'{"wake_id":"x","generation":"1"}'):
        reply = call("POST", control(space, "/ack"), body, token=claimed["token"])
        assert reply.code == "INVALID_REQUEST"
    other = f"{space}-other"
    make(call, other, pull(space))
    assert answer(call, other, "ack", claimed).code == "TOKEN_INVALID"


def test_tokens_of_a_deleted_subscription_stay_dead(call: Caller, space: str) -> None:
    create(call, f"{space}/a")
    make(call, space, pull(space))
    append(call, f"{space}/a")
    old = claim(call, space)
    assert call("DELETE", control(space)).status == 204
    assert answer(call, space, "ack", old, done=True).code == "SUBSCRIPTION_NOT_FOUND"
    make(call, space, pull(space))
    append(call, f"{space}/a")
    assert claim(call, space)["generation"] == old["generation"] + 1
    assert answer(call, space, "ack", old, done=True).code == "FENCED"


# -- restarts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kill", [True, False])
def test_everything_survives_a_restart(start_server: StartServer, hook: Hook, kill: bool) -> None:
    server = start_server()
    call = Caller(server)
    create(call, "wake/p")
    create(call, "p/a", [1])
    made = make(call, "p", pull("p", streams=["later"]))
    tail = append(call, "p/a", 2, 3)
    claimed = claim(call, "p")
    make(call, "deleted", pull("deleted"))
    call("DELETE", control("deleted"))
    keys = call("GET", "__ds/jwks.json").raw
    server.restart(kill=kill)
    assert call("GET", "__ds/jwks.json").raw == keys
    assert call("GET", control("deleted")).status == 404
    shown = call("GET", control("p")).body
    assert {**shown, "streams": []} == {**made, "streams": []}
    assert call("POST", control("p", "/claim"), {"worker": "w2"}).code == "ALREADY_CLAIMED"
    acks = [{"stream": "p/a", "offset": "00000000000000000008000000"}]
    assert answer(call, "p", "ack", claimed, acks=acks, done=True).body == {"ok": True, "next_wake": True}
    server.restart(kill=kill)
    assert cursors(call, "p") == {"p/a": "00000000000000000008000000", "later": "-1"}
    again = claim(call, "p", "w2")
    assert again["generation"] == claimed["generation"] + 1
    assert {item["path"]: item["tail_offset"] for item in again["streams"]} == {"p/a": tail, "later": "-1"}


def test_retries_and_leases_survive_a_crash(start_server: StartServer, hook: Hook) -> None:
    server = start_server()
    call = Caller(server)
    hook.status = 503
    make(call, "s", webhook("s", hook.url, lease_ttl_ms=SHORT_MS))
    tail = create(call, "s/a", [1])
    first = hook.next()
    eventually(lambda: call("GET", control("s")).body["status"], lambda status: status == "failed")
    server.kill()
    while not hook.calls.empty():
        hook.calls.get()
    hook.status = 200
    server.start()
    again = hook.next()
    assert again.body["wake_id"] == first.body["wake_id"]
    # Accepted, never answered: the lease runs out, also over another crash.
    server.restart(kill=True)
    following = hook.next()
    while (
        # The crash came before the acceptance was durable: the same wake once more.
        following.body["generation"] == again.body["generation"]
        # This lease, too, has run out before we got to the answer.
        or callback(call, following, ("s/a", tail)).status != 200
    ):
        following = hook.next()
    assert cursors(call, "s") == {"s/a": tail}


# -- TLS --------------------------------------------------------------------------------------------------


def certificate(directory: Path, name: str) -> Path:
    """A certificate that vouches for itself, with its key, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(tz=UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = directory / f"{name}.pem"
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM) + private)
    return path


@pytest.mark.parametrize("name", ["localhost", "elsewhere.example"])
def test_certificates_are_checked_against_the_name(
    start_server: StartServer, tmp_path: Path, name: str
) -> None:
    path = certificate(tmp_path, name)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(path)
    hook = Hook(tls)
    try:
        # Allow-listed, since the name resolves to this machine; the certificate has to fit all the same.
        server = start_server("--webhook-allow", "localhost", env={"SSL_CERT_FILE": str(path)})
        call = Caller(server)
        make(call, "s", webhook("s", hook.url))
        tail = create(call, "s/a", [1])
        if name == "localhost":
            assert callback(call, hook.next(), ("s/a", tail)).status == 200
        else:
            eventually(lambda: call("GET", control("s")).body["status"], lambda status: status == "failed")
            assert hook.calls.empty()
    finally:
        hook.close()


# -- permissions ------------------------------------------------------------------------------------------

SECRET = "a secret that is long enough for the tests of subscriptions"


def test_scopes_and_claims(start_server: StartServer, hook: Hook) -> None:
    from tailrace.auth import create_token

    server = start_server(env={"TAILRACE_AUTH_JWT_SECRET": SECRET})

    def caller(*scopes: str, streams: list[str] | None = None) -> Caller:
        return Caller(server, create_token(SECRET, sub="x", scopes=scopes, streams=streams))

    nobody, reader, writer, manager = Caller(server), caller("read"), caller("write"), caller("manage")
    narrow, narrow_reader = caller("manage", streams=["s/"]), caller("read", streams=["other/"])
    config = pull("s", wake_stream="s/wake", streams=["s/named"])
    assert nobody("GET", "__ds/jwks.json").status == 200
    refused = nobody("PUT", control("s"), config)
    assert (refused.status, refused.code) == (401, "unauthorized")
    for caller_without in (reader, writer):
        assert caller_without("PUT", control("s"), config).code == "forbidden"
    assert narrow("PUT", control("s"), {**config, "pattern": "**"}).code == "forbidden"
    assert narrow("PUT", control("s"), {**config, "streams": ["t"]}).code == "forbidden"
    assert narrow("PUT", control("s"), {**config, "wake_stream": "t"}).code == "forbidden"
    assert narrow("PUT", control("s"), config).status == 201
    for path in ("", "/claim"):
        method = "POST" if path else "GET"
        assert nobody(method, control("s", path), {"worker": "w"} if path else None).status == 401
        assert writer(method, control("s", path), {"worker": "w"} if path else None).status == 403
        assert narrow_reader(method, control("s", path), {"worker": "w"} if path else None).status == 403
    assert reader("GET", control("s")).status == 200
    assert reader("DELETE", control("s")).code == "forbidden"
    assert reader("POST", control("s", "/streams"), {"streams": ["s/b"]}).code == "forbidden"
    assert narrow("POST", control("s", "/streams"), {"streams": ["t"]}).code == "forbidden"
    assert manager("PUT", "s/a", [1]).status == 201
    claimed = claim(reader, "s")
    # The wake's token is the permission to answer it; the caller's own is not.
    body = {"wake_id": claimed["wake_id"], "generation": claimed["generation"], "done": True}
    assert manager("POST", control("s", "/ack"), body).code == "TOKEN_INVALID"
    assert nobody("POST", control("s", "/ack"), body).code == "TOKEN_INVALID"
    assert nobody("POST", control("s", "/ack"), body, token=claimed["token"]).status == 200
    # Without a claim about streams, too: those of the server and of the hub have rules of their own.
    for number, name in enumerate(("__audit__", "__deliveries__/g", "hub/audit", "hub/mbox/somebody")):
        own = {**pull("s", wake_stream="s/wake", streams=["s/named", name]), "pattern": None}
        assert manager("PUT", control(f"own{number}"), own).status == 201
        assert manager("GET", control(f"own{number}")).status == 200
        assert reader("GET", control(f"own{number}")).code == "forbidden"
        assert reader("POST", control(f"own{number}", "/claim"), {"worker": "w"}).code == "forbidden"
