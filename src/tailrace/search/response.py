"""The response of a search: hits with their records, totals, coverage, and headers with the same counters."""

from __future__ import annotations

import json
import math
from typing import cast

import orjson

from tailrace.common.timestamps import format_rfc3339, format_rfc3339_ms
from tailrace.log.model import Stream
from tailrace.log.reader import PointReader
from tailrace.schema.json_values import ABSENT, parse_pointer, resolve_pointer
from tailrace.search.collector import Hit, SearchResult
from tailrace.search.records import RecordView
from tailrace.search.requests import SearchRequest

TIMESTAMP_MS_MAX = 253_402_300_799_999  # the end of the year 9999, the last that RFC 3339 can express


async def build_search_body(
    result: SearchResult,
    request: SearchRequest,
    stream: Stream,
    view: RecordView,
    reader: PointReader,
    took_ms: int,
) -> dict[str, object]:
    """The response body. Reads the records of the hits on the page."""
    page = result.hits[: request.size]
    payloads = await reader.payloads(stream, [hit.entry for hit in page])
    hits = [_hit(hit, payloads[hit.entry], request, stream, view) for hit in page]
    more = len(result.hits) > len(page) or not result.complete
    return {
        "stream": stream.name,
        "snapshot_end_offset": stream.offset(result.last),
        "took_ms": took_ms,
        "timed_out": result.timed_out,
        "timeout_ms": request.timeout_ms,
        "coverage": build_coverage(result, stream),
        "total": {"value": result.matches, "relation": "eq" if result.exact else "gte"},
        "hits": hits,
        "next_search_after": _hit_sort_values(page[-1], request, stream) if page and more else None,
    }


def build_coverage(result: SearchResult, stream: Stream) -> dict[str, object]:
    left = result.omitted
    oldest_ns = result.oldest_omitted_ns
    return {
        "mode": "complete" if result.timed_out or not left.rows else "published",
        "complete": result.complete,
        "stream_head_offset": stream.offset(result.last),
        "visible_through_offset": stream.offset(result.through),
        "visible_through_primary_timestamp_max": _format_ms(result.primary_max),
        "oldest_omitted_append_at": None if oldest_ns is None else format_rfc3339(oldest_ns),
        "possible_missing_uploaded_segments": left.segments,
        "possible_missing_sealed_rows": left.sealed_rows,
        "possible_missing_wal_rows": left.wal_rows,
        "possible_missing_events_upper_bound": left.rows,
        **result.counters.to_json(),
    }


def coverage_headers(body: dict[str, object]) -> list[tuple[str, str]]:
    """One header for each counter of the body."""
    coverage = cast("dict[str, object]", body["coverage"])
    total = cast("dict[str, object]", body["total"])
    shown: list[tuple[str, object]] = [
        ("timed-out", body["timed_out"]),
        ("timeout-ms", body["timeout_ms"]),
        ("took-ms", body["took_ms"]),
        ("total-relation", total["relation"]),
        ("coverage-complete", coverage["complete"]),
    ]
    names = list(coverage)
    counters = names[names.index("indexed_segments") :]
    shown += [(name.replace("_", "-"), coverage[name]) for name in counters]
    return [(f"search-{name}", _header_text(value)) for name, value in shown]


def _header_text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ",".join(cast("list[str]", value))
    return str(value)


def _format_ms(ms: int | None) -> str | None:
    if ms is None or not 0 <= ms <= TIMESTAMP_MS_MAX:
        return None
    return format_rfc3339_ms(ms)


def _hit(
    hit: Hit, payload: bytes, request: SearchRequest, stream: Stream, view: RecordView
) -> dict[str, object]:
    record = view.record(hit.entry, payload)
    current = view.is_current(hit.entry) or record is None
    return {
        "offset": stream.offset(hit.entry),
        "score": hit.score,
        "sort": _hit_sort_values(hit, request, stream),
        "fields": hit_fields(record, view),
        "source": orjson.Fragment(payload) if current else to_json_value(record),
    }


def _hit_sort_values(hit: Hit, request: SearchRequest, stream: Stream) -> list[object]:
    """The sort values of a hit, as `search_after` expects them."""
    return [
        stream.offset(hit.entry) if key.kind == "offset" else value
        for key, value in zip(request.sort, hit.values, strict=True)
    ]


def hit_fields(record: object, view: RecordView) -> dict[str, object]:
    """The raw value at each field's pointer."""
    fields: dict[str, object] = {}
    if not isinstance(record, dict):
        return fields
    for name, field in view.config.fields.items():
        pointer = field.pointer_at(view.version)
        tokens = None if pointer is None else parse_pointer(pointer)
        if tokens is not None and (found := resolve_pointer(cast("object", record), tokens)) is not ABSENT:
            fields[name] = to_json_value(found)
    return fields


def to_json_value(value: object) -> orjson.Fragment:
    """Encode any value of a record, with numbers and nesting beyond what orjson accepts."""
    try:
        return orjson.Fragment(orjson.dumps(value))
    except orjson.JSONEncodeError:
        text = json.dumps(_finite(value), separators=(",", ":"))
        return orjson.Fragment(text.encode())


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_finite(item) for item in cast("list[object]", value)]
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in cast("dict[str, object]", value).items()}
    return value
