"""Writes one of everything that Tailrace keeps, by HTTP and WebSocket only.

`history` is sealed to the bucket, `hot` is what a later checkpoint holds, and `tail` is in the journal only
when the server is killed. They return what clients were given and keep: offsets, cursors, tokens, keys.
"""

from __future__ import annotations

import time
from typing import Any

from compatibility.deployment import ADMIN, BYTES, JSON, TEXT, Deployment, Facts, token_for
from support.calls import eventually
from support.loss import seal
from support.replica import Replica
from support.wire import Wire

FAR_S = str(100 * 365 * 86_400)
DOCS = "/v1/databases/default"
EVENT_MS = 1_767_225_600_000  # 2026-01-01, the time of the first event
V1 = {
    "type": "object",
    "properties": {"ts": {"type": "string"}, "user": {"type": "string"}},
    "required": ["ts"],
    "additionalProperties": False,
}
V2 = {
    "type": "object",
    "properties": {"at": {"type": "string"}, "user": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["at", "n"],
    "additionalProperties": False,
}
V3 = {**V2, "properties": {**V2["properties"], "total": {"type": "number"}}, "required": ["at", "n", "total"]}
LENS = [
    {"op": "rename", "from": "/ts", "to": "/at"},
    {"op": "add", "path": "/n", "schema": {"type": "integer"}, "default": 0},
]
LENS_3 = [{"op": "add", "path": "/total", "schema": {"type": "number"}, "default": 0.5}]
ENTITY = "public.todos"


def producing(who: str, epoch: int, seq: int) -> dict[str, str]:
    return {"Producer_Id": who, "Producer_Epoch": str(epoch), "Producer_Seq": str(seq)}


def json_stream(to: Deployment, name: str, body: Any = None, **headers: str) -> None:
    to.ask("PUT", name, body, 201, **JSON, **headers)


def append(to: Deployment, name: str, *records: Any, **headers: str) -> str:
    reply = to.ask("POST", name, list(records), 200, 204, **headers)
    return reply.headers["stream-next-offset"]


def seal_one(to: Deployment, name: str) -> None:
    path = f"/v1/server/_seal?stream={name}"
    eventually(lambda: to.call("POST", path).status, lambda status: status == 200)


# -- streams -------------------------------------------------------------------------------------------------


def plain_streams(to: Deployment) -> None:
    to.ask("PUT", "plain/bytes", None, 201, **BYTES)
    to.ask("PUT", "plain/text", "größer ≥ kleiner\n".encode(), 201, **TEXT)
    json_stream(to, "plain/json", [0, "ü", None, {"n": 1.5}, [True]])
    json_stream(to, "plain/keyed")
    for segment in range(3):
        for number in range(segment * 10, segment * 10 + 10):
            to.ask("POST", "plain/bytes", bytes(range(number, number + 50)), 204, **BYTES)
            append(to, "plain/json", {"n": number}, [number])
            append(to, "plain/keyed", number, Stream_Key=f"key-{number % 3}")
        for name in ("plain/bytes", "plain/json", "plain/keyed"):
            seal_one(to, name)
    to.ask("PUT", "plain/empty", None, 201)
    to.ask("PUT", "plain/late", None, 201)
    append(to, "plain/late", 1, 2)
    json_stream(to, "plain/seq")
    append(to, "plain/seq", 1, Stream_Seq="b")
    to.ask("PUT", "plain/large", b"0123456789abcdef" * 5000, 201, **TEXT)
    to.ask("PUT", "public/notes", b"readable without a token", 201, **TEXT)


def lifetimes(to: Deployment) -> None:
    json_stream(to, "life/ttl", [1], Stream_TTL=FAR_S)
    json_stream(to, "life/expires", [1], Stream_Expires_At="2400-01-01T00:00:00Z")
    json_stream(to, "life/retention", [1], Stream_Retention=FAR_S, Stream_Retention_Bytes="100000000")
    to.ask("PUT", "life/trimmed", None, 201, **TEXT, Stream_Retention_Bytes="60")
    for number in range(12):
        to.ask("POST", "life/trimmed", b"%020d" % number, 204, **TEXT)
        if number % 3 == 2:
            seal_one(to, "life/trimmed")
    eventually(
        lambda: to.call("HEAD", "life/trimmed").headers["stream-earliest-offset"],
        lambda earliest: earliest != "0" * 26,
    )
    to.ask("PUT", "life/closed", b"all", 201, **TEXT)
    to.ask("POST", "life/closed", None, 204, Stream_Closed="true")
    json_stream(to, "life/closed-by-producer")
    append(to, "life/closed-by-producer", 1, **producing("closer", 0, 0), Stream_Closed="true")


def producers(to: Deployment) -> None:
    json_stream(to, "producers")
    for seq in range(3):
        append(to, "producers", seq, **producing("one", 2, seq))
    append(to, "producers", "two", **producing("two", 0, 0))


def forks(to: Deployment) -> None:
    fork = "/v1/stream/"
    to.ask("PUT", "fork/json", None, 201, Stream_Forked_From=f"{fork}plain/json")
    append(to, "fork/json", "of json")
    first = to.ask("GET", "plain/bytes?offset=-1").headers["stream-next-offset"]  # one page
    bytes_fork = {"Stream_Forked_From": f"{fork}plain/bytes", "Stream_Fork_Offset": first}
    to.ask("PUT", "fork/bytes", None, 201, **bytes_fork)
    part = {"Stream_Forked_From": f"{fork}plain/bytes", "Stream_Fork_Offset": "-1"}
    to.ask("PUT", "fork/part", None, 201, **part, Stream_Fork_Sub_Offset="10")
    to.ask("PUT", "fork/of/fork", None, 201, Stream_Forked_From=f"{fork}fork/json")
    append(to, "fork/of/fork", "of fork")
    to.ask("PUT", "fork/of/fork/of/fork", [7, 8], 201, **JSON, Stream_Forked_From=f"{fork}fork/of/fork")


def deletions(to: Deployment) -> None:
    """Names of deleted streams, and a deleted source that its forks still read."""
    json_stream(to, "deleted/gone", [1])
    json_stream(to, "deleted/recreated", [1, 2, 3])
    to.ask("PUT", "deleted/source", b"inherited", 201, **TEXT)
    source = {"Stream_Forked_From": "/v1/stream/deleted/source"}
    to.ask("PUT", "fork/of-deleted", b" and own", 201, **TEXT, **source)
    seal(to.call)
    for name in ("deleted/gone", "deleted/recreated", "deleted/source"):
        to.ask("DELETE", name, None, 204)
    to.ask("PUT", "deleted/recreated", b"second life", 201, **TEXT)


# -- schemas and profiles ------------------------------------------------------------------------------------


def schemas(to: Deployment) -> None:
    json_stream(to, "schema/orders")
    key = {"jsonPointer": "/user", "required": False}
    to.ask("POST", "schema/orders/_schema", {"schema": V1, "routingKey": key})
    append(to, "schema/orders", *({"ts": str(n), "user": f"u{n % 2}"} for n in range(4)))
    seal_one(to, "schema/orders")
    lens = {"apiVersion": "durable.lens/v1", "schema": "schema/orders"}
    to.ask("POST", "schema/orders/_schema", {"schema": V2, "lens": {**lens, "from": 1, "to": 2, "ops": LENS}})
    append(to, "schema/orders", {"at": "4", "user": "u2", "n": 4})
    to.ask(
        "POST", "schema/orders/_schema", {"schema": V3, "lens": {**lens, "from": 2, "to": 3, "ops": LENS_3}}
    )
    append(to, "schema/orders", {"at": "5", "user": "u0", "n": 5, "total": 7})


def events(first: int, count: int = 10) -> list[dict[str, Any]]:
    return [
        {
            "timestamp": EVENT_MS + 1000 * number,
            "service": f"svc{number % 3}",
            "level": "error" if number % 4 == 0 else "info",
            "status": 500 if number % 4 == 0 else 200,
            "duration": number / 4,
            "requestId": f"req-{number}",
            "message": f"request {number} of customer {number % 7} is through",
            "password": "hidden",
        }
        for number in range(first, first + count)
    ]


def spans(first: int, count: int = 5) -> dict[str, Any]:
    listed = [
        {
            "traceId": f"{number + 1:032x}",
            "spanId": f"{number + 1:016x}",
            "name": f"GET /orders/{number}",
            "kind": 2,
            "startTimeUnixNano": str((EVENT_MS + 1000 * number) * 1_000_000),
            "endTimeUnixNano": str((EVENT_MS + 1000 * number + 20) * 1_000_000),
            "attributes": [
                {"key": "http.request.method", "value": {"stringValue": "GET"}},
                {"key": "http.response.status_code", "value": {"intValue": "200"}},
            ],
        }
        for number in range(first, first + count)
    ]
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "Checkout"}}]}
    return {
        "resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": {"name": "lib"}, "spans": listed}]}]
    }


def interval(number: int) -> dict[str, Any]:
    start = EVENT_MS + 10_000 * number
    return {
        "metric": "requests",
        "unit": "1",
        "windowStart": start,
        "windowEnd": start + 10_000,
        "count": number + 1,
        "sum": 2 * number + 1,
        "tags": {"host": f"h{number % 2}"},
    }


def change(key: str, tenant: str, operation: str = "insert") -> dict[str, Any]:
    return {"type": ENTITY, "key": key, "value": {"tenant": tenant}, "headers": {"operation": operation}}


def profiles(to: Deployment) -> None:
    """Three segments of each, so that indexes are built and segments are joined."""
    kinds: dict[str, dict[str, Any]] = {
        "profile/evlog": {"kind": "evlog", "redactKeys": ["card"]},
        "profile/spans": {"kind": "otel-traces"},
        "profile/metrics": {"kind": "metrics"},
        "profile/state": {"kind": "state-protocol", "touch": {"enabled": True}},
    }
    for name, profile in kinds.items():
        json_stream(to, name)
        to.ask("POST", f"{name}/_profile", {"profile": profile})
    for number in range(3):
        append(to, "profile/evlog", *events(number * 10))
        to.ask("POST", "profile/spans/_otlp/v1/traces", spans(number * 5))
        append(to, "profile/metrics", *(interval(one) for one in range(number * 3, number * 3 + 3)))
        append(to, "profile/state", change(str(number), f"t{number}"))
        for name in kinds:
            seal_one(to, name)


def touches(to: Deployment) -> Facts:
    template = {"entity": ENTITY, "fields": [{"name": "tenant", "encoding": "string"}]}
    told = to.ask("POST", "profile/state/touch/templates/activate", {"templates": [template]}).body
    cursor = to.ask("GET", "profile/state/touch/meta?settle=flush").body["cursor"]
    return {"touch_cursor": cursor, "touch_template": told["activated"][0]["templateId"]}


# -- subscriptions -------------------------------------------------------------------------------------------


def subscriptions(to: Deployment) -> Facts:
    json_stream(to, "wake/jobs")
    pull = {"type": "pull-wake", "pattern": "jobs/*", "streams": ["later"], "wake_stream": "wake/jobs"}
    base = "__ds/subscriptions"
    to.ask("PUT", f"{base}/jobs", {**pull, "description": "größer", "lease_ttl_ms": 600_000}, 201)
    # Nothing listens there: the call stays pending, and is repeated.
    hook = {"type": "webhook", "pattern": "mail/**", "webhook": {"url": "http://127.0.0.1:9/hook"}}
    to.ask("PUT", f"{base}/mail", hook, 201)
    to.ask("PUT", f"{base}/gone", hook, 201)
    to.ask("DELETE", f"{base}/gone", None, 204)
    json_stream(to, "jobs/a", [1, 2])
    json_stream(to, "mail/out", [1])

    def claim() -> Any:
        return to.call("POST", f"{base}/jobs/claim", {"worker": "w1"})

    claimed = eventually(claim, lambda reply: reply.status == 200).body
    tails = {one["path"]: one["tail_offset"] for one in claimed["streams"]}
    acks = [{"stream": "jobs/a", "offset": tails["jobs/a"]}]
    over = {"wake_id": claimed["wake_id"], "generation": claimed["generation"]}
    done = to.call("POST", f"{base}/jobs/ack", {**over, "acks": acks, "done": True}, token=claimed["token"])
    assert done.status == 200, done
    keys = to.ask("GET", "__ds/jwks.json").body
    return {"claim": claimed, "jwks": keys}


# -- the hub -------------------------------------------------------------------------------------------------


SUBSCRIPTION = {"topic": "kept/#", "durable": True, "name": "reader"}
GROUP = {"topic": "kept/#", "durable": True, "group": "workers"}


def mailboxes(to: Deployment) -> Facts:
    """One committed message, one dead letter, and messages that wait."""
    owner, sender = to.actor("svc/bill"), to.actor("shop/web")
    owner.register(durable=True, commit="manual", capabilities=["billing", "quotes"])
    sender.register()
    for number in range(5):
        sent = {"to": "@(svc/bill)", "type": "order", "data": {"id": number}, "ack": "accepted"}
        assert sender.ask("hub:send", sent)["payload"]["status"] == "accepted"
    offsets = [owner.of("order")["metadata"]["mailbox"]["offset"] for _ in range(5)]
    rejected = {"offset": offsets[1], "reason": "no number"}
    commit = {"actorAddress": "@(svc/bill)", "offset": offsets[1], "reject": [rejected]}
    done = owner.ask("hub:mailbox_commit", commit)
    assert done["type"] == "hub:mailbox_committed", done
    to.ask("GET", "hub/dead-letters?offset=-1")
    owner.ask("hub:disconnect")
    sender.ask("hub:disconnect")
    return {"mailbox_committed": done["payload"]["committed"]}


def topics(to: Deployment) -> Facts:
    """A durable subscriber, and a durable group of which the message is not committed."""
    reader, member, publisher = to.actor("svc/reader"), to.actor("svc/member"), to.actor("shop/web")
    reader.register()
    member.register(commit="manual")
    subscribed = reader.ask("hub:subscribe", SUBSCRIPTION)["payload"]
    assert member.ask("hub:subscribe", GROUP)["type"] == "hub:subscribed"
    publisher.ask("hub:publish", {"topic": "kept/eu", "type": "news", "data": 1})
    for actor in (reader, member):
        assert actor.of("news")["payload"] == 1
        actor.ask("hub:disconnect")
    publisher.ask("hub:disconnect")
    return {"topic_subscription": subscribed["subscriptionId"]}


def waiting_messages(to: Deployment) -> None:
    """What is sent while its recipients are away, once with a producer's number."""
    sender = to.actor("shop/web")
    producer = {"producer": {"id": "w", "epoch": 0, "seq": 0}}
    once = {"to": "@(svc/bill)", "type": "order", "data": "once", "ack": "accepted"}
    sender.ask("hub:send", once, metadata=producer)
    published = sender.ask("hub:publish", {"topic": "kept/eu", "type": "news", "data": 2})
    assert published["type"] == "hub:published", published
    capable = {"targetCapability": "billing"}
    broadcast = sender.ask("hub:broadcast", {"type": "closing", "data": 5}, metadata=capable)
    assert broadcast["type"] == "hub:broadcast_ack", broadcast
    sender.ask("hub:disconnect")


def registrations(to: Deployment) -> Facts:
    """Connections stay open until the server is killed: an actor that leaves is registered no longer."""
    actor = to.actor("svc/present")
    actor.register(capabilities=["presence"], ttlSeconds=300)
    to.connections.append(actor)
    found = actor.ask("hub:discover", {"pattern": "@(svc/*)"})["payload"]["actors"]
    return {"registered": sorted(one["address"] for one in found)}


# -- documents -----------------------------------------------------------------------------------------------


def put_document(to: Deployment, path: str, data: Any) -> None:
    to.ask("PUT", f"{DOCS}/docs/{path}", data)


def documents(to: Deployment) -> None:
    rule = {"partitions": 4, "writeRule": "doc.total < 1000", "retention": "36500d", "tombstoneTtl": "36500d"}
    to.ask("PUT", f"{DOCS}/collections/orders", rule)
    for number in range(12):
        put_document(to, f"orders/o-{number}", {"total": number * 10, "status": "open"})
    to.ask("DELETE", f"{DOCS}/docs/orders/o-1", None, 204)
    # Changes that are older than their collection keeps them make its view be published in the bucket.
    to.ask("PUT", f"{DOCS}/collections/published", {"partitions": 2, "retention": "1s"})
    for number in range(3):
        put_document(to, f"published/p-{number}", {"n": number})
    writes = [{"op": "put", "path": f"todos/t-{n}", "data": {"n": n}} for n in range(3)]
    to.ask("POST", f"{DOCS}/batch", {"atomic": True, "writes": writes})
    json_stream(to, "source/changes")
    to.ask("POST", "source/changes/_profile", {"profile": {"kind": "state-protocol"}})
    records = [
        {"type": "order", "key": key, "value": {"n": n}, "headers": {"operation": "insert"}}
        for n, key in enumerate(("a", "b/ü"))
    ]
    append(to, "source/changes", *records)
    followed = {"order": {"collection": "followed", "partitions": 2}}
    given = {"kind": "stream", "stream": "source/changes", "collections": followed}
    to.ask("PUT", f"{DOCS}/sources/changes", given, 201)
    phase = lambda: to.ask("GET", f"{DOCS}/sources/changes").body["status"]["phase"]  # noqa: E731
    eventually(phase, lambda seen: seen == "live")


QUERY = {"collection": "orders", "where": "doc.total >= 100"}


def realtime(to: Deployment) -> Facts:
    """A resume token and a replication checkpoint, with changes behind them."""
    live = to.live()
    live.send("subscribe", "s", query=QUERY, sendSnapshot=True)
    token = live.take_until("snapshot-end")[-1]["payload"]["token"]
    live.close()
    _, checkpoint = Replica(to.call, "orders").walk()
    _, first = Replica(to.call, "orders").pull(limit=5)
    put_document(to, "orders/o-2", {"total": 200, "status": "grown"})
    put_document(to, "orders/o-11", {"total": 5, "status": "shrunk"})
    pushed = Replica(to.call, "todos").push(({"id": "pushed", "n": 9, "_deleted": False}, None))
    assert pushed == []
    return {"resume_token": token, "checkpoints": [first, checkpoint]}


# -- identities ----------------------------------------------------------------------------------------------


def identities(to: Deployment) -> Facts:
    """API keys and revocations; a server without authentication keeps none."""
    if not to.layout.guarded:
        return {}
    path = "/v1/server/_keys"
    asked = {"sub": "ci", "scopes": ["write"], "streams": ["plain/"]}
    good = to.ask("POST", path, asked, 201).body
    revoked = to.ask("POST", path, {"sub": "old", "scopes": ["read"]}, 201).body
    to.ask("DELETE", f"{path}/{revoked['id']}", None, 204)
    token = token_for("left", "read", jti="4be1a0c29d3f7a58")
    to.ask("POST", "/v1/server/_revocations", {"jti": "4be1a0c29d3f7a58"})
    to.ask("POST", "/v1/server/_revocations", {"sub": "ada"})
    return {
        "key": good["key"],
        "refused": [revoked["key"], token, token_for("ada", "read")],
        "admin": token_for(ADMIN),
    }


# -- the three parts -----------------------------------------------------------------------------------------


def history(to: Deployment) -> Facts:
    """Everything, sealed to the bucket."""
    for part in (plain_streams, lifetimes, producers, forks, deletions, schemas, profiles, documents):
        part(to)
    facts = {**touches(to), **subscriptions(to), **mailboxes(to), **topics(to), **identities(to)}
    eventually(lambda: to.call("GET", "__stream_metrics__?offset=-1").raw, lambda raw: raw.startswith(b"[{"))
    seal(to.call)
    with Wire(to.server.port, bearer=to.token(ADMIN)).events("plain/json?offset=-1&live=sse") as read:
        read.data()
        read.control()
        facts["event_id"] = read.last_id
    return {**facts, "sealed_ns": time.time_ns()}


def hot(to: Deployment, number: int) -> None:
    """A few more entries of streams of each kind."""
    for name in ("plain/json", "fork/json", "fork/of/fork", "producers"):
        append(to, name, {"part": number})
    to.ask("POST", "plain/bytes", bytes([number]) * 20, 204, **BYTES)
    to.ask("POST", "plain/text", f"part {number}\n".encode(), 204, **TEXT)
    append(to, "plain/keyed", number, Stream_Key="key-1")
    append(to, "producers", number, **producing("one", 2, 2 + number))
    append(to, "schema/orders", {"at": "6", "user": f"u{number}", "n": 6, "total": number})
    append(to, "profile/evlog", *events(20 + 10 * number))
    append(to, "profile/state", change(f"part-{number}", "t1", "update"))
    append(to, "jobs/a", number)
    json_stream(to, f"created/in/part/{number}", [number])
    put_document(to, f"orders/part-{number}", {"total": 100 + number, "status": "open"})


def tail(to: Deployment) -> Facts:
    """The last requests before the crash."""
    hot(to, 2)
    waiting_messages(to)
    return realtime(to)
