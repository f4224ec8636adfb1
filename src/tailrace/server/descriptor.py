"""`_details`: everything the server can tell about one stream, put together from numbers it keeps anyway.

Nothing here counts segments or looks at other streams, so that a console may ask as often as it likes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import orjson
import xxhash

from tailrace.common.timestamps import format_rfc3339
from tailrace.log.model import Stream
from tailrace.protocol.http_headers import DEFAULT_CONTENT_TYPE
from tailrace.search.index_files.index_plan import FAMILIES
from tailrace.server.documents import StreamDocuments, observability_pair
from tailrace.server.index_status import (
    BUNDLED_FAMILIES,
    ManifestStatus,
    TailIndexStatus,
    format_optional_instant,
    index_status,
)

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
# Where a cache on the local disk is shown, by what it holds.
_CACHES = {
    "segment_cache_bytes": "segment",
    "routing_index_cache_bytes": "routing_index",
    "exact_index_cache_bytes": "exact_index",
    "lexicon_index_cache_bytes": "routing_key_lexicon",
    "companion_cache_bytes": "bundled_companion",
}


class VolatileDetails(NamedTuple):
    """What is no state of the stream itself: shown, and no reason for another ETag."""

    shared_bytes: int = 0  # of the hot store
    cached: CacheBytes = NO_CACHES
    spooled_bytes: int = 0  # segments that are written and not yet uploaded
    requests: ObjectRequests = NO_REQUESTS
    tail: TailIndexStatus = TailIndexStatus()


def stream_details(
    stream: Stream, documents: StreamDocuments, manifest: ManifestStatus, around: VolatileDetails
) -> dict[str, object]:
    return {
        "stream": stream_summary(stream, documents.profile_kind, manifest),
        "profile": orjson.Fragment(documents.profile),
        "schema": orjson.Fragment(documents.schema),
        "index_status": index_status(stream, documents, manifest, around.tail),
        "storage": _storage_details(stream, documents, manifest, around),
        "object_store_requests": _object_requests(around.requests),
    }


def stream_summary(stream: Stream, profile: str, manifest: ManifestStatus) -> dict[str, object]:
    """The stream itself. All numbers are of what is durable."""
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
    """Payload that is in the journal, in memory or in the hot store only."""
    return max(0, stream.size_bytes - stream.sealed_bytes)


def _storage_details(
    stream: Stream, documents: StreamDocuments, manifest: ManifestStatus, around: VolatileDetails
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
            "total_bytes": str(waiting + sum(around.cached.values()) + around.spooled_bytes),
            "wal_retained_bytes": str(waiting),
            "pending_tail_bytes": str(waiting),
            "pending_sealed_segment_bytes": str(around.spooled_bytes),
            **{name: str(around.cached.get(artifact, 0)) for name, artifact in _CACHES.items()},
            "sqlite_shared_total_bytes": str(around.shared_bytes),
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
    """A weak tag over the state of this stream: caches, requests and ages have no part in it."""
    around = VolatileDetails()
    manifest = manifest._replace(indexed=manifest.indexed._replace(now_ns=0))
    if kind == "details":
        shown = stream_details(stream, documents, manifest, around)
    else:
        shown = index_status(stream, documents, manifest, around.tail)
    # The number and the incarnation: a name that is used again is another stream, however alike.
    state = orjson.dumps([stream.number, stream.incarnation, shown])
    return f'W/"{kind}:{xxhash.xxh3_128_hexdigest(state)}"'
