"""Companions built by the real kernels from real segments, listed in memory instead of in a manifest."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from support.log_harness import LogHarness
from tailrace.common.limits import Limits
from tailrace.log.model import Stream
from tailrace.log.segment_catalogue import IndexFileSet
from tailrace.schema.registry import Registry
from tailrace.search.index_files.catalogue import IndexCatalogue
from tailrace.search.index_files.file_cache import IndexFileCache
from tailrace.search.index_files.format import FTS, index_file_key
from tailrace.search.index_files.index_plan import BuildPlan, index_plan
from tailrace.spark.index.file_writer import IndexedRange
from tailrace.spark.index.full_text import merge_splits
from tailrace.spark.index.segment_build import BuildRequest, build_segment
from tailrace.storage.object_store.cache import LoopTasks, ObjectCache
from tailrace.storage.segments.index_files import IndexFile, PlanHistory, PlanRecord
from tailrace.storage.segments.model import SegmentInfo, make_stream_id, stream_prefix


class FamilyStore:
    """The companions of one stream, and a catalogue over them."""

    def __init__(self, real: LogHarness, bucket: Path) -> None:
        self._real = real
        self._bucket = bucket
        self.index_files: list[IndexFile] = []
        self.plans: dict[str, PlanRecord] = {}
        self._changed()

    async def of(self, stream: Stream) -> IndexFileSet:
        """The catalogue that a catalogue asks."""
        return self._listed

    def _changed(self) -> None:
        self._listed = IndexFileSet(
            tuple(self.index_files), (), PlanHistory(True, tuple(self.plans.values()))
        )

    def catalogue(self) -> IndexCatalogue:
        self.work = LoopTasks(self._real.loop, 2)
        self._readers = LoopTasks(self._real.loop, 2)
        parts = ObjectCache(self._bucket.as_uri(), None, 0, Limits(), self.work)
        # Even of small files no more is read than what is asked for.
        return IndexCatalogue(IndexFileCache(parts, self.work, self._readers, whole_bytes_max=0), self.of)

    def close(self) -> None:
        self._real.run(self._readers.end())
        self._real.run(self.work.end())

    # -- what a pipeline and its owner would do ----------------------------------------------------------

    def build(
        self,
        stream: Stream,
        info: SegmentInfo,
        registry: Registry,
        families: Collection[str],
        profile: str = "generic",
    ) -> list[IndexFile]:
        """Builds what is missing of one segment under the plan of a registry, and lists it."""
        plan = index_plan(registry, profile, keyed=True)
        listed = {(one.family, one.fingerprint) for one in self.index_files if one.first == info.first}
        wanted = frozenset(
            family
            for family in plan.families
            if family in families and (family, plan.family_fingerprint(family)) not in listed
        )
        if not wanted:
            return []
        prefix = stream_prefix(make_stream_id(stream.name, stream.incarnation))
        raw = (self._bucket / (prefix + info.key)).read_bytes()
        with tempfile.TemporaryDirectory() as directory:
            request = BuildRequest(
                make_stream_id(stream.name, stream.incarnation),
                info.first,
                info.last,
                info.rows,
                info.sha256,
                wanted,
                BuildPlan(plan, registry, {"kind": profile}),
                Path(directory),
            )
            built = build_segment(raw, request)
        prints = {name: value for name, value in plan.fingerprints.items() if not name.startswith("family:")}
        families_of = {family: plan.family_fingerprint(family) for family in plan.families}
        self.plans[plan.hash] = PlanRecord(len(self.plans) + 1, plan.hash, families_of, prints)
        made: list[IndexFile] = []
        for one in built:
            sha256 = hashlib.sha256(one.data).hexdigest()
            name = index_file_key(plan.hash, one.family, info.first, info.last, sha256)
            path = self._bucket / (prefix + name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(one.data)
            made.append(
                IndexFile(
                    one.family,
                    info.first,
                    info.last,
                    one.rows,
                    name,
                    len(one.data),
                    sha256,
                    dict(one.stats),
                    plan.hash,
                    0,
                    plan.family_fingerprint(one.family),
                )
            )
        self.index_files += made
        self._changed()
        return made

    def merge_splits(self, stream: Stream, limit: int) -> None:
        """Joins adjacent splits of one plan, up to some, as the merging job does."""
        splits = sorted((one for one in self.index_files if one.family == FTS), key=lambda one: one.first)
        joined: list[IndexFile] = []
        for split in splits:
            if joined and (split.plan_hash, split.first) != (joined[-1].plan_hash, joined[-1].last + 1):
                joined.clear()
            joined.append(split)
            if len(joined) == limit:
                break
        if len(joined) < limit:
            return
        identity = make_stream_id(stream.name, stream.incarnation)
        prefix = stream_prefix(identity)
        first, last, rows = joined[0].first, joined[-1].last, sum(one.rows for one in joined)
        raws = [(self._bucket / (prefix + one.object)).read_bytes() for one in joined]
        if any(hashlib.sha256(raw).hexdigest() != one.sha256 for raw, one in zip(raws, joined, strict=True)):
            return  # a job does not merge what is damaged
        data = merge_splits(raws, IndexedRange(identity, first, last, rows, joined[0].plan_hash)).data
        sha256 = hashlib.sha256(data).hexdigest()
        name = index_file_key(joined[0].plan_hash, FTS, first, last, sha256)
        (self._bucket / (prefix + name)).write_bytes(data)
        merged = msgspec.structs.replace(
            joined[0],
            last=last,
            rows=rows,
            object=name,
            bytes=len(data),
            sha256=sha256,
            stats={},
            level=1,
        )
        self.index_files = [one for one in self.index_files if one not in joined] + [merged]
        self._changed()

    def drop(self, wanted: Callable[[IndexFile], bool]) -> None:
        """Takes companions off the list."""
        self.index_files = [one for one in self.index_files if not wanted(one)]
        self._changed()

    def exists(self, stream: Stream, index_file: IndexFile) -> bool:
        prefix = stream_prefix(make_stream_id(stream.name, stream.incarnation))
        return (self._bucket / (prefix + index_file.object)).exists()

    def damage(self, stream: Stream, index_file: IndexFile, *, remove: bool) -> None:
        """Spoils the object of a companion that stays listed."""
        path = self._bucket / (
            stream_prefix(make_stream_id(stream.name, stream.incarnation)) + index_file.object
        )
        if remove:
            path.unlink(missing_ok=True)
        elif path.exists():
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 0xFF
            path.write_bytes(data)
