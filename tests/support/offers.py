"""A pipeline that builds nothing: it does what the plan says with files of its own, and publishes them.

Whoever publishes real companions is told apart from this one by nobody: the server never looks inside.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from support.calls import Caller, Reply, eventually
from tailrace.spark.jobs.compaction import compact_segments
from tailrace.storage.segments.index_files import index_file_name

SEARCH: dict[str, Any] = {
    "primaryTimestampField": "at",
    "fields": {
        "at": {"kind": "date", "bindings": [{"version": 1, "jsonPointer": "/at"}], "column": True},
        "who": {"kind": "keyword", "bindings": [{"version": 1, "jsonPointer": "/who"}], "exact": True},
        "what": {
            "kind": "text",
            "analyzer": "unicode_word_v1",
            "bindings": [{"version": 1, "jsonPointer": "/what"}],
        },
    },
    "rollups": {"all": {"intervals": ["1m"], "dimensions": ["who"], "measures": {"n": {"kind": "count"}}}},
}
FAMILIES = ["exact", "col", "fts", "agg"]


def configured(call: Caller, name: str, headers: dict[str, str] | None = None) -> None:
    """A JSON stream with everything searchable."""
    assert call("PUT", name, headers={"Content-Type": "application/json", **(headers or {})}).status == 201
    reply = call("POST", f"{name}/_schema", {"schema": {"type": "object"}, "search": SEARCH})
    assert reply.status == 200, reply.body


def fill(call: Caller, name: str, count: int, start: int = 0) -> None:
    rows = [{"at": n * 1000, "who": f"w{n % 3}", "what": f"word{n}"} for n in range(start, start + count)]
    assert call("POST", name, rows).status == 204


def seal(call: Caller, name: str = "") -> None:
    """Everything there is goes to the object store, in a segment of its own."""
    path = f"/v1/server/_seal?stream={name}" if name else "/v1/server/_seal"
    eventually(lambda: call("POST", path).status, lambda status: status == 200)


def plan(call: Caller, name: str) -> dict[str, Any]:
    reply = call("GET", f"/v1/pipeline/plan?stream={name}")
    assert reply.status == 200, reply.body
    (shown,) = reply.body["streams"]
    return shown


def planned(call: Caller, name: str, segments: int) -> dict[str, Any]:
    """The plan of a stream once so many of its segments wait for companions."""
    return eventually(lambda: plan(call, name), lambda shown: len(uncovered(shown)) == segments)


def uncovered(shown: dict[str, Any]) -> list[dict[str, Any]]:
    return [segment for work in shown["work"] if work["job"] == "companions" for segment in work["segments"]]


def sealed(call: Caller, name: str, segments: int, rows: int = 3) -> dict[str, Any]:
    """A configured stream with so many segments, none of which has companions."""
    configured(call, name)
    for number in range(segments):
        fill(call, name, rows, number * rows)
        seal(call, name)
    return planned(call, name, segments)


def head_of(pipeline: FakePipeline, shown: dict[str, Any]) -> dict[str, Any]:
    return json.loads((pipeline.objects / shown["manifest"]["object"]).read_bytes())


def events(call: Caller, folder: str) -> list[dict[str, Any]]:
    """What `__segments__` tells of one stream."""
    found: list[dict[str, Any]] = []
    offset = "-1"
    while True:
        reply = call("GET", f"__segments__?offset={offset}")
        assert reply.status == 200
        found += reply.body
        if reply.headers.get("stream-up-to-date") == "true":
            return [one for one in found if one["key"].split("/")[0] == folder]
        offset = reply.headers["stream-next-offset"]


class FakePipeline:
    """Writes to a bucket that is a directory."""

    def __init__(self, call: Caller, data_dir: Path) -> None:
        self.call = call
        self.objects = data_dir / "objects"

    def put(
        self, shown: dict[str, Any], family: str, first: int, last: int, text: str = ""
    ) -> dict[str, Any]:
        """One companion in the bucket, and how it is published."""
        data = f"{family} {first} {last} {text}".encode()
        sha256 = hashlib.sha256(data).hexdigest()
        key = index_file_name(shown["plan"]["hash"], family, first, last, sha256, "parquet")
        prefix = shown["manifest"]["object"].removesuffix("manifest.json")
        path = self.objects / prefix / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return {
            "family": family,
            "first": first,
            "last": last,
            "rows": last - first + 1,
            "object": prefix + key,
            "bytes": len(data),
            "sha256": sha256,
            "stats": {"ts_min": 1, "ts_max": 2},
        }

    def offer(self, shown: dict[str, Any], segments: list[dict[str, Any]], text: str = "") -> dict[str, Any]:
        """Companions of segments, as they would be published."""
        return {
            "stream_id": shown["stream_id"],
            "job": "companions",
            "plan_hash": shown["plan"]["hash"],
            "writer": "test/1",
            "inputs": [{"object": one["object"], "sha256": one["sha256"]} for one in segments],
            "add": [
                self.put(shown, family, one["first"], one["last"], text)
                for one in segments
                for family in one["families"]
            ],
        }

    def merge(self, shown: dict[str, Any], work: dict[str, Any], text: str = "merged") -> dict[str, Any]:
        return {
            "stream_id": shown["stream_id"],
            "job": "merge",
            "plan_hash": shown["plan"]["hash"],
            "inputs": [
                {"object": key, "sha256": sha256}
                for key, sha256 in zip(work["inputs"], work["input_sha256"], strict=True)
            ],
            "add": [self.put(shown, work["family"], work["first"], work["last"], text)],
            "replace": work["inputs"],
        }

    def join(self, shown: dict[str, Any], work: dict[str, Any], attempt: str = "") -> dict[str, Any]:
        """One segment made of several by the real kernel, in the bucket, and how it is published."""
        raws = [(self.objects / one["object"]).read_bytes() for one in work["segments"]]
        prefix = shown["manifest"]["object"].removesuffix("manifest.json")
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "joined"
            info = compact_segments(raws, path, attempt)
            shutil.copyfile(path, self.objects / (prefix + info.key))
        stats = {"epoch": info.epoch, "raw_bytes": info.payload_bytes}
        return {
            "stream_id": shown["stream_id"],
            "job": "compact",
            "plan_hash": shown["plan"]["hash"],
            "inputs": [{"object": one["object"], "sha256": one["sha256"]} for one in work["segments"]],
            "add": [
                {
                    "family": "segment",
                    "first": info.first,
                    "last": info.last,
                    "rows": info.rows,
                    "object": prefix + info.key,
                    "bytes": info.bytes,
                    "sha256": info.sha256,
                    "stats": {**stats, "first_ns": info.first_ns, "last_ns": info.last_ns},
                }
            ],
            "replace": [one["object"] for one in work["segments"]],
        }

    def publish(self, body: dict[str, Any]) -> Reply:
        return self.call("POST", "/v1/pipeline/publish", body)

    def do_all(self, name: str) -> None:
        """Everything there is to do for a stream."""
        while (shown := plan(self.call, name))["work"]:
            for work in shown["work"]:
                if work["job"] == "compact":
                    body = self.join(shown, work)
                elif work["job"] == "merge":
                    body = self.merge(shown, work)
                elif "replace" in work:
                    body = {**self.offer(shown, work["segments"]), "replace": work["replace"]}
                else:
                    body = self.offer(shown, work["segments"][:4])
                assert self.publish(body).status in (200, 409)
