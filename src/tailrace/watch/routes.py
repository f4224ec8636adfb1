"""Routes of documents below `/v1/databases/{db}`: `docs`, `batch` and `query`."""

from __future__ import annotations

from typing import Any, Final, TypedDict, cast

import orjson

from tailrace.auth import Action, Identity
from tailrace.common.errors import TailraceError
from tailrace.http.exchange import Exchange
from tailrace.protocol.http_headers import header_line, if_none_match
from tailrace.routing import responses
from tailrace.routing.context import Context
from tailrace.routing.deferred_responses import DeferredResponses, Response
from tailrace.routing.openapi import (
    BOOLEAN,
    COUNT,
    OBJECT,
    STRING,
    Component,
    Count,
    answer,
    array,
    closed,
    counts,
    header_param,
    headers,
    nullable,
    obj,
    params,
    request,
)
from tailrace.routing.table import Route, route_group
from tailrace.watch import document, names
from tailrace.watch.document import Document, client_document
from tailrace.watch.document_writer import DocumentResults, DocumentWrite, DocumentWriter, WriteResult
from tailrace.watch.query_execution import DOCUMENT_QUERY, QueryExecutor
from tailrace.watch.realtime.gateway import Gateway

BATCH_BYTES: Final = 5 * 1024 * 1024
WRITE_ID_BYTES: Final = 128


class DocumentRoutes:
    """Documents: one, several, and those that match a query."""

    def __init__(self, context: Context, gateway: Gateway, writer: DocumentWriter) -> None:
        registry, access = gateway.registry, gateway.access
        self._context = context
        self._registry = registry
        self._writer = writer
        self._access = access
        self._bytes_max = context.limits.watch_document_bytes
        self._writes_max = context.limits.watch_batch_writes
        self._queries = QueryExecutor(registry, access)
        self._deferred = DeferredResponses(context.limits.request_ms)

    # -- one document ----------------------------------------------------------------------------------

    def write(self, exchange: Exchange, identity: Identity, database: str, name: str) -> None:
        method = exchange.method
        path = names.split_document_path(name)
        data: Document | None = None
        if method != b"DELETE":
            _check_type(exchange, patch=method == b"PATCH")
            data = document.load(exchange.body, self._bytes_max)
        if_version, if_present = _if_match(exchange)
        write = DocumentWrite(
            "put" if method == b"PUT" else "patch" if method == b"PATCH" else "delete",
            path,
            data,
            if_version,
            if_present,
            _if_none_match(exchange),
        )

        def on_written(results: list[WriteResult], error: TailraceError | None) -> None:
            failure = error or results[0].error
            if failure is not None:
                responses.respond_error(exchange, failure)
            else:
                _respond_write(exchange, results[0])

        self._writer.write(
            database, [write], self._access.write_check(identity), on_written, write_id=_write_id(exchange)
        )

    def read(self, exchange: Exchange, identity: Identity, database: str, name: str) -> None:
        path = self._registry.split_path(database, name)
        absent = TailraceError("not_found", f"document {name!r} not found")
        collection = self._registry.find(database, path.collection)
        if collection is None:
            raise absent
        self._registry.check_applied(collection)
        row = self._registry.view.find(collection.number, path.id)
        if row is None or row.deleted:
            raise absent
        data = orjson.loads(row.data)
        flat = document.flatten_document(
            data, row.id, collection.name, row.version, row.created_ms, row.updated_ms
        )
        if not self._access.readable(identity, collection, flat):
            raise absent
        tag = f'"{row.version}"'
        head = responses.NO_STORE + header_line("ETag", tag)
        known = exchange.headers.get(b"if-none-match")
        if known is not None and if_none_match(known.decode("latin-1"), tag):
            exchange.respond(304, head)
            return
        body = client_document(collection.name, row.id, data, row.version, row.created_ms, row.updated_ms)
        exchange.respond(200, responses.JSON_TYPE + head, orjson.dumps(body))

    # -- several documents -----------------------------------------------------------------------------

    def batch(self, exchange: Exchange, identity: Identity, database: str) -> None:
        _check_type(exchange)
        value = read_object(exchange.body, BATCH_BYTES, {"atomic", "writes"})
        atomic, listed = value.get("atomic", False), value.get("writes")
        if not isinstance(atomic, bool) or not isinstance(listed, list) or not listed:
            raise TailraceError(
                "invalid_request", 'a batch must be {"atomic": true or false, "writes": [...]}'
            )
        items = cast("list[Any]", listed)
        if len(items) > self._writes_max:
            raise TailraceError("payload_too_large", f"a batch must have at most {self._writes_max} writes")
        writes = [self._batch_write(item, index) for index, item in enumerate(items)]
        paths = {write.path.collection for write in writes}
        write_id = _write_id(exchange)
        if len(paths) > 1 and (atomic or write_id is not None):
            raise TailraceError(
                "batch_not_atomic",
                "an atomic batch, or one with an Idempotency-Key, must have one collection",
            )

        def on_written(results: list[WriteResult], error: TailraceError | None) -> None:
            if error is not None:
                responses.respond_error(exchange, error)
                return
            body: dict[str, Any] = {"results": [result.to_json() for result in results]}
            if atomic and any(result.error is not None for result in results):
                failed = TailraceError("batch_failed", "no write of the batch was made", **body)
                responses.respond_error(exchange, failed)
            else:
                exchange.respond(200, responses.JSON_TYPE + responses.NO_STORE, orjson.dumps(body))

        self._writer.write(
            database, writes, self._access.write_check(identity), on_written, atomic=atomic, write_id=write_id
        )

    def _batch_write(self, item: Any, index: int) -> DocumentWrite:
        known = {"op", "path", "data", "ifVersion", "ifAbsent"}
        if not isinstance(item, dict) or not set(cast("Document", item)) <= known:
            raise TailraceError(
                "invalid_request", f"write {index}: must have only op, path, data, ifVersion, ifAbsent"
            )
        body = cast("Document", item)
        op, path, version = body.get("op"), body.get("path"), body.get("ifVersion")
        absent = body.get("ifAbsent", False)
        if op not in ("put", "patch", "delete") or not isinstance(path, str):
            raise TailraceError(
                "invalid_request", f"write {index}: op must be put, patch or delete, path a string"
            )
        if (version is not None and type(version) is not int) or type(absent) is not bool:
            raise TailraceError(
                "invalid_request", f"write {index}: ifVersion must be an integer, ifAbsent true or false"
            )
        data: Document | None = None
        if op != "delete":
            data = document.check(body.get("data"))
        elif "data" in body:
            raise TailraceError("invalid_request", f"write {index}: a delete must not have data")
        return DocumentWrite(op, names.split_document_path(path), data, version, if_absent=absent)

    def query(self, exchange: Exchange, identity: Identity, database: str) -> None:
        _check_type(exchange)
        value = read_object(exchange.body, self._context.limits.watch_message_bytes, None)
        request = self._queries.prepare(identity, database, value)

        async def run() -> Response:
            return 200, responses.JSON_TYPE + responses.NO_STORE, orjson.dumps(await request.run())

        self._deferred.respond(exchange, run(), timeout_message="the query took too long")


def read_object(body: bytes, bytes_max: int, known: set[str] | None) -> Document:
    """Parse a JSON object; unknown members are rejected."""
    if len(body) > bytes_max:
        raise TailraceError("payload_too_large", f"the body must have at most {bytes_max} bytes")
    try:
        value = document.load(body or b"{}", bytes_max)
    except TailraceError as error:
        if error.code != "invalid_request":
            raise
        raise TailraceError("invalid_request", "the body must be a JSON object") from None
    if known is not None and (unknown := sorted(set(value) - known)):
        raise TailraceError("invalid_request", f"unknown member {unknown[0]!r}")
    return value


def _respond_write(exchange: Exchange, result: WriteResult) -> None:
    head = responses.NO_STORE + header_line("ETag", f'"{result.version}"')
    if result.status == 204:
        exchange.respond(204, head)
        return
    assert result.version is not None
    assert result.updated_ms is not None
    body: DocumentWritten = {
        "path": result.path,
        "version": result.version,
        "updatedAt": result.updated_ms,
    }
    exchange.respond(result.status, head + responses.JSON_TYPE, orjson.dumps(body))


def _check_type(exchange: Exchange, *, patch: bool = False) -> None:
    body = exchange.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    expected = (b"application/merge-patch+json", b"application/json") if patch else (b"application/json",)
    if body not in expected:
        raise TailraceError("unsupported_media_type", f"Content-Type must be {expected[0].decode()}")


def _if_match(exchange: Exchange) -> tuple[int | None, bool]:
    raw = exchange.headers.get(b"if-match")
    if raw is None:
        return None, False
    if raw == b"*":
        return None, True
    text = raw.removeprefix(b"W/").strip(b'"')
    if not text.isdigit() or len(text) > 18:
        # No document has such a version: the condition fails.
        return -1, False
    return int(text), False


def _if_none_match(exchange: Exchange) -> bool:
    raw = exchange.headers.get(b"if-none-match")
    if raw is None:
        return False
    if raw != b"*":
        raise TailraceError("invalid_header", "If-None-Match of a write must be *", header="if-none-match")
    return True


def _write_id(exchange: Exchange) -> str | None:
    raw = exchange.headers.get(b"idempotency-key")
    if raw is None:
        return None
    if not 1 <= len(raw) <= WRITE_ID_BYTES:
        raise TailraceError(
            "invalid_header",
            f"Idempotency-Key must have 1 to {WRITE_ID_BYTES} bytes",
            header="idempotency-key",
        )
    return raw.decode("latin-1")


class DocumentWritten(TypedDict):
    path: str
    version: Count
    updatedAt: Count


_DOCUMENT: Final = Component(
    "Document",
    obj(
        {
            "path": STRING,
            "id": STRING,
            "collection": STRING,
            "data": OBJECT,
            **counts("version", "createdAt", "updatedAt"),
        }
    ),
)
_DOCUMENT_BATCH: Final = Component(
    "DocumentBatch",
    closed(
        {
            "writes": array(
                closed(
                    {"op": {"enum": ["put", "patch", "delete"]}, "path": STRING},
                    {"data": OBJECT, "ifVersion": COUNT, "ifAbsent": BOOLEAN},
                ),
                minItems=1,
                maxItems=500,
            )
        },
        {"atomic": BOOLEAN},
    ),
)
_DOCUMENT_PAGE: Final = Component(
    "DocumentPage",
    obj({"documents": array(_DOCUMENT), "cursor": nullable(STRING), "positions": array(COUNT)}),
)
_WRITE_ID: Final = header_param(
    "Idempotency-Key",
    "A repeat within ten minutes gets the first response; another request with the same key gets 409.",
    {"type": "string", "minLength": 1, "maxLength": WRITE_ID_BYTES},
)
_IF_MATCH: Final = header_param("If-Match", "The required version, in quotes, or `*`.")
_IF_ABSENT: Final = header_param("If-None-Match", "`*`: only if it does not exist.", {"const": "*"})
_TAGGED: Final = headers(always=("ETag",))
_WRITE_ERRORS: Final = (404, 409, 412, 415, 501, 507)
_DATABASE: Final = "/v1/databases/{db}"
_PATH: Final = f"{_DATABASE}/docs/{{path}}"
ROUTES: Final = route_group(
    "watch",
    Route(
        *("GET", _PATH, Action.READ_DATABASE, DocumentRoutes.read, "getDocument"),
        "A document",
        {
            200: answer("The document.", _DOCUMENT, _TAGGED),
            304: answer("Not modified.", head=_TAGGED),
        },
        errors=(404, 501),
        parameters=params("if-none-match"),
    ),
    Route(
        *("PUT", _PATH, Action.WRITE_DATABASE, DocumentRoutes.write, "putDocument"),
        "Create or replace a document",
        {
            201: answer("Created.", DocumentWritten, _TAGGED),
            200: answer("Replaced.", DocumentWritten, _TAGGED),
        },
        errors=_WRITE_ERRORS,
        parameters=[_WRITE_ID, _IF_MATCH, _IF_ABSENT],
        body=request(OBJECT, {"total": 5}, "The document."),
    ),
    Route(
        *("PATCH", _PATH, Action.WRITE_DATABASE, DocumentRoutes.write, "patchDocument"),
        "Change some fields of a document",
        {200: answer("Changed.", DocumentWritten, _TAGGED)},
        errors=_WRITE_ERRORS,
        parameters=[_WRITE_ID, _IF_MATCH],
        body={
            "description": "A merge patch (RFC 7396).",
            "required": True,
            "content": {"application/merge-patch+json": {"schema": OBJECT, "example": {"total": 6}}},
        },
    ),
    Route(
        *("DELETE", _PATH, Action.WRITE_DATABASE, DocumentRoutes.write, "deleteDocument"),
        "Delete a document",
        {204: answer("Deleted.", head=_TAGGED)},
        errors=_WRITE_ERRORS,
        parameters=[_WRITE_ID, _IF_MATCH],
    ),
    Route(
        *("POST", f"{_DATABASE}/batch", Action.WRITE_DATABASE, DocumentRoutes.batch, "writeDocuments"),
        "Write several documents with one commit",
        {200: answer("The result of each write.", DocumentResults)},
        errors=(404, 409, 415, 501, 507),
        parameters=[_WRITE_ID],
        body=request(
            _DOCUMENT_BATCH,
            {"atomic": True, "writes": [{"op": "put", "path": "orders/o-1", "data": {"total": 5}}]},
            "The writes, in order.",
        ),
    ),
    Route(
        *("POST", f"{_DATABASE}/query", Action.READ_DATABASE, DocumentRoutes.query, "queryDocuments"),
        "Documents that match now",
        {200: answer("One page.", _DOCUMENT_PAGE)},
        errors=(404, 415, 501),
        body=request(
            DOCUMENT_QUERY, {"collection": "orders", "where": "doc.total > 3", "limit": 10}, "The query."
        ),
    ),
    place="first",
)
