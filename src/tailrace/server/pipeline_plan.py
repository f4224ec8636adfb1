"""What the pipeline is to do, as `GET /v1/pipeline/plan` tells it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from tailrace.common.errors import TailraceError
from tailrace.log.model import Stream
from tailrace.log.segment_catalogue import decode_plans, durable_plans
from tailrace.log.system_streams import has_index_files
from tailrace.routing.context import Context
from tailrace.schema.profiles.profile import read_profile
from tailrace.schema.registry import Registry, read_registry
from tailrace.schema.stream_schema import SCHEMA_DOCUMENT
from tailrace.search.index_files.index_plan import IndexPlan, index_plan, store_plan
from tailrace.server.documents import read_profile_kind
from tailrace.storage.index_coverage import IndexMerge, UncoveredSegment
from tailrace.storage.index_work import IndexWork, RollupRewrite, StreamIndexWork
from tailrace.storage.sealer_process import ManifestPublication
from tailrace.storage.sealing import SealingService
from tailrace.storage.segments.index_files import PlanRecord, plan_name
from tailrace.storage.segments.model import SegmentInfo, make_stream_id, stream_prefix

JOBS: Final = ("companions", "merge", "compact", "match", "shadow")
LAYOUT: Final = 1
PROFILE: Final = "profile"  # key of the document
REMEMBERED_MAX: Final = 65_536
PRIORITY: Final = 10
CHANGE_WAIT_S_MAX: Final = 4.0  # how long an answer waits for a plan that is being written down

Json = dict[str, object]


def index_plan_for(stream: Stream, keyed: bool) -> IndexPlan:
    """The plan that a stream's documents ask for, those included that are not durable yet."""
    documents = stream.documents or {}
    if not has_index_files(stream.name):
        return _build_index_plan(None, None, False)
    return _build_index_plan(documents.get(SCHEMA_DOCUMENT), documents.get(PROFILE), keyed)


@lru_cache(maxsize=256)
def _build_index_plan(schema: bytes | None, profile: bytes | None, keyed: bool) -> IndexPlan:
    registry = Registry(name="") if schema is None else read_registry(schema)
    return index_plan(registry, read_profile(profile).kind, keyed=keyed)


class PipelinePlanner:
    """Puts answers together. A plan is in the bucket before anybody is told of it."""

    def __init__(self, context: Context, sealing: SealingService, work: IndexWork) -> None:
        self._context = context
        self._log = context.log
        self._sealing = sealing
        self._work = work
        # The plan of each stream that is in the bucket, by hash and generation: not those before it, which
        # may be swept by now. One that is wanted again has another generation.
        self._stored: OrderedDict[str, tuple[str, int]] = OrderedDict()
        self.names: OrderedDict[str, str] = OrderedDict()  # of streams that were offered, by id
        self.shows_places = False  # in the order of pages, so that those of several workers can be joined

    async def of_stream(self, name: str, jobs: Sequence[str]) -> Json:
        """One stream, be there something to do for it or not."""
        until = self._context.loop.time() + CHANGE_WAIT_S_MAX
        while True:
            stream = self._log.readable(name)
            shown = await self._show(stream, await self._work.of(stream), jobs)
            if shown is not None:
                return self._answer([shown], None)
            left_s = until - self._context.loop.time()
            if left_s <= 0:
                raise TailraceError("unavailable", "the stream is changing; ask again")
            await self._work.change(left_s)

    async def page(self, after: str, limit: int, jobs: Sequence[str]) -> Json:
        """Streams with work, those that wait longest first."""
        place = _parse_page_position(after)
        found = self._work.after(place, limit)
        streams: list[Json] = []
        for work in found:
            stream = self._log.streams.get(work.number)
            if stream is None or stream.removed or stream.visible < 0:
                continue
            shown = await self._show(stream, work, jobs)
            if shown is not None and shown["work"]:
                if self.shows_places:
                    shown["place"] = f"{work.oldest_ns}.{work.number}"
                streams.append(shown)
        more = len(found) == limit
        return self._answer(streams, f"{found[-1].oldest_ns}.{found[-1].number}" if more else None)

    def _answer(self, streams: list[Json], next_after: str | None) -> Json:
        store = self._context.settings.object_store_url
        return {"layout": LAYOUT, "store": store, "streams": streams, "next_after": next_after}

    async def _show(self, stream: Stream, work: StreamIndexWork, jobs: Sequence[str]) -> Json | None:
        """None if another plan is wanted by now, which is told as soon as it is written down."""
        folder = make_stream_id(stream.name, stream.incarnation)
        prefix = stream_prefix(folder)
        entry = durable_plans(stream).wanted
        if entry is not None and (
            entry.hash != work.plan.hash or not await self._store(stream, folder, entry)
        ):
            return None
        self.names[folder] = stream.name
        if len(self.names) > REMEMBERED_MAX:
            self.names.popitem(last=False)
        generation = max(stream.cold.generation, self._log.store.db.cold.generation(stream.number))
        return {
            "stream": stream.name,
            "stream_id": folder,
            "epoch": stream.epoch,
            "content_type": stream.content_type,
            "profile": read_profile_kind(stream),
            "earliest": stream.earliest + 1,
            "manifest": {"object": f"{prefix}manifest.json", "generation": generation},
            "plan": self._plan(stream, entry, prefix),
            "work": _describe_work(work, prefix, jobs),
        }

    def _plan(self, stream: Stream, entry: PlanRecord | None, prefix: str) -> Json:
        if entry is None:
            wanted = index_plan_for(stream, False)
            return {"generation": 0, "hash": wanted.hash, "object": None, "families": list(wanted.families)}
        return {
            "generation": entry.generation,
            "hash": entry.hash,
            "object": prefix + plan_name(entry.hash),
            "families": list(entry.families),
        }

    async def _store(self, stream: Stream, folder: str, entry: PlanRecord) -> bool:
        if self._stored.get(folder) == (entry.hash, entry.generation):
            self._stored.move_to_end(folder)
            return True
        plan = index_plan_for(stream, decode_plans(stream.documents).keyed)
        if plan.hash != entry.hash:
            return False
        documents = stream.documents or {}
        schema = documents.get(SCHEMA_DOCUMENT)
        registry = Registry(name=stream.name) if schema is None else read_registry(schema)
        data = store_plan(plan, registry, documents.get(PROFILE))
        publication = ManifestPublication(stream_id=folder, objects={plan_name(plan.hash): data})
        report = await self._sealing.ask("plan", [stream.number], publication=publication)
        if report.error:
            raise TailraceError("unavailable", f"the plan cannot be stored: {report.error}")
        self._stored[folder] = (entry.hash, entry.generation)
        self._stored.move_to_end(folder)
        if len(self._stored) > REMEMBERED_MAX:
            self._stored.popitem(last=False)
        return True


def _parse_page_position(after: str) -> tuple[int, int]:
    """Where a page ended: the age and the number of its last stream."""
    if not after:
        return (-1, -1)
    oldest, _, number = after.partition(".")
    if not (oldest.isdigit() and number.isdigit() and len(after) <= 64):
        raise TailraceError("invalid_request", "after must be the next_after of an answer")
    return int(oldest), int(number)


def _describe_work(work: StreamIndexWork, prefix: str, jobs: Sequence[str]) -> list[Json]:
    found: list[Json] = []
    if "companions" in jobs:
        if work.offered:
            segments = [_describe_segment(one, prefix) for one in work.offered]
            found.append({"job": "companions", "priority": PRIORITY, "segments": segments})
        found += [_describe_rewrite(one, prefix) for one in work.rewrites]
    if "merge" in jobs:
        found += [_describe_merge(one, prefix) for one in work.merges]
    if "compact" in jobs:
        found += [_describe_compaction(run, prefix) for run in work.compactions]
    return found


def _describe_rewrite(rewrite: RollupRewrite, prefix: str) -> Json:
    """All of it is published at once, and takes the place of the merged file."""
    families = [rewrite.merged.family]
    return {
        "job": "companions",
        "priority": PRIORITY,
        "segments": [{**_describe_object(info, prefix), "families": families} for info in rewrite.segments],
        "replace": [prefix + rewrite.merged.object],
    }


def _describe_segment(one: UncoveredSegment, prefix: str) -> Json:
    return {**_describe_object(one.info, prefix), "families": list(one.families)}


def _describe_compaction(run: Sequence[SegmentInfo], prefix: str) -> Json:
    return {
        "job": "compact",
        "first": run[0].first,
        "last": run[-1].last,
        "segments": [_describe_object(info, prefix) for info in run],
    }


def _describe_object(info: SegmentInfo, prefix: str) -> Json:
    return {
        "object": prefix + info.key,
        "epoch": info.epoch,
        "first": info.first,
        "last": info.last,
        "rows": info.rows,
        "bytes": info.bytes,
        "raw_bytes": info.payload_bytes,
        "sha256": info.sha256,
    }


def _describe_merge(merge: IndexMerge, prefix: str) -> Json:
    return {
        "job": "merge",
        "family": merge.family,
        "level": merge.level,
        "first": merge.first,
        "last": merge.last,
        "inputs": [prefix + one.object for one in merge.inputs],
        "input_sha256": [one.sha256 for one in merge.inputs],
    }
