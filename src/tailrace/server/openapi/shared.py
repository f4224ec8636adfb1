"""Headers and parameters that many operations have, and the shape of an error."""

from __future__ import annotations

from typing import Final

from tailrace.common.errors import ERROR_STATUS
from tailrace.server.openapi.objects import obj
from tailrace.server.openapi.operations import param, query
from tailrace.server.openapi.values import COUNT, INSTANT, STRING, TRUE, Json

OFFSET: Final[Json] = {"type": "string", "pattern": "^[0-7][0-9A-HJKMNP-TV-Z]{25}$"}
WINDOW: Final[Json] = {"type": "string", "pattern": "^(0|[1-9][0-9]{0,15})[smhd]?$"}
WHOLE: Final[Json] = {"type": "integer", "minimum": 0, "maximum": 2**53 - 1}
DATABASE: Final = param(
    "path", "db", "The database.", {"type": "string", "pattern": "^[a-z][a-z0-9_-]{0,62}$"}
)

SCHEMAS: Final[Json] = {
    "Error": obj(
        {
            "error": obj(
                {"code": {"enum": sorted(ERROR_STATUS)}, "message": STRING},
                {
                    "header": STRING,
                    "earliest_offset": OFFSET,
                    "outcome": {"enum": ["unknown", "not_applied"]},
                },
                description="`code` is the thing to test for; some errors have further fields.",
            )
        }
    ),
    "Offset": OFFSET | {"description": "Opaque, 26 characters; orders as text."},
}

_HEADERS: Final[dict[str, tuple[str, Json]]] = {
    "Stream-Next-Offset": ("where to go on from", OFFSET),
    "Stream-End-Offset": ("the tail of the stream", OFFSET),
    "Stream-Earliest-Offset": ("where the stream begins", OFFSET),
    "Stream-Cursor": ("to be sent as `cursor` with the next live read", STRING),
    "Stream-Wait-Limit-Ms": ("the longest wait; the one asked for was longer", COUNT),
    "Stream-Start": (
        "what decided where the answer starts, if the request named more than an offset",
        {"enum": ["last-event-id", "offset", "since"]},
    ),
    "Stream-Up-To-Date": ("the answer reaches the tail", TRUE),
    "Stream-Closed": ("the end of a closed stream: nothing will follow", TRUE),
    "Stream-TTL": ("idle seconds after which the stream expires", COUNT),
    "Stream-Expires-At": ("when the stream expires if nothing happens", INSTANT),
    "Stream-Retention": ("seconds after which entries go", COUNT),
    "Stream-Retention-Bytes": ("newer payload after which entries go", COUNT),
    "Stream-Expected-Seq": ("the last `Stream-Seq` that was accepted", STRING),
    "Stream-Received-Seq": ("the `Stream-Seq` of this request", STRING),
    "Stream-SSE-Data-Encoding": ("how data events are written", {"const": "base64"}),
    "Stream-Filter-Scan-Limit-Reached": ("there is more to examine", TRUE),
    "Stream-Filter-Scan-Limit-Bytes": ("what one answer examines at most", COUNT),
    "Stream-Filter-Scanned-Bytes": ("what this answer has examined", COUNT),
    "Producer-Epoch": ("the producer's current epoch", COUNT),
    "Producer-Seq": ("the highest number accepted", COUNT),
    "Producer-Expected-Seq": ("the number that comes next", COUNT),
    "Producer-Received-Seq": ("the number of this request", COUNT),
    "Preference-Applied": ("the preference that was followed", {"const": "return=representation"}),
    "ETag": ("stands for this very answer", STRING),
    "Cache-Control": ("how long the answer may be kept", STRING),
    "Location": ("where the stream is", {"type": "string", "format": "uri"}),
    "Link": ('the next page, `rel="next"`', STRING),
    "Allow": ("the methods of this path", STRING),
    "Retry-After": ("seconds to wait before the next try", COUNT),
    "WWW-Authenticate": ("what kind of token is wanted", STRING),
    "Upgrade": ("the protocol that is wanted", STRING),
    "Access-Control-Allow-Methods": ("methods that scripts may use", STRING),
    "Access-Control-Allow-Headers": ("headers that scripts may send", STRING),
    "Access-Control-Max-Age": ("seconds for which this may be remembered", COUNT),
}


def header_components() -> Json:
    """Each header twice: as one that may be there, and as one that is always there."""
    found: Json = {}
    for name, (about, shape) in _HEADERS.items():
        found[name] = {"description": about, "schema": shape}
        found[f"{name}-always"] = {"description": about, "schema": shape, "required": True}
    return found


_NAME_ABOUT = (
    "One or more segments joined by `/`, UTF-8, at most 1,024 bytes, without empty, `.` or `..` segments and "
    "without control characters. A slash may be written as it is or as `%2F`."
)

PARAMETERS: Final[Json] = {
    "name": param("path", "name", _NAME_ABOUT, {"type": "string", "minLength": 1, "maxLength": 1024}),
    "key": param("path", "key", "A routing key, one path segment.", {"type": "string", "minLength": 1}),
    "id": param(
        "path",
        "id",
        "One path segment of at most 256 bytes.",
        {"type": "string", "minLength": 1, "maxLength": 256},
    ),
    "offset": query(
        "offset",
        "Read what comes after it: an offset from an answer, `-1` for the start, `now` for the tail.",
        {"anyOf": [{"enum": ["-1", "now"]}, OFFSET]},
    ),
    "since": query(
        "since",
        "Start at the first entry of this time or later: RFC 3339 or Unix nanoseconds. `offset` wins.",
    ),
    "last-event-id": param(
        "header",
        "Last-Event-ID",
        "With `live=sse`: the `id` of the last event that was received. It is used instead of `offset`.",
    ),
    "filter": query(
        "filter",
        "Only entries that match; JSON streams with a search configuration.",
        {"type": "string", "maxLength": 16384},
        example="service:checkout status:>=500 -has:retry",
    ),
    "live": query(
        "live",
        "Wait for what follows: `long-poll` (or `true`), `sse`, `ws`.",
        {"enum": ["long-poll", "true", "1", "sse", "ws", "false", "0", ""]},
    ),
    "timeout": query(
        "timeout", "How long a long-poll waits.", {"type": "string", "pattern": "^[0-9]{1,12}(ms|s|m|h)?$"}
    ),
    "timeout_ms": query(
        "timeout_ms",
        "The same in milliseconds.",
        {"type": "integer", "minimum": 0, "maximum": 999_999_999_999},
    ),
    "cursor": query("cursor", "The `Stream-Cursor` of the last live answer."),
    "format": query(
        "format",
        "An array of JSON, the bytes one after the other, or a table as an Arrow stream.",
        {"enum": ["json", "raw", "arrow"]},
    ),
    "max_bytes": query(
        "max_bytes",
        "Payload of a page with `format=arrow`, at most 4 MiB.",
        {"type": "integer", "minimum": 1, "maximum": 999_999_999_999},
    ),
    "max_entries": query(
        "max_entries",
        "Entries of a page with `format=arrow`.",
        {"type": "integer", "minimum": 1, "maximum": 999_999_999_999},
    ),
    "if-none-match": param("header", "If-None-Match", "The `ETag` of an earlier answer."),
    "stream-key": param(
        "header",
        "Stream-Key",
        "Routing key of the entries.",
        {"type": "string", "minLength": 1, "maxLength": 1024},
    ),
    "stream-timestamp": param(
        "header", "Stream-Timestamp", "The time of the entries: RFC 3339 or Unix nanoseconds."
    ),
    "stream-closed": param(
        "header",
        "Stream-Closed",
        "`true` closes the stream; any other value is as if absent.",
        {"enum": ["true"]},
    ),
}
