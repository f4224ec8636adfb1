"""Every route of the routing table, with each kind of insufficient token: refused in the one shape."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pytest

from support.calls import Caller, eventually
from support.server import ServerProcess
from support.wire import Answer, Wire
from tailrace.auth import Action, create_token
from tailrace.common.clock import FakeClock
from tailrace.server.routes import ROUTES

JSON = "application/json"
SECRET = "a secret that only the server and this test know"
OTHER_SECRET = "another secret, which the server has never heard of"
STREAM, SUBSCRIPTION, DATABASE = "described", "described", "default"

PATHS = list(dict.fromkeys(route.path for route in ROUTES))
METHODS = ("get", "head", "put", "post", "patch", "delete")

# What names no stream and no database, and what somebody who may manage others' streams gets there.
BEYOND_PREFIXES: dict[str, set[int]] = {
    "readMetrics": {200},
    "readServerDetails": {200},
    "readServerMemory": {200},
    "seal": {403},  # of a stream
    "listApiKeys": {403},
    "makeApiKey": {403},
    "revokeApiKey": {403},
    "listRevocations": {403},
    "revoke": {403},
    "followRevocations": {200},
    "listStreams": {200},  # with nothing in it
    "listDatabases": {200},  # likewise
    "exportTracesByDefault": {403},
    "readPipelinePlan": {403},
    "rebuildCompanions": {403},
    "publishCompanions": {403},
    "sendHeartbeat": {403},
    "watchByEvents": {403},
    "watchSeveralByEvents": {403},
    "sendHubMessage": {400, 403},  # a token is all it takes; this one's message is none
    "listHubShards": {200},
}


class Operation(NamedTuple):
    id: str
    method: str
    path: str  # as it is in the routing table
    scope: str | None  # None: for everybody; "": any good token
    by_wake: bool

    def __str__(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def target(self) -> str:
        filled = {
            "name": STREAM,
            "id": SUBSCRIPTION,
            "key": "k",
            "db": DATABASE,
            "collection": "c",
            "path": "c/1",
            "source": "s",
        }
        query = {
            "/v1/server/_seal": f"?stream={STREAM}",
            "/realtime/sse": f"?database={DATABASE}&collection=c",
        }
        return self.path.format(**filled) + query.get(self.path, "")

    @property
    def body(self) -> bytes | None:
        if self.method not in ("PUT", "POST", "PATCH"):
            return None
        given: Any = {}
        if self.path.endswith("/subscriptions/{id}"):
            given = {"type": "pull-wake", "streams": [STREAM], "wake_stream": "elsewhere/wakes"}
        elif self.path == "/realtime/sse":
            given = {"database": DATABASE, "subscriptions": [{"id": "1", "query": {"collection": "c"}}]}
        return json.dumps(given).encode()


def operations() -> Iterator[Operation]:
    explicit = {(route.method, route.path) for route in ROUTES}
    for route in ROUTES:
        scope = None if route.action is Action.PUBLIC else route.action.required_scopes.split(" ")[0]
        for method in route.methods:
            if method == route.method or (method, route.path) not in explicit:
                yield Operation(
                    route.operation, method, route.path, scope, route.action is Action.ANSWER_WAKE
                )


OPERATIONS = list(operations())
GUARDED = [one for one in OPERATIONS if one.scope is not None and not one.by_wake]


class Place(NamedTuple):
    port: int
    tokens: dict[str, str]  # what is sent with a request, by who sends it
    lacking: dict[str, str]  # API keys that are good, but not for this scope


@pytest.fixture(scope="module", params=["1", pytest.param("2", marks=pytest.mark.nightly)])
def place(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Place]:
    env = {
        "TAILRACE_AUTH_JWT_SECRET": SECRET,
        "TAILRACE_AUTH_PUBLIC_STREAMS": "public/",
        "TAILRACE_OTLP_TRACES_STREAM": "spans",
    }
    args = ["--workers", request.param]
    server = ServerProcess(tmp_path_factory.mktemp("walk") / "data", env=env, args=args).start()
    manager = Wire(server.port, bearer=create_token(SECRET, sub="m", scopes=["manage"]))
    assert manager.put(STREAM, JSON).status == 201
    assert manager.put("public/news", JSON, "[1]").status == 201
    assert manager.put("wakes", JSON).status == 201
    config = {"type": "pull-wake", "streams": [STREAM], "wake_stream": "wakes"}
    made = manager.put(f"/v1/stream/__ds/subscriptions/{SUBSCRIPTION}", JSON, json.dumps(config))
    assert made.status == 201

    def key(*scopes: str) -> str:
        answer = manager.post("/v1/server/_keys", JSON, json.dumps({"sub": "small", "scopes": scopes}))
        assert answer.status == 201, answer.body
        return answer.json["key"]

    everything = ["read", "write", "manage", "system"]
    revoked = create_token(SECRET, sub="r", scopes=everything)
    gone_key = key("manage")
    jti = json.loads(_payload(revoked))["jti"]
    assert manager.post("/v1/server/_revocations", JSON, json.dumps({"jti": jti})).status == 200
    assert manager.delete(f"/v1/server/_keys/{gone_key.split('_')[1]}").status == 204
    tokens = {
        "wrong": create_token(OTHER_SECRET, sub="x", scopes=everything),
        "expired": create_token(SECRET, sub="x", scopes=everything, clock=FakeClock()),
        "revoked": revoked,
        "revoked key": gone_key,
        "made-up key": "trk_0123456789abcdef_" + "x" * 43,
        "made-up grant": "trg_" + "x" * 43,
        "no JWT": "nonsense",
        "elsewhere": create_token(
            SECRET, sub="e", scopes=everything, streams=["elsewhere/"], dbs=["elsewhere"]
        ),
    }
    lacking = {"read": key("write"), "write": key("read"), "manage": key("read", "write")}
    manager.close()
    _await_others(server, (revoked, gone_key), lacking.values())
    yield Place(server.port, tokens, lacking)
    server.stop()


def _await_others(server: ServerProcess, bad: Iterable[str], good: Iterable[str]) -> None:
    """Workers that were not asked themselves look at keys and revocations once a second."""
    calls = [(Caller(server, token), True) for token in bad] + [
        (Caller(server, token), False) for token in good
    ]
    for number in range(8):  # names of all workers

        def refusals(name: str = f"spread/{number}") -> list[bool]:
            return [call("GET", name).status == 401 for call, _ in calls]

        eventually(refusals, lambda found: found == [wanted for _, wanted in calls])


def _payload(token: str) -> bytes:
    middle = token.split(".")[1]
    return base64.urlsafe_b64decode(middle + "=" * (-len(middle) % 4))


@pytest.fixture
def wire(place: Place) -> Iterator[Wire]:
    opened = Wire(place.port)
    yield opened
    opened.close()


def ask(wire: Wire, operation: Operation, token: str | None) -> Answer:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    if operation.body is not None:
        headers["Content-Type"] = JSON
    # The wire looks at the shape of every error: one object, one code of the table, the code's status.
    answer = wire.call(operation.method, operation.target, headers, operation.body)
    if token is not None:
        assert token.encode() not in answer.body, "a refusal quotes no token"
    return answer


def check_unauthorized(operation: Operation, answer: Answer) -> None:
    assert answer.status == 401, (str(operation), answer.body)
    assert answer["WWW-Authenticate"].startswith('Bearer realm="tailrace"'), str(operation)
    if operation.method != "HEAD":
        assert answer.code == "unauthorized", str(operation)


def test_there_is_something_to_walk() -> None:
    assert len(OPERATIONS) > 70
    scopes = [one.scope for one in GUARDED]
    assert {"read", "write", "manage", ""} == set(scopes)


def test_nobody_gets_in_without_a_token(place: Place, wire: Wire) -> None:
    for operation in GUARDED:
        check_unauthorized(operation, ask(wire, operation, None))


@pytest.mark.parametrize(
    "kind", ["wrong", "expired", "revoked", "revoked key", "made-up key", "made-up grant", "no JWT"]
)
def test_a_token_that_is_not_good_is_refused_everywhere(place: Place, wire: Wire, kind: str) -> None:
    for operation in GUARDED:
        answer = ask(wire, operation, place.tokens[kind])
        check_unauthorized(operation, answer)
        assert 'error="invalid_token"' in answer["WWW-Authenticate"]


def test_a_token_for_other_streams_and_databases(place: Place, wire: Wire) -> None:
    """403, whether or not the thing exists; what names neither is in the table above."""
    seen: set[str] = set()
    for operation in GUARDED:
        named = "{name}" in operation.path or "{db}" in operation.path or "__ds" in operation.path
        expected = {403} if named else BEYOND_PREFIXES[operation.id]
        seen |= set() if named else {operation.id}
        answer = ask(wire, operation, place.tokens["elsewhere"])
        assert answer.status in expected, (str(operation), answer.status, answer.body)
        if operation.path in ("/v1/streams", "/v1/databases") and operation.method == "GET":
            assert answer.json == []
    assert seen == set(BEYOND_PREFIXES), "a row for what is not there"


def test_an_api_key_of_too_small_a_scope(place: Place, wire: Wire) -> None:
    for operation in GUARDED:
        if not operation.scope:
            continue
        answer = ask(wire, operation, place.lacking[operation.scope])
        assert answer.status == 403, (str(operation), answer.body)
        challenge = answer["WWW-Authenticate"]
        assert f'error="insufficient_scope", scope="{operation.scope}"' in challenge, str(operation)
        if operation.method != "HEAD":
            assert answer.code == "forbidden"


def test_what_is_for_everybody_minds_no_token(place: Place, wire: Wire) -> None:
    """Health above all: whoever looks whether a server lives has no token, or an old one."""
    for operation in OPERATIONS:
        if operation.scope is not None:
            continue
        for token in (None, place.tokens["wrong"], place.tokens["expired"]):
            answer = ask(wire, operation, token)
            assert answer.status not in (401, 403), (str(operation), answer.body)
    for path in ("/healthz", "/health", "/readyz", "/hub/health"):
        assert wire.get(path, {"Authorization": "Basic x"}).status == 200
    for path in PATHS:
        assert wire.call("OPTIONS", Operation("", "OPTIONS", path, None, False).target).status == 204


def test_what_workers_say_to_each_other_is_not_said_to_others(place: Place, wire: Wire) -> None:
    for path in ("metrics", "follow", "interest", "wake"):
        for method in ("GET", "POST"):
            assert wire.call(method, f"/_worker/{path}", {"Content-Type": JSON}, b"{}").status == 404


def test_a_wake_is_answered_with_its_own_token_only(place: Place, wire: Wire) -> None:
    found = [one for one in OPERATIONS if one.by_wake]
    assert len(found) == 3
    for operation in found:
        for token in (None, *place.tokens.values(), *place.lacking.values()):
            answer = ask(wire, operation, token)
            assert answer.status == 401, (str(operation), answer.body)
            assert answer.code in ("TOKEN_INVALID", "TOKEN_EXPIRED", "unauthorized")


def test_a_public_stream_is_read_by_everybody_and_nothing_else_is(place: Place, wire: Wire) -> None:
    for operation in GUARDED:
        of_stream = "{name}" in operation.path and "__ds" not in operation.path
        target = operation.target.replace(STREAM, "public/news") if of_stream else operation.target
        headers = {} if operation.body is None else {"Content-Type": JSON}
        answer = wire.call(operation.method, target, headers, operation.body)
        if of_stream and operation.scope == "read" and "/touch/" not in operation.path:
            assert answer.status not in (401, 403), (str(operation), answer.body)
        else:
            check_unauthorized(operation, answer)
    assert wire.get("public/news").json == [1]
    assert wire.get("publicity").status == 401, "a prefix is a prefix of the name"
    wrong = {"Authorization": f"Bearer {place.tokens['wrong']}"}
    assert wire.get("public/news", wrong).status == 401, "a token that is given has to be good"


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE"])
@pytest.mark.parametrize("guarded", [True, False])
def test_system_streams_are_written_by_nobody(place: Place, http: Wire, method: str, guarded: bool) -> None:
    """With and without authentication, whatever the token says; `hub/` streams are the hub's."""
    manager = create_token(SECRET, sub="m", scopes=["read", "write", "manage"])
    guarded_wire = Wire(place.port, bearer=manager)
    wire = guarded_wire if guarded else http
    for name in ("__registry__", "__deliveries__/g", "__subs__/g", "__changes__/default/c/0", "hub/topic/x"):
        answer = wire.call(method, name, {"Content-Type": JSON}, b"[1]")
        assert answer.status in (400, 405), (name, answer.status)
        assert answer.code in ("read_only_stream", "reserved_name"), name
    guarded_wire.close()


@pytest.mark.parametrize("scopes", [("read",), ("write",), ("read", "write")])
def test_whoever_may_not_look_is_not_told_what_there_is(place: Place, scopes: tuple[str, ...]) -> None:
    """Every answer about a system stream is the same whether or not there is one."""
    wire = Wire(place.port, bearer=create_token(SECRET, sub="x", scopes=scopes, streams=["mine/"]))
    for method in METHODS:
        there, not_there = (
            wire.call(
                method.upper(), name, {"Content-Type": JSON}, b"[1]" if method in ("put", "post") else None
            )
            for name in ("__registry__", "__nothing__")
        )
        told = there.body.replace(b"__registry__", b"__nothing__")
        assert (there.status, told) == (not_there.status, not_there.body), method
    wire.close()
