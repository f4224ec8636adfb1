"""GET `_routing_keys`: the distinct keys of a stream in order, page by page."""

from __future__ import annotations

import asyncio

import orjson

from tailrace.auth import Action, Identity, authorise
from tailrace.common.errors import TailraceError
from tailrace.http.exchange import Exchange
from tailrace.log.model import Stream
from tailrace.log.routing_keys import KeyListing, KeyPage
from tailrace.protocol.query_params import parse_query
from tailrace.routing import responses
from tailrace.routing.context import Context
from tailrace.server.details import READ_METHODS
from tailrace.server.documents import read_documents

LIMIT_DEFAULT, LIMIT_MAX = 100, 500
SCAN_SHARE = 0.6  # of a request's time; the rest is for what is under way when that ends


class RoutingKeyRoutes:
    def __init__(self, context: Context) -> None:
        self._context = context
        self.listing = KeyListing(context.log)
        self._tasks: set[asyncio.Task[None]] = set()

    def routing_keys(self, exchange: Exchange, identity: Identity, method: bytes, name: str) -> None:
        if method not in (b"GET", b"HEAD"):
            raise responses.method_not_allowed(READ_METHODS)
        authorise(identity, Action.QUERY_STREAM, stream=name)
        stream = self._context.log.readable(name)
        query = parse_query(exchange.query)
        limit = _parse_key_limit(query.get("limit"))
        after = query.get("after")
        if not read_documents(stream).routing_key:
            raise TailraceError("invalid_request", "routing key not configured")
        task = self._context.loop.create_task(
            self._answer(exchange, stream, None if after is None else after.encode(), limit)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, exchange: Exchange, stream: Stream, after: bytes | None, limit: int) -> None:
        request_s = self._context.limits.request_ms / 1000
        try:
            async with asyncio.timeout(request_s):
                page = await self.listing.page(stream, after, limit, SCAN_SHARE * request_s)
        except TimeoutError:
            responses.respond_error(exchange, TailraceError("request_timeout", "request timed out"))
        except TailraceError as refusal:
            responses.respond_error(exchange, responses.stream_deleted(stream) if stream.removed else refusal)
        except Exception:
            responses.respond_error(exchange, TailraceError("internal", "the listing failed"))
            raise
        else:
            body = orjson.dumps(routing_keys_body(stream, page))
            exchange.respond(200, responses.JSON_TYPE + responses.NO_STORE, body)


def routing_keys_body(stream: Stream, page: KeyPage) -> dict[str, object]:
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
            "scanned_local_segments": 0,  # a segment is recorded once it is uploaded: none is only here
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
        raise TailraceError("invalid_request", "invalid limit")
    return limit
