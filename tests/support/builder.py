"""A pipeline that publishes what the kernels build, without Spark."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from threading import get_ident
from typing import Any

from support.offers import FakePipeline, plan, uncovered
from tailrace.search.index_files.format import index_file_key
from tailrace.search.index_files.index_plan import load_plan
from tailrace.spark.index.file_writer import BuiltIndexFile
from tailrace.spark.index.segment_build import BuildRequest, build_segment


class Builder(FakePipeline):
    """Publishes what the kernels build."""

    def publish_all(self, name: str) -> list[Path]:
        """Builds and publishes companions of every segment that lacks them; answers their files."""
        shown, made = plan(self.call, name), list[Path]()
        stored = load_plan((self.objects / shown["plan"]["object"]).read_bytes())
        prefix = shown["manifest"]["object"].removesuffix("manifest.json")
        for one in uncovered(shown):
            with tempfile.TemporaryDirectory() as directory:
                request = BuildRequest(
                    shown["stream_id"],
                    one["first"],
                    one["last"],
                    one["rows"],
                    one["sha256"],
                    frozenset(one["families"]),
                    stored,
                    Path(directory),
                )
                built = build_segment((self.objects / one["object"]).read_bytes(), request)
            added: list[dict[str, Any]] = []
            for file in built:
                sha256 = hashlib.sha256(file.data).hexdigest()
                key = prefix + index_file_key(
                    stored.plan.hash, file.family, one["first"], one["last"], sha256
                )
                path = self.objects / key
                path.parent.mkdir(parents=True, exist_ok=True)
                # Whole or not at all, as in a bucket: others may be at the same.
                unfinished = path.with_name(f"{path.name}.{get_ident()}")
                unfinished.write_bytes(file.data)
                unfinished.rename(path)
                made.append(path)
                added.append(self.added(file, key, sha256, one))
            body = {
                "stream_id": shown["stream_id"],
                "job": "companions",
                "plan_hash": shown["plan"]["hash"],
                "inputs": [{"object": one["object"], "sha256": one["sha256"]}],
                "add": added,
            }
            reply = self.publish(body)
            assert reply.status == 200, reply.body
        return made

    def added(self, file: BuiltIndexFile, key: str, sha256: str, segment: dict[str, Any]) -> dict[str, Any]:
        return {
            "family": file.family,
            "first": segment["first"],
            "last": segment["last"],
            "rows": file.rows,
            "object": key,
            "bytes": len(file.data),
            "sha256": sha256,
            "stats": dict(file.stats),
        }
