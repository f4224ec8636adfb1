"""A server that loses its disk: streams of every kind, what they looked like, and what is lost."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import NamedTuple

from support.calls import Caller
from support.server import ServerProcess

JSON = {"Content-Type": "application/json"}
BYTES = {"Content-Type": "application/octet-stream"}
TEXT = {"Content-Type": "text/plain"}
# Small segments, so that streams have several.
ENV = {"TAILRACE_SEAL_ENTRIES": "40"}
SHOWN = (
    "content-type",
    "stream-closed",
    "stream-next-offset",
    "stream-earliest-offset",
    "stream-ttl",
    "stream-retention",
    "stream-retention-bytes",
)


class Seen(NamedTuple):
    """A stream as HTTP shows it: everything in it by hash, and its headers."""

    digest: str
    headers: dict[str, str]


def digest(call: Caller, name: str) -> str:
    """Of all entries, whatever the pages they come in."""
    found = hashlib.sha256()
    offset, first = "-1", True
    while True:
        page = call("GET", f"{name}?offset={offset}")
        assert page.status == 200, (name, page)
        body = page.raw
        if page.headers.get("content-type", "").startswith("application/json"):
            body = body[1:-1]
            body = body if first or not body else b"," + body
        first = first and not body
        found.update(body)
        if page.headers.get("stream-up-to-date") == "true":
            return found.hexdigest()
        offset = page.headers["stream-next-offset"]


def look(call: Caller, name: str) -> Seen:
    headers = call("HEAD", name).headers
    return Seen(digest(call, name), {key: headers[key] for key in SHOWN if key in headers})


def seal(call: Caller) -> None:
    """However long it takes: each request that is not done says so, and the next one goes on."""
    while (answer := call("POST", "/v1/server/_seal")).status == 202:
        pass
    assert answer.status == 200, answer


def put(call: Caller, name: str, headers: dict[str, str], body: bytes | None = None) -> None:
    assert call("PUT", name, body, headers=headers).status == 201, name


def post(call: Caller, name: str, body: bytes, headers: dict[str, str]) -> str:
    answer = call("POST", name, body, headers=headers)
    assert answer.status in (200, 204), (name, answer)
    return answer.headers["stream-next-offset"]


def producing(who: str, epoch: int, seq: int) -> dict[str, str]:
    return {**JSON, "Producer-Id": who, "Producer-Epoch": str(epoch), "Producer-Seq": str(seq)}


class World:
    """What there is, and what was seen of it before the loss."""

    def __init__(self) -> None:
        self.seen: dict[str, Seen] = {}
        self.lost: dict[str, list[str]] = {}  # offsets that were handed out for entries that are lost

    def build(self, call: Caller) -> None:
        self._plain(call)
        self._forks(call)
        self._ended(call)
        seal(call)
        assert call("DELETE", "deleted").status == 204
        assert call("DELETE", "recreated").status == 204
        put(call, "recreated", TEXT)
        post(call, "recreated", b"second life", TEXT)
        assert call("DELETE", "source/gone").status == 204
        seal(call)
        rows = call("GET", "/v1/streams?limit=1000").body
        self.seen = {row["name"]: look(call, row["name"]) for row in rows}
        assert len(self.seen) == 20

    def _plain(self, call: Caller) -> None:
        put(call, "json", JSON)
        for number in range(100):
            post(call, "json", json.dumps([{"n": number}, [number]]).encode(), JSON)
        put(call, "bytes", BYTES)
        for number in range(50):
            post(call, "bytes", bytes(range(number, number + 100)), BYTES)
        put(call, "text", TEXT, "größer ≥ kleiner\n".encode())
        put(call, "keyed", JSON)
        for number in range(90):
            post(call, "keyed", b"%d" % number, {**JSON, "Stream-Key": f"key-{number % 3}"})
        put(call, "empty", {})
        put(call, "empty/json", JSON)
        put(call, "late", {})
        post(call, "late", b"[1,2]", JSON)
        put(call, "seq", JSON)
        post(call, "seq", b"1", {**JSON, "Stream-Seq": "b"})
        put(call, "window", {**JSON, "Stream-TTL": "3600"}, b"[1]")
        put(call, "expires", {**JSON, "Stream-Expires-At": "2400-01-01T00:00:00Z"}, b"[1]")
        put(
            call,
            "retention",
            {**JSON, "Stream-Retention": "3600", "Stream-Retention-Bytes": "100000"},
            b"[1]",
        )
        put(call, "produced", JSON)
        for seq in range(3):
            post(call, "produced", b"[%d]" % seq, producing("one", 2, seq))
        post(call, "produced", b'["two"]', producing("two", 0, 0))

    def _forks(self, call: Caller) -> None:
        put(call, "fork", {"Stream-Forked-From": "/v1/stream/json"})
        post(call, "fork", b'["of json"]', JSON)
        middle = call("GET", "json?offset=-1").headers["stream-next-offset"]
        put(call, "fork/of/fork", {"Stream-Forked-From": "/v1/stream/fork", "Stream-Fork-Offset": middle})
        put(call, "fork/of/fork/of/fork", {"Stream-Forked-From": "/v1/stream/fork/of/fork"}, b"[7,8]")
        start = {"Stream-Forked-From": "/v1/stream/bytes", "Stream-Fork-Offset": "-1"}
        put(call, "fork/part", {**start, "Stream-Fork-Sub-Offset": "10"})
        put(call, "source/gone", TEXT, b"inherited")
        put(call, "fork/of/gone", {**TEXT, "Stream-Forked-From": "/v1/stream/source/gone"}, b" and own")

    def _ended(self, call: Caller) -> None:
        put(call, "closed", TEXT, b"all")
        assert call("POST", "closed", headers={"Stream-Closed": "true"}).status == 204
        put(call, "closed/by", JSON)
        post(call, "closed/by", b"[1]", {**producing("closer", 0, 0), "Stream-Closed": "true"})
        put(call, "deleted", JSON, b"[1]")
        put(call, "recreated", JSON, b"[1,2,3]")

    def lose(self, call: Caller, unrecorded: str = "never/recorded") -> None:
        """Entries that are acknowledged and that no manifest will ever tell of."""
        for name, headers in (("json", JSON), ("bytes", BYTES), ("fork", JSON), ("empty/json", JSON)):
            self.lost[name] = [post(call, name, b'"lost"', headers) for _ in range(3)]
        put(call, unrecorded, JSON)
        self.lost[unrecorded] = [post(call, unrecorded, b'"lost"', JSON)]

    def check(self, call: Caller) -> None:
        """Everything that was sealed is there, and nothing else."""
        names = [row["name"] for row in call("GET", "/v1/streams?limit=1000").body]
        assert names == sorted(self.seen)
        for name, seen in self.seen.items():
            assert look(call, name) == seen, name

    def check_lost(self, call: Caller) -> None:
        """An offset of a lost entry is gone; it stays gone when the same number is used again."""
        for _ in range(2):
            for name, offsets in self.lost.items():
                headers = BYTES if name == "bytes" else JSON
                if name not in self.seen:
                    call("PUT", name, headers=headers)
                for offset in offsets:
                    refused = call("GET", f"{name}?offset={offset}")
                    assert (refused.status, refused.code) == (410, "offset_gone"), (name, offset)
                assert post(call, name, b'"new"', headers) not in offsets


def destroy(server: ServerProcess) -> None:
    """SIGKILL, and the disk is gone."""
    if server.running:
        server.kill()
    shutil.rmtree(server.data_dir)


def bootstrap(data_dir: Path, url: str, env: dict[str, str] | None = None, *args: str) -> ServerProcess:
    flags = ("--object-store", url, "--bootstrap", *args)
    return ServerProcess(data_dir, args=flags, env={**ENV, **(env or {})})
