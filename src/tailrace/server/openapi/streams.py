"""Streams: create, append, read, describe, delete, list."""

from __future__ import annotations

from typing import Final

from tailrace.server.openapi.components import (
    BOOLEAN,
    COUNT,
    COUNT_TEXT,
    INSTANT,
    OFFSET,
    STRING,
    WHOLE,
    WINDOW,
    Json,
    answer,
    array,
    headers,
    nullable,
    obj,
    operation,
    param,
    params,
    query,
    schema,
)

TAG: Final = "streams"
_LIFETIME: Final = ("Stream-TTL", "Stream-Expires-At", "Stream-Retention", "Stream-Retention-Bytes")
_FILTERED: Final = (
    *("Stream-Filter-Scan-Limit-Reached", "Stream-Filter-Scan-Limit-Bytes", "Stream-Filter-Scanned-Bytes"),
)

SCHEMAS: Final[Json] = {
    "Acknowledgement": obj({"next_offset": OFFSET, "count": COUNT, "closed": BOOLEAN}),
    "Stream": obj(
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
        {"observability": schema("Observability")},
    ),
    "Observability": obj(
        {"request": obj({}, {"events_stream": STRING, "traces_stream": STRING})},
        description="The streams with the events and traces of the same requests.",
    ),
}

_ENTRIES: Final[Json] = {
    "description": "Each element of a JSON array is an entry. Any other body is one entry.",
    "content": {
        "application/json": {"schema": {}, "example": [{"id": 1}, {"id": 2}]},
        "text/plain": {"schema": STRING, "example": "one line\n"},
        "application/octet-stream": {"schema": {}},
    },
}

_EVENTS: Final = (
    'event: data\ndata:[{"id":1}]\nid: 00000000000000000004000000\n\n'
    'event: control\ndata:{"streamNextOffset":"00000000000000000004000000","upToDate":true}\n'
    "id: 00000000000000000004000000\n\n"
)


def stream_paths() -> Json:
    return {
        "/v1/stream/{name}": {
            "parameters": params("name"),
            "put": _create(),
            "post": _append(),
            "get": _read("readStream", "Read entries, at once or live"),
            "head": _describe(),
            "delete": operation(
                "deleteStream",
                TAG,
                "Delete a stream",
                {"204": answer("Deleted, by this request or an earlier one.")},
                (404, 405, 410, 429, 507),
                scope="manage",
            ),
        },
        "/v1/stream/{name}/pk/{key}": {
            "parameters": params("name", "key"),
            "get": _read("readKey", "Read the entries with one routing key"),
        },
        "/v1/streams": {"get": _list()},
    }


def _create() -> Json:
    shown = headers("Stream-Closed", *_LIFETIME, always=("Stream-Next-Offset",))
    created = headers("Stream-Closed", *_LIFETIME, always=("Stream-Next-Offset", "Location"))
    forking = "Create a fork of this stream: `/v1/stream/<name>`."
    return operation(
        "createStream",
        TAG,
        "Create a stream, or confirm its configuration",
        {
            "200": answer("The stream exists with this configuration.", head=shown),
            "201": answer("The stream was created.", head=created),
        },
        (404, 405, 409, 410, 415, 429, 507),
        scope="write",
        parameters=[
            param("header", "Stream-TTL", "Idle time after which the stream expires.", WINDOW, example="7d"),
            param(
                "header",
                "Stream-Expires-At",
                "The time at which the stream expires; not together with a TTL.",
                INSTANT,
                example="2030-01-01T00:00:00Z",
            ),
            param("header", "Stream-Retention", "Entries older than this are trimmed.", WINDOW),
            param(
                "header", "Stream-Retention-Bytes", "Entries with this much newer payload are trimmed.", WHOLE
            ),
            *params("stream-closed", "stream-key", "stream-timestamp"),
            param("header", "Stream-Forked-From", forking, example="/v1/stream/orders"),
            param(
                "header",
                "Stream-Fork-Offset",
                "The position in the source; its tail by default.",
                {"anyOf": [{"enum": ["-1", "now"]}, OFFSET]},
            ),
            param("header", "Stream-Fork-Sub-Offset", "This many messages or bytes after the offset.", WHOLE),
        ],
        body=_ENTRIES,
        more="`Content-Type` is the type of the stream. A fork requires `read` on its source.",
    )


def _append() -> Json:
    done = headers("Stream-Closed", "Producer-Epoch", "Producer-Seq", always=("Stream-Next-Offset",))
    shown = headers(
        *("Stream-Closed", "Producer-Epoch", "Producer-Seq", "Preference-Applied"),
        always=("Stream-Next-Offset",),
    )
    example = {"next_offset": "00000000000000000008000000", "count": 2, "closed": False}
    return operation(
        "append",
        TAG,
        "Append entries, close the stream, or both",
        {
            "200": answer(
                "Durable; with producer headers, or with a representation. Only the latter has a body.",
                schema("Acknowledgement"),
                shown,
                example,
            ),
            "204": answer("Durable, or a duplicate of an append that is.", head=done),
        },
        (404, 405, 409, 410, 415, 429, 507),
        scope="write",
        parameters=[
            *params("stream-key", "stream-timestamp", "stream-closed"),
            param(
                "header",
                "Stream-Seq",
                "Must be greater than the last one, compared as bytes.",
                {"minLength": 1},
            ),
            param(
                "header",
                "Producer-Id",
                "With epoch and sequence number: exactly-once appends.",
                {"minLength": 1},
            ),
            param("header", "Producer-Epoch", "Incremented when the producer restarts.", WHOLE),
            param("header", "Producer-Seq", "The sequence number of this request, from 0.", WHOLE),
            param(
                "header",
                "Prefer",
                "`return=representation` requests a body.",
                example="return=representation",
            ),
        ],
        body=_ENTRIES,
        more="A body requires the `Content-Type` of the stream. `Stream-Closed: true` requires no body.",
    )


def _read(identifier: str, about: str) -> Json:
    common = (
        *("Stream-Closed", "Stream-Earliest-Offset", "Stream-Cursor", "Stream-Start"),
        *("ETag", "Cache-Control", *_FILTERED),
    )
    page = headers(
        *common, "Stream-Next-Offset", "Stream-End-Offset", "Stream-Up-To-Date", "Stream-SSE-Data-Encoding"
    )
    idle = headers(
        *("Stream-Closed", "Stream-Cursor", "Stream-Start", "Stream-Up-To-Date", "Stream-Earliest-Offset"),
        "Stream-Wait-Limit-Ms",
        always=("Stream-Next-Offset", "Stream-End-Offset"),
    )
    same = headers(*common, "Stream-Up-To-Date", always=("Stream-Next-Offset", "Stream-End-Offset"))
    found = answer(
        "Entries after the offset; with `live=sse` events until the server ends the response.", head=page
    )
    found["content"] = {
        "application/json": {"schema": array({}), "example": [{"id": 1}, {"id": 2}]},
        "text/event-stream": {"example": _EVENTS},
        "application/vnd.apache.arrow.stream": {},
        "*/*": {},
    }
    keyed = [] if identifier == "readKey" else [query("key", "Only entries with this routing key.")]
    return operation(
        identifier,
        TAG,
        about,
        {
            "200": found,
            "204": answer("No new entries during a long-poll, or the stream is closed.", head=idle),
            "304": answer("Not modified.", head=same),
        },
        (404, 410, 426, 429),
        scope="read",
        parameters=[
            *params("offset", "since", "filter", "live", "timeout", "timeout_ms", "cursor", "format"),
            *params("max_bytes", "max_entries"),
            *keyed,
            *params("if-none-match", "last-event-id"),
        ],
        more="A live read requires `offset` or `since`. With `live=ws` the connection becomes a WebSocket.",
    )


def _describe() -> Json:
    shown = headers(
        *("Stream-Closed", *_LIFETIME),
        always=("Stream-Next-Offset", "Stream-End-Offset", "Stream-Earliest-Offset"),
    )
    return operation(
        "describeStream",
        TAG,
        "Content type, tail and lifetime; does not renew the TTL",
        {"200": answer("The stream exists; `Content-Type` is its type.", head=shown)},
        (404, 410, 429),
        scope="read",
    )


def _list() -> Json:
    return operation(
        "listStreams",
        TAG,
        "List streams in byte order of their names",
        {"200": answer("A page of descriptors.", array(schema("Stream")), headers("Link"))},
        scope="read",
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
    )
