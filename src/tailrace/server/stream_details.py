"""GET `_details` and `_index_status` of a stream: the documents, their ETags, and waiting for a change.

Both are built from counters that exist anyway: nothing here counts segments or reads other streams, so that a
console may poll often. With `live=long-poll` and `If-None-Match` a request waits until the document changes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final, Literal, NamedTuple

import orjson
import xxhash

from tailrace.auth import Action, Identity
from tailrace.common.errors import TailraceError
from tailrace.common.timestamps import format_rfc3339
from tailrace.http.exchange import Exchange
from tailrace.log.model import Stream
from tailrace.protocol.http_headers import DEFAULT_CONTENT_TYPE, if_none_match
from tailrace.protocol.query_params import parse_query, wait_limit_lines, wait_ms
from tailrace.routing import responses
from tailrace.routing.context import Context
from tailrace.routing.deferred_responses import DeferredResponses
from tailrace.routing.openapi import (
    BOOLEAN,
    COUNT,
    INSTANT,
    STRING,
    Component,
    Json,
    answer,
    array,
    counts,
    headers,
    nullable,
    obj,
    params,
    query,
    texts,
)
from tailrace.routing.table import Handler, Route, route_group
from tailrace.schema.openapi import PROFILE_RESOURCE, REGISTRY
from tailrace.search.index_files.index_plan import FAMILIES
from tailrace.search.tail_index import TailIndex
from tailrace.server.index_status import (
    BUNDLED_FAMILIES,
    INDEX_STATUS,
    OBSERVABILITY,
    IndexSnapshot,
    ManifestStatus,
    StreamDocuments,
    TailIndexStatus,
    format_optional_instant,
    index_status,
    observability_pair,
    read_documents,
)
from tailrace.server.live import LiveConnection, LiveReaders
from tailrace.server.pipeline_routes import PipelineRoutes
from tailrace.storage.object_store.cache import ObjectCache
from tailrace.storage.object_store.request_stats import UploadedHead
from tailrace.storage.sealing import SealingService
from tailrace.storage.segments.model import make_stream_id

ARTIFACTS = (
    "segment",
    "manifest",
    "schema_registry",
    "routing_index",
    "routing_key_lexicon",
    "exact_index",
    "bundled_companion",
)
REQUEST_COUNTERS = ("puts", "reads", "gets", "heads", "lists", "deletes")

ObjectRequests = Mapping[str, Mapping[str, int]]  # counters by artifact
NO_REQUESTS: ObjectRequests = {}
CacheBytes = Mapping[str, int]  # bytes by artifact
NO_CACHES: CacheBytes = {}
# The cache fields of `local_storage` by artifact.
_CACHES = {
    "segment_cache_bytes": "segment",
    "routing_index_cache_bytes": "routing_index",
    "exact_index_cache_bytes": "exact_index",
    "lexicon_index_cache_bytes": "routing_key_lexicon",
    "companion_cache_bytes": "bundled_companion",
}


class VolatileDetails(NamedTuple):
    """Values that are not state of the stream itself and do not change the ETag."""

    shared_bytes: int = 0  # of the hot store
    cached: CacheBytes = NO_CACHES
    spooled_bytes: int = 0  # segments written but not yet uploaded
    requests: ObjectRequests = NO_REQUESTS
    tail: TailIndexStatus = TailIndexStatus()


def stream_details(
    stream: Stream, documents: StreamDocuments, manifest: ManifestStatus, volatile: VolatileDetails
) -> dict[str, object]:
    return {
        "stream": stream_summary(stream, documents.profile_kind, manifest),
        "profile": orjson.Fragment(documents.profile),
        "schema": orjson.Fragment(documents.schema),
        "index_status": index_status(stream, documents, manifest, volatile.tail),
        "storage": _storage_details(stream, documents, manifest, volatile),
        "object_store_requests": _object_requests(volatile.requests),
    }


def stream_summary(stream: Stream, profile: str, manifest: ManifestStatus) -> dict[str, object]:
    """The `stream` object; all numbers are durable ones."""
    deadline_ns = stream.deadline_ns()
    pending_rows = str(max(0, stream.visible - stream.sealed))
    pending_bytes = str(unsealed_bytes(stream))
    segments = stream.cold.segments
    sealed_through = str(stream.sealed - 1)
    return {
        "name": stream.name,
        "content_type": stream.content_type or DEFAULT_CONTENT_TYPE,
        "profile": profile,
        **observability_pair(stream),
        "created_at": format_rfc3339(stream.created_ns),
        "updated_at": format_rfc3339(max(stream.created_ns, stream.last_ns, stream.cold.recorded_ns)),
        "expires_at": None if deadline_ns is None else format_rfc3339(deadline_ns),
        "ttl_seconds": stream.lifetime.ttl_s,
        "stream_seq": None if stream.seq is None else stream.seq.decode("latin-1"),
        "closed": stream.visible_closed,
        "epoch": stream.epoch,
        "next_offset": str(stream.visible),
        "sealed_through": sealed_through,
        "uploaded_through": sealed_through,
        "segment_count": segments,
        "uploaded_segment_count": segments,
        "pending_rows": pending_rows,
        "pending_bytes": pending_bytes,
        "total_size_bytes": str(stream.size_bytes),
        "wal_rows": pending_rows,
        "wal_bytes": pending_bytes,
        "last_append_at": format_optional_instant(stream.last_ns if stream.visible else 0),
        "last_segment_cut_at": format_optional_instant(stream.cold.recorded_ns),
        **({"seal_conflict": True} if manifest.conflict else {}),
    }


def unsealed_bytes(stream: Stream) -> int:
    """Payload bytes that are not in the object store yet."""
    return max(0, stream.size_bytes - stream.sealed_bytes)


def _storage_details(
    stream: Stream, documents: StreamDocuments, manifest: ManifestStatus, volatile: VolatileDetails
) -> dict[str, object]:
    waiting = unsealed_bytes(stream)
    segment_bytes = stream.cold.segment_bytes
    meta_bytes = manifest.size_bytes + documents.schema_bytes
    families = manifest.indexed.summary.families
    sizes = {family: families[family].bytes if family in families else 0 for family in FAMILIES}
    counts = {family: families[family].objects if family in families else 0 for family in FAMILIES}
    return {
        "object_storage": {
            "total_bytes": str(segment_bytes + meta_bytes + sum(sizes.values())),
            "segments_bytes": str(segment_bytes),
            "indexes_bytes": str(sum(sizes.values())),
            "manifest_and_meta_bytes": str(meta_bytes),
            "manifest_bytes": str(manifest.size_bytes),
            "schema_registry_bytes": str(documents.schema_bytes),
            "segment_object_count": stream.cold.segments,
            "routing_index_object_count": counts["routing_key_index"],
            "routing_lexicon_object_count": counts["routing_key_lexicon"],
            "exact_index_object_count": counts["exact"],
            "bundled_companion_object_count": sum(counts[family] for family in BUNDLED_FAMILIES),
        },
        "local_storage": {
            "total_bytes": str(waiting + sum(volatile.cached.values()) + volatile.spooled_bytes),
            "wal_retained_bytes": str(waiting),
            "pending_tail_bytes": str(waiting),
            "pending_sealed_segment_bytes": str(volatile.spooled_bytes),
            **{name: str(volatile.cached.get(artifact, 0)) for name, artifact in _CACHES.items()},
            "sqlite_shared_total_bytes": str(volatile.shared_bytes),
        },
        "companion_families": {
            f"{family}_bytes": str(sizes[family]) for family in (*BUNDLED_FAMILIES, "exact")
        },
    }


def _object_requests(found: ObjectRequests) -> dict[str, object]:
    total = dict.fromkeys(REQUEST_COUNTERS, 0)
    rows: list[dict[str, object]] = []
    for artifact in ARTIFACTS:
        counted = found.get(artifact, {})
        for name in REQUEST_COUNTERS:
            total[name] += counted.get(name, 0)
        rows.append({"artifact": artifact, **{name: str(counted.get(name, 0)) for name in REQUEST_COUNTERS}})
    return {**{name: str(count) for name, count in total.items()}, "by_artifact": rows}


def details_etag(kind: str, stream: Stream, documents: StreamDocuments, manifest: ManifestStatus) -> str:
    """A weak ETag of the state of the stream, without caches, request counts and ages."""
    volatile = VolatileDetails()
    manifest = manifest._replace(indexed=manifest.indexed._replace(now_ns=0))
    if kind == "details":
        shown = stream_details(stream, documents, manifest, volatile)
    else:
        shown = index_status(stream, documents, manifest, volatile.tail)
    # With number and incarnation: a stream created again under the same name is another one.
    state = orjson.dumps([stream.number, stream.incarnation, shown])
    return f'W/"{kind}:{xxhash.xxh3_128_hexdigest(state)}"'


WAIT_DEFAULT_MS = 3000

DetailsKind = Literal["details", "index_status"]


class DetailsSources:
    """What the documents show of other parts; `caches` hold segments and index files."""

    def __init__(
        self,
        sealing: SealingService,
        caches: Sequence[ObjectCache],
        tail: TailIndex,
        pipeline: PipelineRoutes,
    ) -> None:
        self._sealing = sealing
        self._caches = caches
        self._tail = tail
        self.pipeline = pipeline

    def requests(self, stream: Stream) -> ObjectRequests:
        folder = make_stream_id(stream.name, stream.incarnation)
        found = self._sealing.request_stats.requests(folder)
        for cache in self._caches:
            for artifact, counters in cache.book.requests(folder).items():
                found[artifact] = found.get(artifact, Counter()) + counters
        return found

    def head(self, stream: Stream) -> UploadedHead | None:
        return self._sealing.request_stats.head(make_stream_id(stream.name, stream.incarnation))

    def is_in_conflict(self, stream: Stream) -> bool:
        return stream.number in self._sealing.dispatcher.conflicts

    def tail(self, stream: Stream) -> TailIndexStatus:
        index = self._tail.find(stream.number)
        if index is None:
            return TailIndexStatus()
        return TailIndexStatus(index.rows, index.bytes, index.dropped_rows, index.filling is not None)

    def cached_bytes(self, stream: Stream) -> CacheBytes:
        return cached_bytes_by_artifact(self._caches, stream)


class DetailsRoutes:
    """Serves both documents. Each response is a consistent snapshot."""

    def __init__(self, context: Context, live: LiveReaders, sources: DetailsSources) -> None:
        self._context = context
        self._log = context.log
        self._live = live
        self._sources = sources
        self._deferred = DeferredResponses()

    def details(self, exchange: Exchange, identity: Identity, name: str) -> None:
        self._serve(exchange, identity, name, "details")

    def index_status(self, exchange: Exchange, identity: Identity, name: str) -> None:
        self._serve(exchange, identity, name, "index_status")

    def _serve(self, exchange: Exchange, identity: Identity, name: str, kind: DetailsKind) -> None:
        query = parse_query(exchange.query)
        stream = self._log.readable(name)
        live = query.get("live", "")
        if live not in ("", "false", "0", "true", "1", "long-poll"):
            raise TailraceError("invalid_request", "live must be true or long-poll")
        timeout_ms = wait_ms(query, WAIT_DEFAULT_MS, self._context.limits.details_max_wait_ms)
        if self._sources.pipeline.index_snapshot(stream) is None:
            self._deferred.respond(exchange, self._load(exchange, identity, stream, kind, live, timeout_ms))
        else:
            self._serve_loaded(exchange, identity, stream, kind, live, timeout_ms)

    async def _load(
        self,
        exchange: Exchange,
        identity: Identity,
        stream: Stream,
        kind: DetailsKind,
        live: str,
        timeout_ms: int,
    ) -> None:
        """Load the indexing progress first."""
        await self._sources.pipeline.load_index(stream)
        self._log.readable(stream.name)
        self._serve_loaded(exchange, identity, stream, kind, live, timeout_ms)

    def _serve_loaded(
        self,
        exchange: Exchange,
        identity: Identity,
        stream: Stream,
        kind: DetailsKind,
        live: str,
        timeout_ms: int,
    ) -> None:
        known = exchange.headers.get(b"if-none-match", b"").decode("latin-1")
        tag = self.tag(stream, kind)
        if not known or not if_none_match(known, tag):
            self.respond(exchange, stream, kind)
        elif live in ("", "false", "0") or not timeout_ms:
            self.respond_unchanged(exchange, tag)
        else:
            wait = DetailsWait(self, self._live, exchange, identity, stream, kind, tag)
            self._live.add(wait)
            wait.begin(self._context.loop.call_later(timeout_ms / 1000, wait.close))

    # -- used by waits -----------------------------------------------------------------------------------

    def tag(self, stream: Stream, kind: DetailsKind) -> str:
        return details_etag(kind, stream, read_documents(stream), self._manifest(stream))

    def respond(self, exchange: Exchange, stream: Stream, kind: DetailsKind) -> None:
        documents, manifest = read_documents(stream), self._manifest(stream)
        tag = details_etag(kind, stream, documents, manifest)
        head = responses.JSON_TYPE + responses.NO_STORE + _etag_header(tag)
        exchange.respond(200, head, orjson.dumps(self._body(stream, kind, documents, manifest)))

    def respond_unchanged(self, exchange: Exchange, tag: str, more: bytes = b"") -> None:
        exchange.respond(304, responses.NO_STORE + _etag_header(tag) + more)

    def respond_timeout(self, exchange: Exchange, tag: str) -> None:
        """Nothing changed until the timeout."""
        limit = wait_limit_lines(parse_query(exchange.query), self._context.limits.details_max_wait_ms)
        self.respond_unchanged(exchange, tag, limit)

    # -- internal --------------------------------------------------------------------------------------

    def _body(
        self, stream: Stream, kind: DetailsKind, documents: StreamDocuments, manifest: ManifestStatus
    ) -> dict[str, object]:
        if kind == "index_status":
            return index_status(stream, documents, manifest, self._sources.tail(stream))
        volatile = VolatileDetails(
            hot_store_bytes(self._log.directory),
            self._sources.cached_bytes(stream),
            spooled_bytes(self._log.directory, stream.number),
            self._sources.requests(stream),
            self._sources.tail(stream),
        )
        return stream_details(stream, documents, manifest, volatile)

    def _manifest(self, stream: Stream) -> ManifestStatus:
        """The manifest; its generation may have been recorded while the stream was not in memory."""
        cold = stream.cold
        generation = max(cold.generation, self._log.store.db.cold.generation(stream.number))
        head = self._sources.head(stream)
        indexed = self._sources.pipeline.index_snapshot(stream) or IndexSnapshot()
        conflict = self._sources.is_in_conflict(stream)
        if head is not None:
            return ManifestStatus(generation, head.at_ns, head.etag, head.size_bytes, indexed, conflict)
        recorded_ns = cold.recorded_ns if cold.generation == generation else 0
        return ManifestStatus(generation, recorded_ns, indexed=indexed, conflict=conflict)


class DetailsWait(LiveConnection):
    """A request that waits in `stream.readers` for a change, with a timeout."""

    renews_ttl: ClassVar[bool] = False
    __slots__ = ("_exchange", "_kind", "_live", "_routes", "_tag", "_timer")

    def __init__(
        self,
        routes: DetailsRoutes,
        live: LiveReaders,
        exchange: Exchange,
        identity: Identity,
        stream: Stream,
        kind: DetailsKind,
        tag: str,
    ) -> None:
        super().__init__("long-poll", stream, identity)
        self._routes = routes
        self._live = live
        self._exchange = exchange
        self._kind: DetailsKind = kind
        self._tag = tag
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, timer: asyncio.TimerHandle) -> None:
        self._timer = timer
        self._exchange.on_gone = self._leave
        self.stream.add_reader(self)

    def on_published(self, stream: Stream) -> None:
        if stream.removed or stream.gone:
            self.refuse(responses.stream_deleted(stream))
        elif self._routes.tag(stream, self._kind) != self._tag:
            self._leave()
            self._routes.respond(self._exchange, stream, self._kind)

    def close(self) -> None:
        self._leave()
        self._routes.respond_timeout(self._exchange, self._tag)

    def refuse(self, error: TailraceError) -> None:
        self._leave()
        responses.respond_error(self._exchange, error)

    def _leave(self) -> None:
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        self.stream.remove_reader(self)
        self._live.remove(self)


def _etag_header(tag: str) -> bytes:
    return b"ETag: %b\r\n" % tag.encode()


def spooled_bytes(directory: Path, number: int) -> int:
    """Bytes of segments that wait for their upload; the spool never has more than a few files."""
    total = 0
    for path in (directory / "spool").glob(f"{number}-*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            pass  # uploaded
    return total


def hot_store_bytes(directory: Path) -> int:
    """Size of the hot store, which is shared by all streams."""
    total = 0
    for suffix in ("", "-wal", "-shm"):
        try:
            total += (directory / f"hot.db{suffix}").stat().st_size
        except FileNotFoundError:
            pass
    return total


def cached_bytes_by_artifact(readers: Sequence[ObjectCache], stream: Stream) -> dict[str, int]:
    """Bytes of a stream in the caches on disk, by artifact."""
    folder = make_stream_id(stream.name, stream.incarnation)
    caches = [parts.cache for parts in readers if parts.cache is not None]
    return {artifact: sum(cache.bytes_of(folder, artifact) for cache in caches) for artifact in ARTIFACTS}


_COUNTERS: Final = ("puts", "reads", "gets", "heads", "lists", "deletes")
_STREAM: Final[Json] = obj(
    {
        "name": STRING,
        "content_type": STRING,
        "profile": STRING,
        "created_at": INSTANT,
        "updated_at": INSTANT,
        "expires_at": nullable(INSTANT),
        "ttl_seconds": nullable(COUNT),
        "stream_seq": nullable(STRING),
        "closed": BOOLEAN,
        **counts("epoch", "segment_count", "uploaded_segment_count"),
        **texts("next_offset", "sealed_through", "uploaded_through", "pending_rows", "pending_bytes"),
        **texts("total_size_bytes", "wal_rows", "wal_bytes"),
        "last_append_at": nullable(INSTANT),
        "last_segment_cut_at": nullable(INSTANT),
    },
    {"observability": OBSERVABILITY, "seal_conflict": BOOLEAN},
)
_STORAGE: Final[Json] = obj(
    {
        "object_storage": obj(
            {
                **texts("total_bytes", "segments_bytes", "indexes_bytes", "manifest_and_meta_bytes"),
                **texts("manifest_bytes", "schema_registry_bytes"),
                **counts("segment_object_count", "routing_index_object_count"),
                **counts("routing_lexicon_object_count", "exact_index_object_count"),
                **counts("bundled_companion_object_count"),
            }
        ),
        "local_storage": obj(
            {
                **texts("total_bytes", "wal_retained_bytes", "pending_tail_bytes"),
                **texts("pending_sealed_segment_bytes", "segment_cache_bytes", "routing_index_cache_bytes"),
                **texts("exact_index_cache_bytes", "lexicon_index_cache_bytes", "companion_cache_bytes"),
                **texts("sqlite_shared_total_bytes"),
            }
        ),
        "companion_families": obj(texts("col_bytes", "fts_bytes", "agg_bytes", "mblk_bytes", "exact_bytes")),
    }
)
_DETAILS: Final = Component(
    "Details",
    obj(
        {
            "stream": _STREAM,
            "profile": PROFILE_RESOURCE,
            "schema": REGISTRY,
            "index_status": INDEX_STATUS,
            "storage": _STORAGE,
            "object_store_requests": obj(
                {**texts(*_COUNTERS), "by_artifact": array(obj({"artifact": STRING, **texts(*_COUNTERS)}))}
            ),
        }
    ),
)
_LIVE: Final = query(
    "live",
    "Wait until the document differs from `If-None-Match`.",
    {"enum": ["long-poll", "true", "1", "false", "0", ""]},
)


def _details_route(path: str, handler: Handler, operation: str, summary: str, body: Component) -> Route:
    return Route(
        *("GET", path, Action.QUERY_STREAM, handler, operation, summary),
        {
            200: answer("The current document.", body, headers(always=("ETag",))),
            304: answer("Not modified.", head=headers("Stream-Wait-Limit-Ms", always=("ETag",))),
        },
        errors=(404, 410),
        parameters=[_LIVE, *params("timeout", "timeout_ms", "if-none-match")],
    )


ROUTES: Final = route_group(
    "inspection",
    _details_route(
        *("/v1/stream/{name}/_details", DetailsRoutes.details, "readDetails"),
        "All details of a stream",
        _DETAILS,
    ),
    _details_route(
        *("/v1/stream/{name}/_index_status", DetailsRoutes.index_status, "readIndexStatus"),
        "Progress of each index family",
        INDEX_STATUS,
    ),
    place="owner",
)
