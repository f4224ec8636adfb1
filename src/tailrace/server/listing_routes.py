"""Paged listings: GET /v1/streams, and GET `_routing_keys` (the distinct keys of a stream in order)."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypedDict

import msgspec
import orjson

from tailrace.auth import Action, Identity, authorise, visible_prefixes
from tailrace.common.errors import TailraceError
from tailrace.common.timestamps import format_rfc3339
from tailrace.http.exchange import Exchange
from tailrace.log.listing import list_streams
from tailrace.log.model import Stream
from tailrace.log.routing_keys import KeyListing, KeyPage, LexiconReader
from tailrace.protocol.http_headers import DEFAULT_CONTENT_TYPE
from tailrace.protocol.query_params import parse_query
from tailrace.routing import responses
from tailrace.routing.context import Context
from tailrace.routing.deferred_responses import DeferredResponses, Response
from tailrace.routing.openapi import (
    BOOLEAN,
    COUNT,
    COUNT_TEXT,
    INSTANT,
    OFFSET,
    STRING,
    Component,
    Count,
    answer,
    array,
    headers,
    nullable,
    obj,
    query,
)
from tailrace.routing.responses import next_page_header, page_limit
from tailrace.routing.table import Auth, Route, route_group
from tailrace.server.index_status import OBSERVABILITY, observability_pair, read_documents, read_profile_kind


class ListingRoutes:
    def __init__(self, context: Context) -> None:
        self._context = context

    def list(self, exchange: Exchange, identity: Identity) -> None:
        query = parse_query(exchange.query)
        action = listing_action(query)
        authorise(identity, action)
        system = action is Action.LIST_SYSTEM
        limit = page_limit(query, self._context.limits)
        after, prefix = query.get("after", ""), query.get("prefix", "")
        found: list[Stream] = []
        for visible in visible_prefixes(identity, prefix):
            # One more than the limit, to know whether there is a next page.
            missing = limit + 1 - len(found)
            found += list_streams(self._context.log, after, visible, missing, system) if missing else []
        more = len(found) > limit
        found = found[:limit]
        head = responses.JSON_TYPE + responses.NO_STORE
        if more:
            filters = {name: query[name] for name in ("prefix", "system") if name in query}
            head += next_page_header("/v1/streams", limit, found[-1].name, **filters)
        exchange.respond(200, head, orjson.dumps([describe_stream(stream) for stream in found]))


def listing_action(query: dict[str, str]) -> Action:
    """The required right: to list streams, or system streams as well."""
    system = query.get("system", "").lower() in ("true", "1")
    return Action.LIST_SYSTEM if system else Action.LIST


def describe_stream(stream: Stream) -> dict[str, object]:
    deadline_ns = stream.deadline_ns()
    return {
        "name": stream.name,
        "content_type": stream.content_type or DEFAULT_CONTENT_TYPE,
        "profile": read_profile_kind(stream),
        **observability_pair(stream),
        "created_at": format_rfc3339(stream.created_ns),
        "expires_at": None if deadline_ns is None else format_rfc3339(deadline_ns),
        "ttl_seconds": stream.lifetime.ttl_s,
        "closed": stream.visible_closed,
        "epoch": stream.epoch,
        "next_offset": str(stream.visible),
        "sealed_through": str(stream.sealed - 1),
        "uploaded_through": str(stream.sealed - 1),
        "end_offset": stream.offset(stream.visible),
        "earliest_offset": stream.offset(stream.earliest),
        "total_size_bytes": str(stream.size_bytes),
    }


STREAM_DESCRIPTOR: Final = Component(
    "Stream",
    obj(
        {
            "name": STRING,
            "content_type": STRING,
            "profile": STRING,
            "created_at": INSTANT,
            "expires_at": nullable(INSTANT),
            "ttl_seconds": nullable(COUNT),
            "closed": BOOLEAN,
            "epoch": COUNT,
            "next_offset": COUNT_TEXT,
            "sealed_through": COUNT_TEXT,
            "uploaded_through": COUNT_TEXT,
            "end_offset": OFFSET,
            "earliest_offset": OFFSET,
            "total_size_bytes": COUNT_TEXT,
        },
        {"observability": OBSERVABILITY},
    ),
)

LIMIT_DEFAULT, LIMIT_MAX = 100, 500
SCAN_SHARE = 0.6  # of the request timeout; the rest is for reads in progress when the scan stops


class RoutingKeyRoutes:
    def __init__(self, context: Context, lexicons: LexiconReader) -> None:
        self._context = context
        self.listing = KeyListing(context.log, lexicons)
        self._deferred = DeferredResponses(context.limits.request_ms)

    def routing_keys(self, exchange: Exchange, _: Identity, name: str) -> None:
        stream = self._context.log.readable(name)
        query = parse_query(exchange.query)
        limit = _parse_key_limit(query.get("limit"))
        after = query.get("after")
        if not read_documents(stream).routing_key:
            raise TailraceError("invalid_request", "routing key not configured")
        start = None if after is None else after.encode()
        self._deferred.respond(exchange, self._respond(stream, start, limit), stream=stream)

    async def _respond(self, stream: Stream, after: bytes | None, limit: int) -> Response:
        scan_s = SCAN_SHARE * self._context.limits.request_ms / 1000
        page = await self.listing.page(stream, after, limit, scan_s)
        body = orjson.dumps(routing_keys_body(stream, page))
        return 200, responses.JSON_TYPE + responses.NO_STORE, body


class RoutingKeySource(TypedDict):
    kind: Literal["routing_key"]
    name: str


class RoutingKeyCoverage(TypedDict):
    complete: bool
    indexed_segments: Count
    scanned_uploaded_segments: Count
    scanned_local_segments: Count
    scanned_wal_rows: Count
    possible_missing_uploaded_segments: Count
    possible_missing_local_segments: Count


class RoutingKeys(TypedDict):
    stream: str
    source: RoutingKeySource
    took_ms: Count
    coverage: RoutingKeyCoverage
    timing: dict[str, Annotated[float, msgspec.Meta(ge=0)]]
    keys: list[str]
    next_after: str | None


def routing_keys_body(stream: Stream, page: KeyPage) -> RoutingKeys:
    keys = [key.decode("utf-8", "replace") for key in page.keys]
    lexicon = page.lexicon_times
    return {
        "stream": stream.name,
        "source": {"kind": "routing_key", "name": ""},
        "took_ms": round((page.unsealed_s + page.lexicon_s + page.segments_s) * 1000),
        "coverage": {
            "complete": page.missing_segments == 0,
            "indexed_segments": page.indexed_segments,
            "scanned_uploaded_segments": page.segments,
            "scanned_local_segments": 0,  # segments are recorded when they are uploaded: none is local only
            "scanned_wal_rows": page.unsealed_rows,
            "possible_missing_uploaded_segments": page.missing_segments,
            "possible_missing_local_segments": 0,
        },
        "timing": {
            "lexicon_run_get_ms": _ms(lexicon.get_s),
            "lexicon_decode_ms": _ms(lexicon.decode_s),
            "lexicon_enumerate_ms": _ms(lexicon.enumerate_s),
            "lexicon_merge_ms": _ms(lexicon.merge_s),
            "fallback_scan_ms": _ms(page.unsealed_s + page.segments_s),
            "fallback_segment_get_ms": _ms(page.segments_s),
            "fallback_wal_scan_ms": _ms(page.unsealed_s),
            "lexicon_runs_loaded": page.runs,
        },
        "keys": keys,
        "next_after": keys[-1] if page.more else None,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _parse_key_limit(text: str | None) -> int:
    if text is None:
        return LIMIT_DEFAULT
    limit = int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else 0
    if not 1 <= limit <= LIMIT_MAX:
        raise TailraceError("invalid_request", f"limit must be 1 to {LIMIT_MAX}")
    return limit


ROUTES: Final = (
    *route_group(
        "streams",
        Route(
            *("GET", "/v1/streams", Action.LIST, ListingRoutes.list, "listStreams"),
            "List streams in byte order of their names",
            {200: answer("A page of descriptors.", array(STREAM_DESCRIPTOR), headers("Link"))},
            parameters=[
                query("prefix", "Only names with this prefix.", example="orders/"),
                query("after", "Only names after this one."),
                query(
                    "limit",
                    "Descriptors on a page.",
                    {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100},
                ),
                query(
                    "system",
                    "`true` includes system streams; requires `manage`.",
                    {"enum": ["true", "1", "false"]},
                ),
            ],
            auth=Auth.IDENTIFIED,
        ),
        place="all",
    ),
    *route_group(
        "inspection",
        Route(
            *("GET", "/v1/stream/{name}/_routing_keys", Action.QUERY_STREAM, RoutingKeyRoutes.routing_keys),
            "listRoutingKeys",
            "List the distinct routing keys in order",
            {200: answer("A page of keys.", RoutingKeys)},
            errors=(404, 410),
            parameters=[
                query(
                    "limit",
                    "Keys on a page.",
                    {"type": "integer", "minimum": 1, "maximum": LIMIT_MAX, "default": LIMIT_DEFAULT},
                ),
                query("after", "Only keys after this one."),
            ],
        ),
        place="owner",
    ),
)
