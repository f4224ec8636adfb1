"""POST `_aggregate`."""

from __future__ import annotations

import asyncio
import time

import orjson

from tailrace.api import answers
from tailrace.api.context import Context
from tailrace.auth import Action, Identity, authorise
from tailrace.common.errors import TailraceError
from tailrace.http.exchange import Exchange
from tailrace.log.model import Stream
from tailrace.schema.stream_schema import SCHEMA_DOCUMENT
from tailrace.search.aggregate_request import AggregateRequest, bind_aggregate, parse_aggregate
from tailrace.search.aggregates.aggregate import aggregate_timeout
from tailrace.search.aggregates.run import Aggregator
from tailrace.search.search import SearchRoutes, searchable_view
from tailrace.search.view import RecordView

AGGREGATE_METHODS = "POST, OPTIONS"


class AggregateRoutes:
    """Aggregates wait in the same queue as searches, and run on the same threads."""

    def __init__(self, context: Context, search: SearchRoutes) -> None:
        self._context = context
        self._log = context.log
        self._gate = search.gate
        self._aggregator = Aggregator(search.searcher)
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(self, exchange: Exchange, identity: Identity, method: bytes, name: str) -> None:
        if method != b"POST":
            raise answers.not_allowed(AGGREGATE_METHODS)
        authorise(identity, Action.QUERY_STREAM, stream=name)
        stream = self._log.readable(name)
        try:
            body: object = orjson.loads(exchange.body)
        except orjson.JSONDecodeError as error:
            raise TailraceError("invalid_json", f"body is not valid JSON: {error}") from None
        asked = parse_aggregate(body)
        documents = stream.visible_documents
        document = None if documents is None else documents.get(SCHEMA_DOCUMENT)
        view = None if document is None else searchable_view(document)
        request = bind_aggregate(asked, None if view is None else view.config)
        assert view is not None, "without a configuration the request was refused"
        self._log.touch(stream)
        task = self._context.loop.create_task(self._answer(exchange, stream, view, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(
        self, exchange: Exchange, stream: Stream, view: RecordView, request: AggregateRequest
    ) -> None:
        try:
            body = await self._aggregate(stream, view, request)
        except TailraceError as refusal:
            answers.refuse(exchange, answers.deleted(stream) if stream.removed else refusal)
            return
        except Exception:
            if stream.removed:
                answers.refuse(exchange, answers.deleted(stream))
                return
            answers.refuse(exchange, TailraceError("internal", "the aggregate failed"))
            raise
        exchange.respond(200, answers.JSON_TYPE + answers.NO_STORE, body)

    async def _aggregate(self, stream: Stream, view: RecordView, request: AggregateRequest) -> bytes:
        limit_s = self._context.limits.request_ms / 1000
        deadline = time.monotonic() + limit_s
        if not await self._gate.enter(limit_s):
            raise aggregate_timeout()
        try:
            return await self._aggregator.aggregate(stream, view, request, deadline)
        finally:
            self._gate.leave()
