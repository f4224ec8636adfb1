"""What jobs beside the server ask of it: summaries of subscriptions, the rows of a view, corrections."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any, Final

import msgspec
import orjson

from tailrace.api import answers
from tailrace.api.context import Context
from tailrace.auth import Action, Identity, authorise
from tailrace.common.errors import TailraceError
from tailrace.http.exchange import Exchange
from tailrace.protocol import stream_names
from tailrace.protocol.query_params import parse_query
from tailrace.watch import names, view_files
from tailrace.watch.book import CollectionRegistry
from tailrace.watch.collection import NATIVE, Collection
from tailrace.watch.documents import Correction, DocumentWriter
from tailrace.watch.summaries import LEASE_S_MAX, SubscriptionSummaries
from tailrace.watch.view import DocumentRow
from tailrace.watch.writes import WriteResult

JOB_KINDS: Final = ("summaries", "view", "corrections", "statistics")
BODY_BYTES_MAX: Final = 5 * 1024 * 1024
ROWS_MAX: Final = 1000
ROWS_BYTES: Final = 4 * 1024 * 1024
ROWS_PER_READ: Final = 16  # read at once: each may be as large as a document
CORRECTIONS_MAX: Final = 500

Json = dict[str, Any]


class SummariesRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For how long summaries are needed; a job that is done says 0."""

    seconds: Annotated[int, msgspec.Meta(ge=0, le=LEASE_S_MAX)] = 90


class CorrectionsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Documents to be put right; `name` makes a repeat harmless."""

    collection: str
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    corrections: Annotated[list[Correction], msgspec.Meta(min_length=1, max_length=CORRECTIONS_MAX)]


class BloomStatistics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A Bloom filter that a job has made, and what it said to values that nobody looks for."""

    keys: Annotated[int, msgspec.Meta(ge=0)]
    absent: Annotated[int, msgspec.Meta(ge=0)]
    wrong: Annotated[int, msgspec.Meta(ge=0)]


class StatisticsReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a job has found out about a collection."""

    collection: str
    bloom: BloomStatistics


class JobRoutes:
    """Below `/v1/databases/{db}/`, for whoever may manage the database."""

    def __init__(
        self,
        context: Context,
        book: CollectionRegistry,
        writer: DocumentWriter,
        summaries: SubscriptionSummaries,
    ) -> None:
        self._context = context
        self._book = book
        self._writer = writer
        self._summaries = summaries
        self._tasks: set[asyncio.Task[None]] = set()

    def kind_of(self, raw: bytes) -> tuple[str, str] | None:
        """Database and route, if the path behind the prefix is one of ours."""
        path = stream_names.decode_name(raw)
        database, _, kind = ("", "", "") if path is None else path.partition("/")
        return (database, kind) if kind in JOB_KINDS else None

    def serve(self, exchange: Exchange, identity: Identity, method: bytes, database: str, kind: str) -> None:
        authorise(identity, Action.MANAGE_DATABASE, db=database)
        reading = kind == "view"
        if method not in ((b"GET", b"HEAD") if reading else (b"POST",)):
            raise answers.not_allowed("GET, HEAD, OPTIONS" if reading else "POST, OPTIONS")
        self._book.database(database)
        if reading:
            _answer(exchange, self._rows(exchange, database))
        elif kind == "summaries":
            asked = _read(exchange, SummariesRequest)
            self._spawn(exchange, self._summaries.announce(asked.seconds, identity))
        elif kind == "statistics":
            self._note(exchange, database, _read(exchange, StatisticsReport))
        else:
            self._correct(exchange, database, _read(exchange, CorrectionsRequest))

    def _spawn(self, exchange: Exchange, work: Coroutine[None, None, Json]) -> None:
        async def run() -> None:
            try:
                async with asyncio.timeout(self._context.limits.request_ms / 1000):
                    body = await work
            except TimeoutError:
                answers.refuse(exchange, TailraceError("request_timeout", "the request took too long"))
            except TailraceError as refusal:
                answers.refuse(exchange, refusal)
            except Exception:
                answers.refuse(exchange, TailraceError("internal", "the request failed"))
                raise
            else:
                _answer(exchange, body)

        task = self._context.loop.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _collection(self, database: str, name: str) -> Collection:
        found = self._book.find(database, names.check_collection(name))
        if found is None or not found.durable:
            raise TailraceError("not_found", f"there is no collection {name!r}")
        self._book.check_applied(found)
        return found

    # -- the view --------------------------------------------------------------------------------------

    def _rows(self, exchange: Exchange, database: str) -> Json:
        """A page of the view as it is: no rule hides anything, tombstones are there."""
        query = parse_query(exchange.query)
        collection = self._collection(database, query.get("collection", ""))
        rows: list[Json] = []
        size, after, more = 0, query.get("after", ""), True
        now = self._book.view.now
        while more and len(rows) < ROWS_MAX and size < ROWS_BYTES:
            found = now.rows_after(collection.number, after, ROWS_PER_READ)
            rows += map(_shown, found)
            size += sum(len(row.data) for row in found)
            more = len(found) == ROWS_PER_READ
            after = found[-1].id if found else after
        purged = now.purged(collection.number, collection.config.partitions)
        return {
            "generation": self._book.generation(collection),
            "folder": view_files.view_folder(database, collection.name, collection.config.generation),
            "purged": [list(one) for one in purged],
            "positions": collection.applied,
            "rows": rows,
            "next": after if more else None,
        }

    def _note(self, exchange: Exchange, database: str, found: StatisticsReport) -> None:
        """Filters are made, and asked, by jobs: how good they are is known from what jobs say."""
        collection, bloom = self._collection(database, found.collection), found.bloom
        if bloom.wrong > bloom.absent:
            raise TailraceError("invalid_request", "bloom: no more answers are wrong than there were")
        collection.bloom_ratio = bloom.wrong / bloom.absent if bloom.absent else 0.0
        self._book.tallies.of(collection).bloom_rebuilds += 1
        _answer(exchange, {"collection": collection.name, "bloomRatio": collection.bloom_ratio})

    def _correct(self, exchange: Exchange, database: str, asked: CorrectionsRequest) -> None:
        collection = self._collection(database, asked.collection)
        if collection.config.source != NATIVE:
            raise TailraceError(
                "read_only_collection",
                "a collection with a source outside is put right by its connector",
                headers=(("Allow", "GET, HEAD, OPTIONS"),),
            )

        def answer(results: list[WriteResult], error: TailraceError | None) -> None:
            if error is not None:
                answers.refuse(exchange, error)
            else:
                _answer(exchange, {"results": [result.shown() for result in results]})

        self._writer.correct(collection, asked.corrections, asked.name, answer)


def _shown(row: DocumentRow) -> Json:
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


def _answer(exchange: Exchange, body: Json) -> None:
    exchange.respond(200, answers.JSON_TYPE + answers.NO_STORE, orjson.dumps(body))


def _read(exchange: Exchange, kind: type[Any]) -> Any:
    if len(exchange.body) > BODY_BYTES_MAX:
        raise TailraceError("payload_too_large", f"a body has at most {BODY_BYTES_MAX} bytes")
    try:
        return msgspec.json.decode(exchange.body or b"{}", type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TailraceError("invalid_request", f"the body cannot be understood: {error}") from None
