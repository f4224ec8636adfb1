"""The `_index_status` document: the index families of a stream and the progress of each.

Also reads the durable registry and profile of a stream, which `_details` repeats.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

import orjson

from tailrace.common.timestamps import format_rfc3339
from tailrace.log.model import Stream
from tailrace.protocol.stream_names import is_system_name
from tailrace.routing.openapi import (
    BOOLEAN,
    COUNT,
    COUNT_TEXT,
    INSTANT,
    STRING,
    Component,
    array,
    counts,
    nullable,
    obj,
)
from tailrace.schema.registry import Registry, read_registry
from tailrace.schema.search_config import SearchConfig
from tailrace.search.index_files.index_plan import family_members
from tailrace.storage.index_coverage import EMPTY_SUMMARY, FamilySummary, IndexSummary

PROFILE_VERSION = "durable.streams/profile/v1"
GENERIC_PROFILE = orjson.dumps({"apiVersion": PROFILE_VERSION, "profile": {"kind": "generic"}})


class StreamDocuments(NamedTuple):
    """The bodies of `_schema` and `_profile`, and what decides about the index families."""

    schema: bytes
    schema_bytes: int  # 0 if no schema was set
    profile: bytes
    profile_kind: str
    routing_key: bool
    search: SearchConfig | None


def read_documents(stream: Stream) -> StreamDocuments:
    found = stream.visible_documents or {}
    raw = found.get("schema")
    registry = Registry(name=stream.name) if raw is None else _load_registry(raw)
    profile = found.get("profile", GENERIC_PROFILE)
    return StreamDocuments(
        registry.to_json() if raw is None else raw,
        0 if raw is None else len(raw),
        profile,
        _load_profile_kind(profile),
        registry.routing_key is not None,
        registry.search,
    )


def read_profile_kind(stream: Stream) -> str:
    """For listings, without decoding the registry, which may be large."""
    return _load_profile_kind((stream.visible_documents or {}).get("profile", GENERIC_PROFILE))


def observability_pair(stream: Stream) -> dict[str, object]:
    """The pair of streams with the events and traces of the same requests, if the profile names one."""
    raw = (stream.visible_documents or {}).get("profile")
    named = None if raw is None else _read_profile_pair(raw)
    if named is None:
        return {}
    kind, other = named
    events, traces = (stream.name, other) if kind == "evlog" else (other, stream.name)
    return {"observability": {"request": {"events_stream": events, "traces_stream": traces}}}


@lru_cache(maxsize=32)
def _read_profile_pair(raw: bytes) -> tuple[str, str] | None:
    """The kind of a profile and the name of the paired stream."""
    profile = orjson.loads(raw)["profile"]
    request = profile.get("observability", {}).get("request", {})
    other = request.get("tracesStream") or request.get("eventsStream")
    return None if other is None else (str(profile["kind"]), str(other))


@lru_cache(maxsize=32)
def _load_registry(raw: bytes) -> Registry:
    return read_registry(raw)


@lru_cache(maxsize=32)
def _load_profile_kind(raw: bytes) -> str:
    return str(orjson.loads(raw)["profile"]["kind"])


BUNDLED_FAMILIES: Final = ("col", "fts", "agg", "mblk")  # one index file for each segment
QUARANTINED_MAX: Final = 100
NO_SUMMARY: Final = FamilySummary()

Json = dict[str, object]


class IndexSnapshot(NamedTuple):
    """The index files of a stream at one time."""

    summary: IndexSummary = EMPTY_SUMMARY
    generation: int = 0  # of the current index plan
    keyed: bool = False
    now_ns: int = 0


class ManifestStatus(NamedTuple):
    """The manifest in the object store. If an earlier process uploaded it, only the generation is known."""

    generation: int
    uploaded_ns: int = 0
    etag: str | None = None
    size_bytes: int = 0
    indexed: IndexSnapshot = IndexSnapshot()
    conflict: bool = False  # it lists other entries than the stream has here


class TailIndexStatus(NamedTuple):
    """The tail index of a stream."""

    rows: int = 0
    bytes: int = 0
    dropped_rows: int = 0
    building: bool = False  # older rows are being added in the background


def index_status(
    stream: Stream, documents: StreamDocuments, manifest: ManifestStatus, tail: TailIndexStatus
) -> Json:
    """The body of `_index_status`."""
    return _IndexStatusBuilder(stream, documents, manifest).build(tail)


class _IndexStatusBuilder:
    def __init__(self, stream: Stream, documents: StreamDocuments, manifest: ManifestStatus) -> None:
        self._stream = stream
        self._documents = documents
        self._manifest = manifest
        self._indexed = manifest.indexed
        self._summary = manifest.indexed.summary
        self._segments = stream.cold.segments

    def build(self, tail: TailIndexStatus) -> Json:
        documents, manifest, segments = self._documents, self._manifest, self._segments
        keyed = documents.routing_key or self._indexed.keyed
        has_indexes = keyed or documents.search is not None or documents.profile_kind == "metrics"
        families = self._families()
        bundled = [self._summary.families.get(family, NO_SUMMARY) for family in BUNDLED_FAMILIES]
        quarantined = self._summary.quarantined
        return {
            "stream": self._stream.name,
            "profile": documents.profile_kind,
            "desired_index_plan_generation": max(self._indexed.generation, int(has_indexes)),
            "segments": {"total_count": segments, "uploaded_count": segments},
            "manifest": {
                "generation": manifest.generation,
                "uploaded_generation": manifest.generation,
                "last_uploaded_at": format_optional_instant(manifest.uploaded_ns),
                "last_uploaded_etag": manifest.etag,
                "last_uploaded_size_bytes": str(manifest.size_bytes) if manifest.size_bytes else None,
            },
            "routing_key_index": {"configured": keyed, **self._runs("routing_key_index", keyed)},
            "routing_key_lexicon": {
                "configured": documents.routing_key,
                **self._runs("routing_key_lexicon", documents.routing_key),
            },
            "exact_indexes": self._exact(),
            "bundled_companions": {
                "object_count": sum(one.objects for one in bundled),
                "bytes_at_rest": str(sum(one.bytes for one in bundled)),
                "fully_indexed_uploaded_segments": all(
                    self._covered(family) == segments
                    for family in self._members()
                    if family in BUNDLED_FAMILIES
                ),
            },
            "search_families": families,
            "last_error": f"{quarantined[-1].code}: {quarantined[-1].message}" if quarantined else None,
            "quarantined": [
                {
                    "first": one.first,
                    "last": one.last,
                    "code": one.code,
                    "message": one.message,
                    "at": format_optional_instant(one.at_ns),
                }
                for one in quarantined[:QUARANTINED_MAX]
            ],
            "tail_index": tail._asdict(),
        }

    def _covered(self, family: str) -> int:
        """Segments with index files of this family."""
        return min(self._segments, self._summary.families.get(family, NO_SUMMARY).covered)

    def _lag(self, family: str, configured: bool) -> Json:
        found = self._summary.families.get(family, NO_SUMMARY)
        behind = self._segments - self._covered(family) if configured else 0
        lag_ms: str | None = None  # never built
        if found.objects:
            waited_ns = self._indexed.now_ns - found.oldest_ns if behind and found.oldest_ns else 0
            lag_ms = str(max(0, waited_ns) // 1_000_000)
        return {
            "lag_segments": behind,
            "lag_ms": lag_ms,
            "bytes_at_rest": str(found.bytes),
            "object_count": found.objects,
        }

    def _runs(self, family: str, configured: bool) -> Json:
        """The fields of a family of sorted runs."""
        found = self._summary.families.get(family, NO_SUMMARY)
        lag = self._lag(family, configured)
        return {
            "indexed_segment_count": found.contiguous if configured else 0,
            **lag,
            "active_run_count": found.objects,
            "retired_run_count": found.stale_objects,
            "fully_indexed_uploaded_segments": lag["lag_segments"] == 0,
            "updated_at": self._updated(found),
        }

    def _updated(self, found: FamilySummary) -> str | None:
        return format_optional_instant(found.updated_ns)

    def _exact(self) -> list[Json]:
        """One object for each exact field; they share the files of the family."""
        search = self._documents.search
        names = self._members().get("exact", ())
        assert search is not None or not names
        return [
            {
                "name": name,
                "kind": "" if search is None else search.fields[name].kind,
                "stale_configuration": name in self._summary.stale_fields,
                **self._runs("exact", configured=True),
            }
            for name in names
        ]

    def _members(self) -> dict[str, tuple[str, ...]]:
        search = self._documents.search
        members = {} if search is None else family_members(search)
        # No index files are built for the metrics stream of the server, which is only read in order.
        measured = self._documents.profile_kind == "metrics" and not is_system_name(self._stream.name)
        return members | ({"mblk": ()} if measured else {})

    def _families(self) -> list[Json]:
        build: list[Json] = []
        for family, names in self._members().items():
            if family not in BUNDLED_FAMILIES:
                continue
            found = self._summary.families.get(family, NO_SUMMARY)
            lag = self._lag(family, configured=True)
            build.append(
                {
                    "family": family,
                    "fields": list(names),
                    "plan_generation": self._indexed.generation if found.objects else 0,
                    "covered_segment_count": self._covered(family),
                    "contiguous_covered_segment_count": found.contiguous,
                    **lag,
                    "stale_segment_count": found.stale_segments,
                    "fully_indexed_uploaded_segments": lag["lag_segments"] == 0,
                    "updated_at": self._updated(found),
                }
            )
        return build


def format_optional_instant(ns: int) -> str | None:
    return format_rfc3339(ns) if ns else None


OBSERVABILITY: Final = Component(
    "Observability",
    obj(
        {"request": obj({}, {"events_stream": STRING, "traces_stream": STRING})},
        description="The streams with the events and traces of the same requests.",
    ),
)
_LAG: Final[dict[str, Json]] = {
    "lag_segments": COUNT,
    "lag_ms": nullable(COUNT_TEXT),
    "bytes_at_rest": COUNT_TEXT,
    "object_count": COUNT,
    "fully_indexed_uploaded_segments": BOOLEAN,
    "updated_at": nullable(INSTANT),
}
_RUNS: Final[dict[str, Json]] = {
    **_LAG,
    **counts("indexed_segment_count", "active_run_count", "retired_run_count"),
}
INDEX_STATUS: Final = Component(
    "IndexStatus",
    obj(
        {
            "stream": STRING,
            "profile": STRING,
            "desired_index_plan_generation": COUNT,
            "segments": obj(counts("total_count", "uploaded_count")),
            "manifest": obj(
                {
                    **counts("generation", "uploaded_generation"),
                    "last_uploaded_at": nullable(INSTANT),
                    "last_uploaded_etag": nullable(STRING),
                    "last_uploaded_size_bytes": nullable(STRING),
                }
            ),
            "routing_key_index": obj({"configured": BOOLEAN, **_RUNS}),
            "routing_key_lexicon": obj({"configured": BOOLEAN, **_RUNS}),
            "exact_indexes": array(
                obj({"name": STRING, "kind": STRING, "stale_configuration": BOOLEAN, **_RUNS})
            ),
            "bundled_companions": obj(
                {
                    "object_count": COUNT,
                    "bytes_at_rest": COUNT_TEXT,
                    "fully_indexed_uploaded_segments": BOOLEAN,
                }
            ),
            "search_families": array(
                obj(
                    {
                        "family": STRING,
                        "fields": array(STRING),
                        **counts("plan_generation", "covered_segment_count"),
                        **counts("contiguous_covered_segment_count", "stale_segment_count"),
                        **_LAG,
                    }
                )
            ),
            "last_error": nullable(STRING),
            "quarantined": array(
                obj({**counts("first", "last"), "code": STRING, "message": STRING, "at": nullable(INSTANT)})
            ),
            "tail_index": obj({**counts("rows", "bytes", "dropped_rows"), "building": BOOLEAN}),
        }
    ),
)
