"""What a deployment answers to every kind of read, in a form that can be stored and compared.

A recorded answer is a request with the status, the headers that count and the body. `expect` says how the
body is compared with the same request later: `bytes` exactly, `prefix` where the server itself may have
appended since, `members` where an object may have more members than before.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

from compatibility.contents import DOCS, EVENT_MS
from compatibility.deployment import Deployment
from support.calls import Reply

Recorded = dict[str, Any]
SHOWN = (
    "content-type",
    "etag",
    "stream-closed",
    "stream-earliest-offset",
    "stream-expires-at",
    "stream-next-offset",
    "stream-retention",
    "stream-retention-bytes",
    "stream-ttl",
    "stream-up-to-date",
)
LISTED = (
    "name",
    "content_type",
    "created_at",
    "ttl_seconds",
    "closed",
    "epoch",
    "next_offset",
    "end_offset",
    "earliest_offset",
    "total_size_bytes",
)
# The end of a sliding window moves with each read.
SLIDING = frozenset({"life/ttl"})
SEARCHES = (
    "service:svc1",
    "message:customer",
    'message:"customer 3"',
    "status:>=500",
    "NOT level:error",
    "req*",
    "has:requestId duration:<3",
)


ZERO = "0" * 26
DIFFERENCE_CHARS = 2000
FIRST = "00000000000000000004000000"  # behind the first entry of any stream


def ask(to: Deployment, request: Recorded) -> Reply:
    headers = request.get("headers")
    return to.call(request["method"], request["path"], request.get("body"), headers=headers)


def record(to: Deployment, path: str, expect: str, body: Any = None, **more: Any) -> Recorded:
    """One request and its answer; of a JSON answer the `members`, or those of its `rows`, are kept."""
    request: Recorded = {"method": "GET" if body is None else "POST", "path": path, "expect": expect, **more}
    if body is not None:
        request["body"] = body
    return {**request, **answer(request, ask(to, request))}


def answer(request: Recorded, reply: Reply) -> Recorded:
    headers = {name: reply.headers[name] for name in request.get("shown", SHOWN) if name in reply.headers}
    found: Recorded = {"status": reply.status, "answered": headers}
    if request["expect"] == "members" and reply.raw:
        found["content"] = _kept(request, reply.body) if reply.status < 400 else _error_code(reply.body)
    elif request["expect"] != "members":
        try:
            found["text"] = reply.raw.decode()
        except UnicodeDecodeError:
            found["base64"] = base64.b64encode(reply.raw).decode()
    return found


def _kept(request: Recorded, body: Any) -> Any:
    if "members" in request:
        return {name: body[name] for name in request["members"]}
    if "rows" in request:
        return [{name: row[name] for name in request["rows"]} for row in body]
    return body


def differences(to: Deployment, recorded: Sequence[Recorded]) -> list[str]:
    """Every request whose answer is another one now."""
    found: list[str] = []
    for before in recorded:
        now = answer(before, ask(to, before))
        if not _same(before, now):
            then = {name: before[name] for name in now if name in before}
            lines = (f"{before['method']} {before['path']}", f"stored {then}", f"now    {now}")
            found.append("\n".join(line[:DIFFERENCE_CHARS] for line in lines))
    return found


def _error_code(body: Any) -> Any:
    """An error without its message, whose wording may change."""
    if isinstance(body, dict) and isinstance(body.get("error"), dict):
        return {"error": {"code": body["error"].get("code")}}
    return body


def _same(before: Recorded, now: Recorded) -> bool:
    if before["status"] != now["status"]:
        return False
    if before["expect"] == "members":
        stored = before.get("content")
        return _contains(now.get("content"), stored if before["status"] < 400 else _error_code(stored))
    if before["expect"] == "prefix":
        return now["text"].rstrip("]").startswith(before["text"].rstrip("]"))
    content = ("answered", "text", "base64")
    return all(before.get(name) == now.get(name) for name in content)


def _contains(now: Any, before: Any) -> bool:
    """Whether everything is as it was; objects may have new members."""
    if isinstance(before, dict) and isinstance(now, dict):
        return all(name in now and _contains(now[name], value) for name, value in before.items())
    if isinstance(before, list) and isinstance(now, list):
        return len(now) == len(before) and all(map(_contains, now, before))
    return now == before


# -- what is asked -------------------------------------------------------------------------------------------


def everything(to: Deployment) -> list[Recorded]:
    """Every stream and everything about it, then everything else."""
    return [*streams(to), *_queries(to), *_others(to)]


def streams(to: Deployment, *left_out: str) -> list[Recorded]:
    """Every stream, except those whose names begin with one of these."""
    names = [row["name"] for row in to.ask("GET", "/v1/streams?limit=1000&system=true").body]
    recorded = [record(to, "/v1/streams?limit=1000", "members", rows=LISTED)]
    for name in names:
        if not name.startswith(("__changes__/default/published/", *left_out)):  # trimmed at any time
            recorded += _stream(to, name)
    # A deleted name, a deleted source of forks, an entry of a stream's first life, and one that was trimmed.
    gone = ("deleted/gone?offset=-1", "deleted/source?offset=-1", f"deleted/recreated?offset={FIRST}")
    recorded += (record(to, path, "members") for path in (*gone, f"life/trimmed?offset={ZERO}"))
    return recorded


def _stream(to: Deployment, name: str) -> Iterator[Recorded]:
    path = quote(name)
    shown = tuple(one for one in SHOWN if not (name in SLIDING and one == "stream-expires-at"))
    if name.startswith(("__", "hub/")):
        yield from pages(to, path, (), "prefix")
        return
    yield record(to, path, "bytes", shown=shown, method="HEAD")
    yield from pages(to, path, shown, "bytes")
    if name.startswith(("schema/", "profile/", "source/", "fork/json")):
        yield record(to, f"{path}/_schema", "members")
        yield record(to, f"{path}/_profile", "members")


def pages(to: Deployment, path: str, shown: Sequence[str], expect: str) -> Iterator[Recorded]:
    """From every offset that a reader is given on the way."""
    offset = "-1"
    while True:
        reply = to.call("GET", f"{path}?offset={offset}")
        yield record(to, f"{path}?offset={offset}", expect, shown=shown)
        if reply.headers.get("stream-up-to-date") == "true":
            return
        assert reply.status == 200, (path, reply)
        offset = reply.headers["stream-next-offset"]


def _queries(to: Deployment) -> Iterator[Recorded]:
    for key in ("key-0", "key-1", "none"):
        yield record(to, f"plain/keyed?offset=-1&key={key}", "bytes")
    for name in ("schema/orders", "profile/spans"):
        yield record(to, f"{name}/_routing_keys", "members", members=["keys", "next_after"])
    yield record(to, "schema/orders?offset=-1&key=u0", "bytes")
    yield record(to, f"profile/evlog?offset=-1&filter={quote('service:svc1 status:>=500')}", "bytes")
    for q in SEARCHES:
        body = {"q": q, "size": 500, "sort": ["offset:asc"]}
        yield record(to, "profile/evlog/_search", "members", body, members=["hits", "total"])
    body = {"q": "service:checkout", "size": 500, "sort": ["offset:asc"]}
    yield record(to, "profile/spans/_search", "members", body, members=["hits", "total"])
    for groups in ([], ["service"]):
        span = {"rollup": "requests", "from": EVENT_MS, "to": EVENT_MS + 600_000, "interval": "1m"}
        body = {**span, "group_by": groups}
        yield record(to, "profile/evlog/_aggregate", "members", body, members=["buckets"])


def _others(to: Deployment) -> Iterator[Recorded]:
    for name in ("jobs", "mail", "gone"):
        members = ["id", "type", "pattern", "streams", "lease_ttl_ms"]
        yield record(to, f"__ds/subscriptions/{name}", "members", members=members)
    yield record(to, "__ds/jwks.json", "members")
    for name in ("orders", "todos", "followed", "published"):
        members = ["generation", "partitions", "documents", "readRule", "writeRule"]
        yield record(to, f"{DOCS}/collections/{name}", "members", members=members)
        asked = {"collection": name, "orderBy": [{"field": "id", "direction": "asc"}], "limit": 100}
        yield record(to, f"{DOCS}/query", "members", asked, members=["documents"])
    for document in ("orders/o-2", "orders/o-1", "todos/pushed", "followed/b%2F%C3%BC"):
        yield record(to, f"{DOCS}/docs/{document}", "members")
    yield record(to, "profile/state/touch/meta", "members", members=["activeTemplates"])
    if to.layout.guarded:
        yield record(to, "/v1/server/_keys", "members")
        yield record(to, "/v1/server/_revocations", "members")


def dumped(found: Any) -> bytes:
    return json.dumps(found, ensure_ascii=False, indent=1, sort_keys=True).encode()
