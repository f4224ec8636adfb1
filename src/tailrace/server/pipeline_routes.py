"""Routes /v1/pipeline/*: plan, publish and heartbeat; and the metrics of the pipeline.

A pipeline requests the plan (which index files, merges and compactions are missing), writes the objects to
the bucket, and publishes them. The server checks each publication and lists its objects in the manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import lru_cache
from typing import Annotated, Final, Literal, NotRequired, TypedDict, TypeVar

import msgspec
import orjson

from tailrace.auth import Action, Identity
from tailrace.common.caches import LruCache
from tailrace.common.errors import TailraceError
from tailrace.common.server_metrics import ServerMetrics
from tailrace.http.exchange import Exchange
from tailrace.log.model import Stream
from tailrace.log.records import Op, Published, Sealed
from tailrace.log.segment_catalogue import decode_plans, durable_plans
from tailrace.log.system_streams import has_index_files
from tailrace.protocol.query_params import parse_query
from tailrace.routing import responses
from tailrace.routing.context import Context
from tailrace.routing.deferred_responses import DeferredResponses, Response
from tailrace.routing.openapi import (
    COUNT,
    STRING,
    Component,
    Count,
    answer,
    array,
    nullable,
    obj,
    query,
    request,
)
from tailrace.routing.openapi import Json as Schema
from tailrace.routing.request_headers import check_content_encoding
from tailrace.routing.table import Route, route_group
from tailrace.schema.profiles.profile import read_profile
from tailrace.schema.registry import Registry, read_registry
from tailrace.schema.stream_schema import SCHEMA_DOCUMENT
from tailrace.search.index_files.index_plan import IndexPlan, index_plan, store_plan
from tailrace.server.index_status import IndexSnapshot, read_profile_kind
from tailrace.server.pipeline_process import (
    FAMILIES,
    STATES,
    PipelineBacklog,
    PipelineHeartbeat,
    PipelineProcess,
    PipelineState,
)
from tailrace.storage.index_coverage import IndexMerge, UncoveredSegment
from tailrace.storage.index_publication import OBJECTS_MAX, PublicationService
from tailrace.storage.index_work import IndexWork, RollupRewrite, StreamIndexWork
from tailrace.storage.manifests.model import ManifestError
from tailrace.storage.manifests.store import ManifestStore
from tailrace.storage.object_store.interface import ObjectStoreError
from tailrace.storage.sealer_client import ManifestPublication
from tailrace.storage.sealing import SealingService
from tailrace.storage.segments.cold_reader import ColdReader
from tailrace.storage.segments.index_files import PlanRecord, PublishRequest, plan_name
from tailrace.storage.segments.model import SegmentInfo, make_stream_id, stream_prefix

JOBS: Final = ("companions", "merge", "compact", "match", "shadow")
LAYOUT: Final = 1
PROFILE: Final = "profile"  # key of the document
REMEMBERED_MAX: Final = 65_536
PRIORITY: Final = 10
CHANGE_WAIT_S_MAX: Final = 4.0  # how long a response waits for a plan that is not stored yet

Json = dict[str, object]


def index_plan_for(stream: Stream, keyed: bool) -> IndexPlan:
    """The index plan of a stream's documents, including those that are not durable yet."""
    documents = stream.documents or {}
    if not has_index_files(stream.name):
        return _build_index_plan(None, None, False)
    return _build_index_plan(documents.get(SCHEMA_DOCUMENT), documents.get(PROFILE), keyed)


@lru_cache(maxsize=256)
def _build_index_plan(schema: bytes | None, profile: bytes | None, keyed: bool) -> IndexPlan:
    registry = Registry(name="") if schema is None else read_registry(schema)
    return index_plan(registry, read_profile(profile).kind, keyed=keyed)


class PipelinePlanner:
    """Builds the responses of `plan`. A plan is stored in the bucket before it is sent."""

    def __init__(self, context: Context, sealing: SealingService, work: IndexWork) -> None:
        self._context = context
        self._log = context.log
        self._sealing = sealing
        self._work = work
        # Hash and generation of the plan of each stream that is in the bucket. Only the last: earlier plans
        # may have been swept, and have another generation when they are needed again.
        self._stored: LruCache[str, tuple[str, int]] = LruCache(entries_max=REMEMBERED_MAX)
        # Of streams that were offered, by id.
        self.names: LruCache[str, str] = LruCache(entries_max=REMEMBERED_MAX)
        self.includes_positions = False  # so that the pages of several workers can be merged in order

    async def plan_for(self, name: str, jobs: Sequence[str]) -> Json:
        """The plan of one stream, with or without work."""
        until = self._context.loop.time() + CHANGE_WAIT_S_MAX
        while True:
            stream = self._log.readable(name)
            shown = await self._describe_stream(stream, await self._work.load(stream), jobs)
            if shown is not None:
                return self._plan_body([shown], None)
            left_s = until - self._context.loop.time()
            if left_s <= 0:
                raise TailraceError("unavailable", "the index plan is changing, retry the request")
            await self._work.change(left_s)

    async def page(self, after: str, limit: int, jobs: Sequence[str]) -> Json:
        """Streams with work, in the order of their oldest unindexed segment."""
        position = _parse_page_position(after)
        found = self._work.next_streams(position, limit)
        streams: list[Json] = []
        for work in found:
            stream = self._log.streams.get(work.number)
            if stream is None or stream.removed or stream.visible < 0:
                continue
            shown = await self._describe_stream(stream, work, jobs)
            if shown is not None and shown["work"]:
                if self.includes_positions:
                    shown["place"] = f"{work.oldest_ns}.{work.number}"
                streams.append(shown)
        more = len(found) == limit
        return self._plan_body(streams, f"{found[-1].oldest_ns}.{found[-1].number}" if more else None)

    def _plan_body(self, streams: list[Json], next_after: str | None) -> Json:
        store = self._context.settings.object_store_url
        return {"layout": LAYOUT, "store": store, "streams": streams, "next_after": next_after}

    async def _describe_stream(
        self, stream: Stream, work: StreamIndexWork, jobs: Sequence[str]
    ) -> Json | None:
        """None if the plan has changed and the new one is not stored yet."""
        folder = make_stream_id(stream.name, stream.incarnation)
        prefix = stream_prefix(folder)
        entry = durable_plans(stream).wanted
        if entry is not None and (
            entry.hash != work.plan.hash or not await self._store(stream, folder, entry)
        ):
            return None
        self.names.put(folder, stream.name)
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
            return True
        plan = index_plan_for(stream, decode_plans(stream.documents).keyed)
        if plan.hash != entry.hash:
            return False
        documents = stream.documents or {}
        schema = documents.get(SCHEMA_DOCUMENT)
        registry = Registry(name=stream.name) if schema is None else read_registry(schema)
        data = store_plan(plan, registry, documents.get(PROFILE))
        publication = ManifestPublication(stream_id=folder, objects={plan_name(plan.hash): data})
        report = await self._sealing.run_job("plan", [stream.number], publication=publication)
        if report.error:
            raise TailraceError("unavailable", f"cannot store the plan: {report.error}")
        self._stored.put(folder, (entry.hash, entry.generation))
        return True


def _parse_page_position(after: str) -> tuple[int, int]:
    """The time and the number of the last stream of a page."""
    if not after:
        return (-1, -1)
    oldest, _, number = after.partition(".")
    if not (oldest.isdigit() and number.isdigit() and len(after) <= 64):
        raise TailraceError("invalid_request", "after must be the next_after of a response")
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
    """The new files are published together and replace the merged file."""
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


class IndexWaitTimer:
    """Measures how long segments wait for their index files, except for those sealed before the start."""

    def __init__(self, telemetry: ServerMetrics) -> None:
        self._telemetry = telemetry
        self._sealed: LruCache[tuple[int, int], tuple[int, int]] = LruCache(entries_max=REMEMBERED_MAX)

    def changed(self, op: Op, stream: Stream) -> None:
        if isinstance(op, Sealed) and has_index_files(stream.name):
            for info in op.segments:
                self._sealed.put((stream.number, info.first), (info.last, op.at_ns))
        elif isinstance(op, Published):
            for first in {one.first for one in op.added if not one.level}:
                found = self._sealed.pop((stream.number, first))
                if found is not None:
                    waited_s = max(0, op.at_ns - found[1]) / 1e9
                    self._telemetry.pipeline_seal_to_published_seconds.observe(waited_s)


def _parse_int(text: str | None) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) <= 18 else 0


PIPELINE_PREFIX: Final = b"/v1/pipeline/"
PLAN_PATH, PUBLISH_PATH, HEARTBEAT_PATH = (
    PIPELINE_PREFIX + b"plan",
    PIPELINE_PREFIX + b"publish",
    PIPELINE_PREFIX + b"heartbeat",
)
BODY_BYTES_MAX: Final = 1024 * 1024
LIMIT_DEFAULT, LIMIT_MAX = 100, 500
WAIT_S: Final = 4.0
T = TypeVar("T")


class PipelineRoutes:
    """The server plans and publishes; the pipeline computes, on this machine or another."""

    def __init__(
        self,
        context: Context,
        sealing: SealingService,
        cold: ColdReader,
        on_heartbeat: Callable[[PipelineHeartbeat], None] | None = None,
    ) -> None:
        self._context = context
        self._log = context.log
        self._cold = cold
        self.work = IndexWork(context.log, index_plan_for, context.loop)
        self.publishing = PublicationService(context.log, sealing, context.loop)
        self.plans = PipelinePlanner(context, sealing, self.work)
        self.state = PipelineState(context, self.work, self.publishing, on_heartbeat)
        self.index_waits = IndexWaitTimer(context.telemetry)
        self.child: PipelineProcess | None = None
        self._deferred = DeferredResponses()
        self._ending = False

    def start(self) -> None:
        self._log.open_outbox()
        self.work.on_stale = self._unlist
        self.work.start()
        self.publishing.compacting.start()
        self._log.publisher.on_change.append(self.index_waits.changed)

    def register_metrics(self, metrics: ServerMetrics) -> None:
        state, publishing = self.state, self.publishing

        def outcomes() -> Iterable[tuple[list[str], float]]:
            return [([job, outcome], count) for (job, outcome), count in sorted(publishing.outcomes.items())]

        for name in STATES:
            metrics.pipeline_state.reads[(name,)] = lambda name=name: float(state.displayed_state == name)
        metrics.pipeline_restarts.read = lambda: state.restarts
        metrics.pipeline_backlog_segments.read = lambda: state.backlog()[0]
        metrics.pipeline_backlog_oldest_seconds.read = lambda: state.backlog()[2] / 1000
        metrics.pipeline_publish.each = outcomes
        metrics.pipeline_rows.reads[("companions",)] = lambda: publishing.rows
        metrics.pipeline_rows.reads[("compact",)] = lambda: publishing.compacting.rows
        metrics.compacted_segments.read = lambda: publishing.compacting.segments
        metrics.pipeline_rss_bytes.read = lambda: float(
            _parse_int(None if state.heartbeat is None else state.heartbeat.rss_bytes)
        )
        metrics.pipeline_quarantined_segments.read = lambda: state.quarantined

    def index_snapshot(self, stream: Stream) -> IndexSnapshot | None:
        """The indexing progress; None if it has to be loaded first."""
        found = self.work.known(stream)
        if found is None:
            return None
        plans = durable_plans(stream)
        generation = 0 if plans.wanted is None else plans.wanted.generation
        return IndexSnapshot(found.summary, generation, plans.keyed, self._context.clock.now_ns())

    async def load_index(self, stream: Stream) -> None:
        found = await self.work.load(stream)
        if stream.number not in self.work.summaries:
            self.work.summaries.put(stream.number, found)

    def supervise(
        self,
        demand: Callable[[], PipelineBacklog],
        grant: Callable[[float], str] | None,
        endpoint: Callable[[], str],
    ) -> None:
        """Start a local pipeline process whenever there is work."""
        self.child = PipelineProcess(self._context, demand, self.state, grant, endpoint)
        self.child.start()

    async def stop_child(self) -> None:
        """Stop the local pipeline process, and start no other."""
        if self.child is not None:
            await self.child.stop()

    async def stop(self) -> None:
        self._ending = True
        await self.stop_child()
        await self.publishing.compacting.stop()
        await self.work.stop()
        await self._deferred.close()

    def plan(self, exchange: Exchange, _: Identity) -> None:
        self._deferred.respond(exchange, self._respond(self._plan(exchange)))

    def rebuild(self, exchange: Exchange, _: Identity) -> None:
        self._deferred.respond(exchange, self._respond(self._rebuild(decode_body(exchange, RebuildRequest))))

    def publish(self, exchange: Exchange, _: Identity) -> None:
        self._deferred.respond(exchange, self._respond(self._publish(decode_publish_request(exchange))))

    def heartbeat(self, exchange: Exchange, _: Identity) -> None:
        heartbeat = decode_body(exchange, PipelineHeartbeat)
        if heartbeat.drain:
            self.state.draining = self.state.fresh or self.state.state != "off"
            body: Json = {"draining": self.state.draining}
        else:
            body = self.state.record_heartbeat(heartbeat)
        exchange.respond(200, responses.JSON_TYPE + responses.NO_STORE, orjson.dumps(body))

    async def _respond(self, work: Coroutine[None, None, Json]) -> Response:
        return 200, responses.JSON_TYPE + responses.NO_STORE, orjson.dumps(await work)

    # -- plan ------------------------------------------------------------------------------------------

    async def _plan(self, exchange: Exchange) -> Json:
        query = parse_query(exchange.query)
        jobs = _parse_jobs(query.get("jobs", ""))
        waits = parse_live(query.get("live", ""))
        if "stream" in query:
            return await self.plans.plan_for(query["stream"], jobs)
        limit = parse_limit(query.get("limit"))
        after = query.get("after", "")
        loop = self._context.loop
        until = loop.time() + (WAIT_S if waits else 0.0)
        while True:
            body = await self.plans.page(after, limit, jobs)
            left_s = until - loop.time()
            if body["streams"] or left_s <= 0 or self._ending or exchange.answered:
                return body
            await self.work.change(left_s)

    # -- publish ---------------------------------------------------------------------------------------

    async def _publish(self, request: PublishRequest) -> Json:
        stream = await self.find(request.stream_id)
        outcome = await self.publishing.publish(stream, request)
        return {"result": outcome.result, "manifest_generation": outcome.generation}

    async def find(self, folder: str) -> Stream:
        """The stream with this id; read from its manifest if it was not in a recent plan."""
        name = self.plans.names.get(folder)
        if name is None:
            name = await self.recorded_name(folder)
        stream = self._log.find(name)
        if stream is None or stream.gone or make_stream_id(stream.name, stream.incarnation) != folder:
            raise TailraceError("stream_gone", "the stream with this id was deleted")
        return stream

    async def recorded_name(self, folder: str) -> str:
        """The name of the stream in the manifest of this id."""
        if len(folder) != 32 or not all(digit in "0123456789abcdef" for digit in folder):
            raise TailraceError("invalid_request", "stream_id must be 32 hex digits")
        try:
            stored = await ManifestStore(await self._cold.parts.opened(), 0).load(folder)
        except (ObjectStoreError, ManifestError) as error:
            raise TailraceError("unavailable", f"cannot read the manifest: {error}") from error
        if stored is None:
            raise TailraceError("not_found", "no stream has this id")
        return stored.head.name

    async def _rebuild(self, request: RebuildRequest) -> Json:
        """Unlist index files, so that they are built again; searches scan in the meantime."""
        stream = self._log.readable(request.stream)
        known = await self._log.catalogue.load(stream)
        if request.family is not None and request.family not in FAMILIES:
            raise TailraceError("invalid_request", f"family must be one of {', '.join(FAMILIES)}")
        keys = [one.object for one in known.index_files if request.family in (None, one.family)]
        keys += [one.object for one in known.quarantined]
        await self.publishing.unlist(stream, tuple(keys))
        return {"stream": stream.name, "scheduled": len(keys)}

    # -- files of older plans ----------------------------------------------------------------------------

    def _unlist(self, stream: Stream, keys: tuple[str, ...]) -> None:
        self._deferred.start(self._unlisted(stream, keys))

    async def _unlisted(self, stream: Stream, keys: tuple[str, ...]) -> None:
        try:
            await self.publishing.unlist(stream, keys)
        except TailraceError:
            pass  # retried at the next check of the stream


class RebuildRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rebuild the index files of one family, or of all."""

    stream: str
    family: Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(FAMILIES)})] | None = None


def decode_body(exchange: Exchange, kind: type[T]) -> T:
    check_content_encoding(exchange)
    if len(exchange.body) > BODY_BYTES_MAX:
        raise TailraceError("payload_too_large", f"the body must have at most {BODY_BYTES_MAX} bytes")
    try:
        return msgspec.json.decode(exchange.body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TailraceError("invalid_request", f"invalid body: {error}") from None


def decode_publish_request(exchange: Exchange) -> PublishRequest:
    request = decode_body(exchange, PublishRequest)
    if (
        max(len(request.add), len(request.inputs), len(request.replace), len(request.quarantine))
        > OBJECTS_MAX
    ):
        raise TailraceError(
            "invalid_request", f"a list in a publication must have at most {OBJECTS_MAX} objects"
        )
    return request


def _parse_jobs(text: str) -> tuple[str, ...]:
    if text in ("", "all"):
        return JOBS
    found = tuple(text.split(","))
    for job in found:
        if job not in JOBS:
            raise TailraceError("invalid_request", f"jobs must be all, or a list of {', '.join(JOBS)}")
    return found


def parse_live(text: str) -> bool:
    if text not in ("", "false", "long-poll"):
        raise TailraceError("invalid_request", "live must be long-poll")
    return text == "long-poll"


def parse_limit(text: str | None) -> int:
    if text is None:
        return LIMIT_DEFAULT
    limit = int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else 0
    if not 1 <= limit <= LIMIT_MAX:
        raise TailraceError("invalid_request", f"limit must be 1 to {LIMIT_MAX}")
    return limit


class PublicationResult(TypedDict):
    result: Literal["published", "already_published"]
    manifest_generation: Count


class RebuildResult(TypedDict):
    stream: str
    scheduled: Count


class HeartbeatResult(TypedDict):
    drain: NotRequired[bool]
    draining: NotRequired[bool]


_ID: Final[Schema] = {"type": "string", "pattern": "^[0-9a-f]{32}$"}
_SHA256: Final[Schema] = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_FAMILY: Final[Schema] = {"enum": list(FAMILIES)}
_TEXT_OR_NULL: Final[Schema] = nullable(STRING)
_RANGE: Final[dict[str, Schema]] = {"first": COUNT, "last": COUNT}
_DESCRIBED: Final[dict[str, Schema]] = {
    "object": STRING,
    **_RANGE,
    "epoch": COUNT,
    "rows": COUNT,
    "bytes": COUNT,
    "raw_bytes": COUNT,
    "sha256": _SHA256,
}
_SEGMENT: Final[Schema] = obj({**_DESCRIBED, "families": array(_FAMILY)})
_WORK: Final[Schema] = {
    "oneOf": [
        obj(
            {"job": {"const": "companions"}, "priority": COUNT, "segments": array(_SEGMENT)},
            {"replace": array(STRING)},
        ),
        obj(
            {
                "job": {"const": "merge"},
                "family": _FAMILY,
                "level": COUNT,
                **_RANGE,
                "inputs": array(STRING),
                "input_sha256": array(_SHA256),
            }
        ),
        obj({"job": {"const": "compact"}, **_RANGE, "segments": array(obj(_DESCRIBED))}),
    ]
}
_PIPELINE_PLAN: Final = Component(
    "PipelinePlan",
    obj(
        {
            "layout": {"const": 1},
            "store": STRING,
            "streams": array(
                obj(
                    {
                        "stream": STRING,
                        "stream_id": _ID,
                        "epoch": COUNT,
                        "content_type": _TEXT_OR_NULL,
                        "profile": STRING,
                        "earliest": COUNT,
                        "manifest": obj({"object": STRING, "generation": COUNT}),
                        "plan": obj(
                            {
                                "generation": COUNT,
                                "hash": STRING,
                                "object": _TEXT_OR_NULL,
                                "families": array(_FAMILY),
                            }
                        ),
                        "work": array(_WORK),
                    }
                )
            ),
            "next_after": _TEXT_OR_NULL,
        }
    ),
)
_PUBLICATION_EXAMPLE: Final[Schema] = {
    "stream_id": "9f2c" * 8,
    "job": "companions",
    "plan_hash": "sha256:" + "0" * 64,
    "inputs": [],
}
ROUTES: Final = route_group(
    "pipeline",
    Route(
        *("GET", "/v1/pipeline/plan", Action.PIPELINE, PipelineRoutes.plan, "readPipelinePlan"),
        "Plan of index files, merges and compactions to build",
        {200: answer("Streams with work, in the order of their oldest segment.", _PIPELINE_PLAN)},
        errors=(404, 410),
        parameters=[
            query("stream", "Only this stream, with or without work."),
            query("after", "The `next_after` of the last response."),
            query(
                "limit", "Streams in one response.", {"type": "integer", "minimum": 1, "maximum": LIMIT_MAX}
            ),
            query("jobs", "Only these jobs, separated by commas: companions, merge, compact; or all."),
            query("live", "Wait up to 4 s for work.", {"enum": ["false", "long-poll"]}),
        ],
    ),
    Route(
        *("POST", "/v1/pipeline/plan", Action.PIPELINE, PipelineRoutes.rebuild, "rebuildCompanions"),
        "Rebuild index files",
        {
            200: answer(
                "The index files are unlisted and will be built again.",
                RebuildResult,
                example={"stream": "orders", "scheduled": 6},
            )
        },
        errors=(404, 410),
        body=request(
            RebuildRequest, {"stream": "orders", "family": "col"}, "The stream, and optionally one family."
        ),
    ),
    Route(
        *("POST", "/v1/pipeline/publish", Action.PIPELINE, PipelineRoutes.publish, "publishCompanions"),
        "Publish objects that were built",
        {200: answer("The objects are listed, by this request or an earlier one.", PublicationResult)},
        errors=(404, 409, 410, 507),
        body=request(PublishRequest, _PUBLICATION_EXAMPLE, "The objects and their inputs."),
        description="Idempotent: it may be repeated.",
    ),
    Route(
        *("POST", "/v1/pipeline/heartbeat", Action.PIPELINE, PipelineRoutes.heartbeat, "sendHeartbeat"),
        "Report the state of a pipeline, or drain it",
        {200: answer("Whether the pipeline shall exit.", HeartbeatResult)},
        body=request(PipelineHeartbeat, {"state": "idle"}, "The state, or `drain` alone."),
    ),
    place="first",
)
