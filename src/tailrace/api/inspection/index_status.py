"""`_index_status`: which index families a stream is configured for, and how far each of them is.

Families that nobody builds yet are told as they are: configured, and behind by every segment there is.
"""

from __future__ import annotations

from typing import NamedTuple

from tailrace.api.inspection.documents import Documents
from tailrace.log.model import Stream
from tailrace.protocol.durations import format_instant
from tailrace.schema.search_config import SearchConfig


class Manifest(NamedTuple):
    """The one on the object store. Of what an earlier process uploaded only the generation is known."""

    generation: int
    uploaded_ns: int = 0
    etag: str | None = None
    size_bytes: int = 0


class TailRows(NamedTuple):
    """What the index of recent rows holds of a stream."""

    rows: int = 0
    bytes: int = 0
    dropped_rows: int = 0
    building: bool = False


def index_status(
    stream: Stream, documents: Documents, manifest: Manifest, tail: TailRows
) -> dict[str, object]:
    """The body of `_index_status`."""
    segments = stream.cold.segments
    search = documents.search
    families = _families(search, segments)
    wanted = documents.routing_key or search is not None
    return {
        "stream": stream.name,
        "profile": documents.profile_kind,
        "desired_index_plan_generation": int(wanted),
        "segments": {"total_count": segments, "uploaded_count": segments},
        "manifest": {
            "generation": manifest.generation,
            "uploaded_generation": manifest.generation,
            "last_uploaded_at": instant(manifest.uploaded_ns),
            "last_uploaded_etag": manifest.etag,
            "last_uploaded_size_bytes": str(manifest.size_bytes) if manifest.size_bytes else None,
        },
        "routing_key_index": {"configured": documents.routing_key, **_runs(documents.routing_key, segments)},
        "routing_key_lexicon": {
            "configured": documents.routing_key,
            **_runs(documents.routing_key, segments),
        },
        "exact_indexes": _exact(search, segments),
        "bundled_companions": {
            "object_count": 0,
            "bytes_at_rest": "0",
            "fully_indexed_uploaded_segments": not families or not segments,
        },
        "search_families": families,
        "tail_index": tail._asdict(),
    }


def instant(ns: int) -> str | None:
    return format_instant(ns) if ns else None


def _runs(configured: bool, segments: int) -> dict[str, object]:
    """A family of sorted runs of which there are none."""
    lag = segments if configured else 0
    return {
        "indexed_segment_count": 0,
        "lag_segments": lag,
        "lag_ms": None,
        "bytes_at_rest": "0",
        "object_count": 0,
        "active_run_count": 0,
        "retired_run_count": 0,
        "fully_indexed_uploaded_segments": lag == 0,
        "updated_at": None,
    }


def _exact(search: SearchConfig | None, segments: int) -> list[dict[str, object]]:
    fields = {} if search is None else search.fields
    return [
        {"name": name, "kind": field.kind, "stale_configuration": False, **_runs(True, segments)}
        for name, field in sorted(fields.items())
        if field.exact
    ]


def _families(search: SearchConfig | None, segments: int) -> list[dict[str, object]]:
    if search is None:
        return []
    fields = sorted(search.fields.items())
    members = {
        "col": [name for name, field in fields if field.column or field.sortable or field.aggregatable],
        "fts": [name for name, field in fields if field.kind == "text" or field.prefix],
        "agg": sorted(search.rollups),
    }
    return [
        {
            "family": family,
            "fields": names,
            "plan_generation": 0,
            "covered_segment_count": 0,
            "contiguous_covered_segment_count": 0,
            "lag_segments": segments,
            "lag_ms": None,
            "bytes_at_rest": "0",
            "object_count": 0,
            "stale_segment_count": 0,
            "fully_indexed_uploaded_segments": segments == 0,
            "updated_at": None,
        }
        for family, names in members.items()
        if names
    ]
