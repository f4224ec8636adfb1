"""Subscription summaries, and the HTTP routes for matching jobs that run outside the server.

Summaries of all subscriptions are written to `__subs__/<gateway>`, only while a job has requested them (or
always, by setting). Each refresh appends one entry that keeps all summaries valid; without it they expire.
Jobs also read rows of the view, send corrections, and report statistics.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator
from typing import Annotated, Any, Final, TypedDict

import msgspec
import orjson

from tailrace.auth import Action, Identity
from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields
from tailrace.common.tasks import TaskSet
from tailrace.common.timestamps import format_rfc3339
from tailrace.http.exchange import Exchange
from tailrace.log.log import append_to_streams
from tailrace.log.model import Lifetime
from tailrace.log.transaction import Transaction
from tailrace.protocol.query_params import parse_query
from tailrace.routing import responses
from tailrace.routing.context import Context
from tailrace.routing.deferred_responses import DeferredResponses, Response
from tailrace.routing.openapi import Count, JsonObject, answer, query, request
from tailrace.routing.table import Route, route_group
from tailrace.storage.retention_service import NO_END, RetentionBound
from tailrace.watch import document_view, names
from tailrace.watch.collection import NATIVE, Collection
from tailrace.watch.collection_registry import CollectionRegistry
from tailrace.watch.document_view import DocumentRow
from tailrace.watch.document_writer import Correction, DocumentResults, DocumentWriter, WriteResult
from tailrace.watch.external_matching import (
    DELIVERIES_PREFIX,
    SUMMARIES_PREFIX,
    SUMMARY_TTL_MS,
    SubscriptionSummary,
    encode_predicate_part,
)
from tailrace.watch.predicate import canonical_predicate
from tailrace.watch.realtime.gateway import Gateway
from tailrace.watch.realtime.subscription import Subscription

logger = logging.getLogger("tailrace.watch")

REFRESH_S: Final = 30.0
FULL_REWRITE_MS: Final = 3_600_000  # all summaries are rewritten, so that older entries can be removed
SUMMARIES_RETENTION_S: Final = 600
DELIVERIES_RETENTION_S: Final = 86_400
LEASE_S_MAX: Final = 3600
SUMMARY_PAGE_BYTES: Final = 1024 * 1024
SUMMARY_PAGE_ENTRIES: Final = 500

Json = dict[str, Any]


class SubscriptionSummaries:
    """Writes the summaries of this gateway. Owned by the loop thread."""

    def __init__(self, context: Context, gateway: Gateway) -> None:
        self._context = context
        self._log = context.log
        self._gateway = gateway
        self.name = f"g_{hashlib.sha256(context.deployment.encode()).hexdigest()[:12]}"
        self.stream = SUMMARIES_PREFIX + self.name
        self.deliveries = DELIVERIES_PREFIX + self.name
        self._written: dict[str, int] = {}  # hash of the last summary by key
        self._is_complete = False
        self._reset_ms = 0
        self._reset_entry = 0  # the entry before the last reset
        self._page_subscriptions: list[Subscription] = []  # subscriptions of the current page
        self._until_s = 0.0
        self._lock = asyncio.Lock()
        self._tasks = TaskSet()

    def start(self) -> None:
        if self._context.settings.watch_summaries:
            self._start_refresh(0)

    def stop(self) -> None:
        self._tasks.cancel()

    @property
    def _is_requested(self) -> bool:
        always = self._context.settings.watch_summaries
        return always or self._context.loop.time() < self._until_s

    async def request_summaries(self, seconds: int, identity: Identity) -> Json:
        """Write summaries for this many seconds; returns their stream and up to where they are complete.

        0 ends the request.
        """
        loop = self._context.loop
        self._until_s = max(self._until_s, loop.time() + seconds) if seconds else 0.0
        upto = self._tail()
        if seconds:
            upto = await self._write()
            self._start_refresh(REFRESH_S)
        stream = self._log.find(self.stream)
        grants = self._gateway.grants if seconds else None
        # Only for appending deliveries, for the duration of the request.
        who = Identity(sub="watch-job", scopes=frozenset({"read", "system"}), streams=(self.deliveries,))
        return {
            "gateway": self.name,
            "stream": self.stream,
            "deliveries": self.deliveries,
            "offset": "" if stream is None else stream.offset(upto),
            "subscriptions": len(self._written),
            "expires": self._now_ms() + seconds * 1000,
            "token": None if grants is None else grants.issue(who, seconds, identity),
        }

    def _start_refresh(self, pause_s: float) -> None:
        if not self._tasks.running:
            self._tasks.start(self._refresh(pause_s))

    async def _refresh(self, pause_s: float) -> None:
        """Write summaries periodically while they are requested."""
        await asyncio.sleep(pause_s)
        while self._is_requested:
            try:
                await self._write()
            except TailraceError as error:
                logger.warning(
                    "cannot write subscription summaries, retrying", extra=log_fields(error=error.message)
                )
            await asyncio.sleep(REFRESH_S)

    def _now_ms(self) -> int:
        return self._context.clock.now_ns() // 1_000_000

    # -- writing ---------------------------------------------------------------------------------------

    async def _write(self) -> int:
        """Write what changed since the last time; periodically everything, after a reset.

        Returns the entry up to which the summaries are complete.
        """
        async with self._lock:
            page: list[bytes] = []
            self._page_subscriptions = []
            now_ms = self._now_ms()
            # If this is interrupted, the next one writes everything.
            was_complete, self._is_complete = self._is_complete, False
            if not was_complete or now_ms - self._reset_ms >= FULL_REWRITE_MS:
                self._reset_ms = now_ms
                self._written.clear()
                self._reset_entry = self._tail()
                page.append(self._entry("reset", None, None))
                if self._log.find(self.deliveries) is None:
                    begin = orjson.dumps({"v": 1, "kind": "control", "control": "begin"})
                    await self._append(self.deliveries, [begin])
                self._gateway.delivered.follow(self.deliveries)
            async for entry in self._changes():
                page.append(entry)
                if len(page) >= SUMMARY_PAGE_ENTRIES or sum(map(len, page)) >= SUMMARY_PAGE_BYTES:
                    await self._summarise(page)
                    page = []
            page.append(self._entry("gateway", self.name, {"expires": self._now_ms() + SUMMARY_TTL_MS}))
            await self._summarise(page)
            self._is_complete = True
            return self._tail()

    async def _summarise(self, page: list[bytes]) -> None:
        await self._append(self.stream, page)
        written, self._page_subscriptions = self._page_subscriptions, []
        for subscription in written:
            # Readers from here on have it; writing it again is harmless.
            subscription.summary_entry = subscription.summary_entry or self._tail()

    def _tail(self) -> int:
        stream = self._log.find(self.stream)
        return 0 if stream is None else max(0, stream.visible)

    def bounds(self) -> list[RetentionBound]:
        """What retention may remove: summaries before the last reset, and old deliveries."""
        found: list[RetentionBound] = []
        retained = (
            (self.stream, SUMMARIES_RETENTION_S, self._reset_entry),
            (self.deliveries, DELIVERIES_RETENTION_S, NO_END),
        )
        for name, kept_s, upto in retained:
            stream = self._log.find(name)
            if stream is not None and stream.earliest < min(upto, stream.visible):
                found.append(RetentionBound(stream.number, Lifetime(retention_s=kept_s), upto))
        return found

    async def _changes(self) -> AsyncIterator[bytes]:
        current: dict[str, int] = {}
        known, self._written = self._written, current
        for watched in self._gateway.all_watched():
            for index, subscription in enumerate(tuple(watched.subscriptions)):
                if index % 100 == 99:
                    await asyncio.sleep(0)  # let the loop run other callbacks
                if subscription.state == "invalid":
                    continue
                key = subscription.key
                current[key] = hash((subscription.interest.predicate.hash, subscription.options.priority))
                before = known.pop(key, None)
                if before == current[key]:
                    subscription.summary_entry = subscription.summary_entry or self._tail()
                else:
                    self._page_subscriptions.append(subscription)
                    operation = "insert" if before is None else "update"
                    yield self._entry("sub", key, self._value(subscription), operation)
        for key in known:
            yield self._entry("sub", key, None, "delete")

    def _value(self, subscription: Subscription) -> Json:
        query, whole = subscription.query, subscription.interest.predicate
        identity = subscription.session.identity
        assert identity is not None
        watched = subscription.watched
        rule = self._gateway.access.read_predicate_part(identity, watched.collection)
        summary = SubscriptionSummary(
            database=watched.database,
            collection=watched.name,
            predicate=canonical_predicate(
                query.parts if rule is None else [*query.parts, rule], query.documents
            ),
            predicateHash=whole.hash.hex(),
            parts=[encode_predicate_part(part) for part in query.parts],
            ruleInputs=None if rule is None else encode_predicate_part(rule),
            documents=None if query.documents is None else sorted(query.documents),
            priority=subscription.options.priority,
            position=list(subscription.positions),
            expires=self._now_ms() + SUMMARY_TTL_MS,
        )
        return msgspec.to_builtins(summary)

    def _entry(self, kind: str, key: str | None, value: Json | None, operation: str = "update") -> bytes:
        """A state message; `reset` invalidates all earlier ones."""
        timestamp = format_rfc3339(self._context.clock.now_ns())
        if kind == "reset":
            return orjson.dumps({"headers": {"control": "reset", "timestamp": timestamp}})
        message: Json = {"type": kind, "key": key}
        if value is not None:
            message["value"] = value
        message["headers"] = {"operation": operation, "timestamp": timestamp}
        return orjson.dumps(message)

    async def _append(self, name: str, entries: list[bytes]) -> None:
        done: asyncio.Future[None] = self._context.loop.create_future()

        def reply(_: Transaction, error: TailraceError | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        now_ns, parts = self._context.clock.now_ns(), [(name, entries)]
        await self._log.backpressure_queue.submit(
            lambda: append_to_streams(self._log, parts, now_ns, reply, None)
        )
        await done


BODY_BYTES_MAX: Final = 5 * 1024 * 1024
ROWS_MAX: Final = 1000
ROWS_BYTES: Final = 4 * 1024 * 1024
ROWS_PER_READ: Final = 16  # each may be as large as a document
CORRECTIONS_MAX: Final = 500


class SummariesRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long summaries are needed; 0 when the job is done."""

    seconds: Annotated[int, msgspec.Meta(ge=0, le=LEASE_S_MAX)] = 90


class CorrectionsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Documents to correct; `name` makes repeats harmless."""

    collection: str
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    corrections: Annotated[list[Correction], msgspec.Meta(min_length=1, max_length=CORRECTIONS_MAX)]


class BloomStatistics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A job's Bloom filter: its keys, and its false positives on absent values."""

    keys: Annotated[int, msgspec.Meta(ge=0)]
    absent: Annotated[int, msgspec.Meta(ge=0)]
    wrong: Annotated[int, msgspec.Meta(ge=0)]


class StatisticsReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Statistics of a collection from a job."""

    collection: str
    bloom: BloomStatistics


class JobRoutes:
    """Below `/v1/databases/{db}/`; requires the right to manage the database."""

    def __init__(
        self,
        context: Context,
        registry: CollectionRegistry,
        writer: DocumentWriter,
        summaries: SubscriptionSummaries,
    ) -> None:
        self._context = context
        self._registry = registry
        self._writer = writer
        self._summaries = summaries
        self._deferred = DeferredResponses(context.limits.request_ms)

    def announce(self, exchange: Exchange, identity: Identity, database: str) -> None:
        self._registry.database(database)
        request = _read(exchange, SummariesRequest)

        async def run() -> Response:
            return _json_response(await self._summaries.request_summaries(request.seconds, identity))

        self._deferred.respond(exchange, run())

    def view(self, exchange: Exchange, _: Identity, database: str) -> None:
        self._registry.database(database)
        _respond_json(exchange, self._rows(exchange, database))

    def correct(self, exchange: Exchange, _: Identity, database: str) -> None:
        self._registry.database(database)
        self._correct(exchange, database, _read(exchange, CorrectionsRequest))

    def record_statistics(self, exchange: Exchange, _: Identity, database: str) -> None:
        self._registry.database(database)
        self._record_statistics(exchange, database, _read(exchange, StatisticsReport))

    def _collection(self, database: str, name: str) -> Collection:
        found = self._registry.find(database, names.check_collection(name))
        if found is None or not found.durable:
            raise TailraceError("not_found", f"collection {name!r} not found")
        self._registry.check_applied(found)
        return found

    # -- the view --------------------------------------------------------------------------------------

    def _rows(self, exchange: Exchange, database: str) -> Json:
        """A page of the view, without read rules, with tombstones."""
        query = parse_query(exchange.query)
        collection = self._collection(database, query.get("collection", ""))
        rows: list[Json] = []
        size, after, more = 0, query.get("after", ""), True
        now = self._registry.view.current
        while more and len(rows) < ROWS_MAX and size < ROWS_BYTES:
            found = now.rows_after(collection.number, after, ROWS_PER_READ)
            rows += map(_row_json, found)
            size += sum(len(row.data) for row in found)
            more = len(found) == ROWS_PER_READ
            after = found[-1].id if found else after
        purged = now.purged(collection.number, collection.config.partitions)
        return {
            "generation": self._registry.generation(collection),
            "folder": document_view.view_folder(database, collection.name, collection.config.generation),
            "purged": [list(one) for one in purged],
            "positions": collection.applied,
            "rows": rows,
            "next": after if more else None,
        }

    def _record_statistics(self, exchange: Exchange, database: str, found: StatisticsReport) -> None:
        """Store the quality of a Bloom filter, which only jobs know."""
        collection, bloom = self._collection(database, found.collection), found.bloom
        if bloom.wrong > bloom.absent:
            raise TailraceError("invalid_request", "bloom: wrong must not exceed absent")
        collection.bloom_ratio = bloom.wrong / bloom.absent if bloom.absent else 0.0
        self._registry.counters.for_collection(collection).bloom_rebuilds += 1
        _respond_json(exchange, {"collection": collection.name, "bloomRatio": collection.bloom_ratio})

    def _correct(self, exchange: Exchange, database: str, request: CorrectionsRequest) -> None:
        collection = self._collection(database, request.collection)
        if collection.config.source != NATIVE:
            raise TailraceError(
                "read_only_collection",
                "a collection with a source is corrected by its connector",
                headers=(("Allow", "GET, HEAD, OPTIONS"),),
            )

        def respond(results: list[WriteResult], error: TailraceError | None) -> None:
            if error is not None:
                responses.respond_error(exchange, error)
            else:
                _respond_json(exchange, {"results": [result.to_json() for result in results]})

        self._writer.apply_corrections(collection, request.corrections, request.name, respond)


def _row_json(row: DocumentRow) -> Json:
    return {
        "id": row.id,
        "partition": row.partition,
        "seq": row.seq,
        "version": row.version,
        "createdAt": row.created_ms,
        "updatedAt": row.updated_ms,
        "deleted": bool(row.deleted),
        "data": orjson.Fragment(row.data),
    }


def _json_response(body: Json) -> Response:
    return 200, responses.JSON_TYPE + responses.NO_STORE, orjson.dumps(body)


def _respond_json(exchange: Exchange, body: Json) -> None:
    exchange.respond(*_json_response(body))


def _read(exchange: Exchange, kind: type[Any]) -> Any:
    if len(exchange.body) > BODY_BYTES_MAX:
        raise TailraceError("payload_too_large", f"the body must have at most {BODY_BYTES_MAX} bytes")
    try:
        return msgspec.json.decode(exchange.body or b"{}", type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TailraceError("invalid_request", f"invalid body: {error}") from None


class JobSummaries(TypedDict):
    gateway: str
    stream: str
    deliveries: str
    offset: str
    subscriptions: Count
    expires: Count
    token: str | None


class ViewRow(TypedDict):
    id: str
    partition: Count
    seq: Count
    version: Count
    createdAt: Count
    updatedAt: Count
    deleted: bool
    data: JsonObject


class ViewPage(TypedDict):
    generation: Count
    folder: str
    purged: list[Annotated[list[Count], msgspec.Meta(min_length=2, max_length=2)]]
    positions: list[Count]
    rows: list[ViewRow]
    next: str | None


class RecordedStatistics(TypedDict):
    collection: str
    bloomRatio: float


_CORRECTION: Final[Json] = {
    "id": "o-1",
    "seen": 7,
    "version": 3,
    "createdMs": 1767225600000,
    "deleted": False,
    "data": {"total": 5},
}
_DATABASE: Final = "/v1/databases/{db}"
ROUTES: Final = route_group(
    "watch",
    Route(
        *("POST", f"{_DATABASE}/summaries", Action.MANAGE_DATABASE, JobRoutes.announce, "announceWatchJob"),
        "Enable summaries of all subscriptions for some time",
        {200: answer("Their stream, and the offset up to which they are complete.", JobSummaries)},
        errors=(404, 507),
        body=request(SummariesRequest, {"seconds": 90}, "The duration."),
    ),
    Route(
        *("GET", f"{_DATABASE}/view", Action.MANAGE_DATABASE, JobRoutes.view, "readView"),
        "The rows of a collection view, including tombstones",
        {200: answer("One page.", ViewPage)},
        errors=(404,),
        parameters=[
            query("collection", "The collection."),
            query("after", "The `next` of the previous page."),
        ],
    ),
    Route(
        *("POST", f"{_DATABASE}/corrections", Action.MANAGE_DATABASE, JobRoutes.correct, "correctView"),
        "Correct documents of a view that differ from the log",
        {200: answer("The result of each write.", DocumentResults)},
        errors=(404, 405, 507),
        body=request(
            CorrectionsRequest,
            {"collection": "orders", "name": "rescan-1", "corrections": [_CORRECTION]},
            "The documents as in the log.",
        ),
        description="A document that was written in the meantime is not changed. Idempotent.",
    ),
    Route(
        *("POST", f"{_DATABASE}/statistics", Action.MANAGE_DATABASE, JobRoutes.record_statistics),
        "noteWatchStatistics",
        "Report the quality of a Bloom filter that a job has built",
        {200: answer("The ratio is stored.", RecordedStatistics)},
        errors=(404, 507),
        body=request(
            StatisticsReport,
            {"collection": "orders", "bloom": {"keys": 1000, "absent": 50_000, "wrong": 410}},
            "The measured counts.",
        ),
    ),
    place="first",
)
