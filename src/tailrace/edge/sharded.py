"""Upstreams that are servers of their own: what has to be asked of all of them, and what goes to none."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import parse_qs, unquote, urlencode

import orjson

from tailrace.common.errors import TailraceError
from tailrace.edge.asks import RequestTarget
from tailrace.edge.connection import UpstreamLostError
from tailrace.edge.context import EdgeContext
from tailrace.edge.feed import UpstreamAnswer, UpstreamRefusedError
from tailrace.edge.headers import cache_line, request_bytes, request_lines, response_lines
from tailrace.edge.upstreams import Upstream
from tailrace.http.exchange import Exchange
from tailrace.protocol import stream_names
from tailrace.protocol.http_headers import JSON_TYPE, NO_STORE, header_line
from tailrace.protocol.query_params import parse_query

# Listings, and what a row of each is called by.
LISTING_PATHS = {b"/v1/streams": "name", b"/v1/databases": "database"}
BYPASS = cache_line("BYPASS")
LISTING_BYTES_MAX = 16 * 1024 * 1024
# What spans all servers and is not put together here.
UNSHARDED_PATHS = (b"/hub", b"/v1/pipeline", b"/v1/traces")
# A database lives on one server, with all that belongs to it.
DATABASE_PREFIXES = (b"/v1/databases/", b"/replication/v1/databases/")
WATCH_PREFIXES = (b"/realtime/", b"/replication/")
DATABASE_STREAMS = ("__changes__", "__collections__", "__sources__")


class ShardRouter:
    """Keeps streams where they live."""

    def __init__(self, context: EdgeContext) -> None:
        self._context = context
        self._upstreams = context.upstreams

    def check(self, exchange: Exchange, target: RequestTarget) -> None:
        """Refuses what would need more than one server."""
        if target.name == "__ds" or exchange.path.startswith(UNSHARDED_PATHS):
            raise TailraceError("not_found", "this is not served by an edge with sharded upstreams")
        raw = exchange.headers.get(b"stream-forked-from")
        if exchange.method == b"PUT" and raw is not None:
            source = stream_names.decode_name(raw.removeprefix(b"/v1/stream/"))
            if source and self._upstreams.of(source) is not self._upstreams.of(target.name):
                raise TailraceError("invalid_fork", "the source of the fork lives on another server")

    def place(self, exchange: Exchange, target: RequestTarget) -> str:
        """The name by which a server is chosen; empty if any of them can answer."""
        for prefix in DATABASE_PREFIXES:
            if exchange.path.startswith(prefix):
                return _database_key(
                    unquote(exchange.path[len(prefix) :].partition(b"/")[0].decode("latin-1"))
                )
        if exchange.path.startswith(WATCH_PREFIXES):
            database = parse_qs(exchange.query.decode("latin-1")).get("database", [""])[-1]
            if not database:
                raise TailraceError(
                    "invalid_request", "behind this edge the URL names the database: ?database="
                )
            return _database_key(database)
        kind, _, rest = target.name.partition("/")
        return _database_key(rest.partition("/")[0]) if kind in DATABASE_STREAMS else target.name

    async def list(self, exchange: Exchange) -> None:
        """One page of the streams, or databases, of all servers, by name. One that fails fails the page."""
        key = LISTING_PATHS[exchange.path]
        lines = request_lines(exchange, self._context.edge_id)
        request = request_bytes(exchange, lines)
        try:
            answers = await asyncio.gather(
                *(self._ask(upstream, request) for upstream in self._upstreams.all)
            )
        except UpstreamLostError:
            raise TailraceError("unavailable", "a server does not answer") from None
        except UpstreamRefusedError as refused:
            refusal = refused.refusal
            exchange.respond(refusal.status, response_lines(refusal.fields, BYPASS), refusal.body)
            return
        query = parse_query(exchange.query)
        limit = int(query.get("limit", self._context.limits.list_page))
        rows: list[dict[str, Any]] = [
            row
            for upstream, answer in zip(self._upstreams.all, answers, strict=True)
            for row in orjson.loads(answer.body)
            if key == "name" or self._upstreams.of(_database_key(row[key])) is upstream
        ]
        rows.sort(key=lambda row: str(row[key]).encode())
        more = len(rows) > limit or any(_has_next(answer) for answer in answers)
        page = rows[:limit]
        head = JSON_TYPE + NO_STORE + BYPASS
        if more and page:
            following = {"limit": str(limit), "after": str(page[-1][key])}
            following.update({name: query[name] for name in ("prefix", "system") if name in query})
            head += header_line("Link", f'<{exchange.path.decode()}?{urlencode(following)}>; rel="next"')
        exchange.respond(200, head, orjson.dumps(page))

    async def _ask(self, upstream: Upstream, request: bytes) -> UpstreamAnswer:
        reply = await upstream.pool.ask(request, again=True)
        body = await reply.body(LISTING_BYTES_MAX)
        answer = UpstreamAnswer(reply.status, reply.fields, body or b"")
        if reply.status != 200:
            raise UpstreamRefusedError(answer)
        return answer


def _database_key(database: str) -> str:
    """Databases are placed like the stream that knows their collections."""
    return f"__collections__/{database}"


def _has_next(answer: UpstreamAnswer) -> bool:
    return any(name.lower() == b"link" for name, _ in answer.fields)
