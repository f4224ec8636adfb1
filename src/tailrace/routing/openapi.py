"""Building blocks of the rows' OpenAPI descriptions: schemas, parameters, headers, responses.

A schema is a Python type, from which msgspec generates it (the Struct that decodes a request, the TypedDict
of a response), a `Component` for what no type can say, or a JSON Schema with these in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec

from tailrace.common.errors import ERROR_STATUS, RETRY_AFTER_S

Json = dict[str, object]
Schema = Any  # see above

# Types of the fields of responses.
Count = Annotated[int, msgspec.Meta(ge=0)]
# Numbers that may outgrow what scripts can hold travel as text.
CountText = Annotated[str, msgspec.Meta(pattern="^(-1|[0-9]+)$")]
Instant = Annotated[str, msgspec.Meta(extra_json_schema={"format": "date-time"})]
OffsetText = Annotated[str, msgspec.Meta(pattern="^[0-7][0-9A-HJKMNP-TV-Z]{25}$")]
JsonObject = dict[str, Any]


class Component(msgspec.Struct, frozen=True):
    """A named schema that is written by hand."""

    name: str
    schema: Json


STRING: Final[Json] = {"type": "string"}
BOOLEAN: Final[Json] = {"type": "boolean"}
COUNT: Final[Json] = {"type": "integer", "minimum": 0}
COUNT_TEXT: Final[Json] = {"type": "string", "pattern": "^(-1|[0-9]+)$"}
TRUE: Final[Json] = {"const": "true"}
INSTANT: Final[Json] = {"type": "string", "format": "date-time"}
OBJECT: Final[Json] = {"type": "object"}


OFFSET: Final[Json] = {"type": "string", "pattern": "^[0-7][0-9A-HJKMNP-TV-Z]{25}$"}
WINDOW: Final[Json] = {"type": "string", "pattern": "^(0|[1-9][0-9]{0,15})[smhd]?$"}
WHOLE: Final[Json] = {"type": "integer", "minimum": 0, "maximum": 2**53 - 1}


def nullable(shape: Json) -> Json:
    return {**shape, "type": [shape["type"], "null"]}


def obj(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None, **more: object) -> Json:
    """An object schema; further keys are allowed unless `more` forbids them."""
    shape: Json = {"type": "object", "properties": {**required, **(optional or {})}, **more}
    if required:
        shape["required"] = sorted(required)
    return shape


def closed(
    required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None, **more: object
) -> Json:
    """An object schema of a request: unknown keys are refused."""
    return obj(required, optional, additionalProperties=False, **more)


def array(items: Schema, **more: object) -> Json:
    return {"type": "array", "items": items, **more}


def counts(*names: str) -> dict[str, Json]:
    return dict.fromkeys(names, COUNT)


def texts(*names: str) -> dict[str, Json]:
    return dict.fromkeys(names, COUNT_TEXT)


_EXTRA_HEADERS: Final[dict[int, tuple[str, ...]]] = {
    401: ("WWW-Authenticate",),
    403: ("WWW-Authenticate", "Producer-Epoch"),
    405: ("Allow",),
    409: (
        *("Stream-Next-Offset", "Stream-Closed", "Producer-Expected-Seq", "Producer-Received-Seq"),
        *("Stream-Expected-Seq", "Stream-Received-Seq"),
    ),
    410: ("Stream-Earliest-Offset",),
    426: ("Upgrade",),
}


def ref(kind: str, name: str) -> Json:
    return {"$ref": f"#/components/{kind}/{name}"}


def param(
    place: str, name: str, about: str, shape: Json | None = None, *, required: bool = False, **more: object
) -> Json:
    found: Json = {"name": name, "in": place, "description": about, "schema": shape or STRING, **more}
    return found | {"required": True} if required or place == "path" else found


def query(
    name: str, about: str, shape: Json | None = None, *, required: bool = False, **more: object
) -> Json:
    return param("query", name, about, shape, required=required, **more)


def header_param(name: str, about: str, shape: Json | None = None, *, example: str | None = None) -> Json:
    found = param("header", name, about, shape)
    return found if example is None else {**found, "example": example}


def params(*names: str) -> list[Json]:
    """References to shared parameters."""
    return [ref("parameters", name) for name in names]


def headers(*names: str, always: Sequence[str] = ()) -> Json:
    """Headers of a response; those in `always` are required."""
    found: Json = {name: ref("headers", name) for name in names}
    for name in always:
        found[name] = ref("headers", f"{name}-always")
    return found


def answer(about: str, body: Schema | None = None, head: Json | None = None, example: object = None) -> Json:
    """A response, with a JSON body if `body` is given."""
    found: Json = {"description": about}
    if head:
        found["headers"] = head
    if body is not None:
        found["content"] = json_content(body, example)
    return found


def json_content(body: Schema, example: object = None) -> Json:
    return {"application/json": {"schema": body} | ({} if example is None else {"example": example})}


def request(body: Schema, example: object, about: str) -> Json:
    return {"description": about, "required": True, "content": json_content(body, example)}


def refusals(statuses: Iterable[int]) -> Json:
    return {str(status): ref("responses", f"Error{status}") for status in sorted(set(statuses))}


ERROR: Final = Component(
    "Error",
    obj(
        {
            "error": obj(
                {"code": {"enum": sorted(ERROR_STATUS)}, "message": STRING},
                {
                    "header": STRING,
                    "earliest_offset": OFFSET,
                    "outcome": {"enum": ["unknown", "not_applied"]},
                },
                description="Test for `code`; some errors have further fields.",
            )
        }
    ),
)


def error_responses() -> Json:
    """One response for each error status, from the table of codes."""
    by_status: dict[int, list[str]] = {}
    for code, status in ERROR_STATUS.items():
        by_status.setdefault(status, []).append(code)
    found: Json = {}
    for status, codes in sorted(by_status.items()):
        names = [
            *_EXTRA_HEADERS.get(status, ()),
            *(["Retry-After"] if set(codes) & set(RETRY_AFTER_S) else []),
        ]
        about = "Refused: " + ", ".join(f"`{code}`" for code in codes)
        fields = obj({"code": {"enum": codes}, "message": STRING})
        body: Json = {"allOf": [ERROR, obj({"error": fields})]}
        example = {"error": {"code": codes[0], "message": "a readable description of the error"}}
        found[f"Error{status}"] = answer(about, body, headers(*names), example)
        found[f"BareError{status}"] = answer(about, None, headers(*names))
    return found


_HEADERS: Final[dict[str, tuple[str, Json]]] = {
    "Stream-Next-Offset": ("the offset to continue from", OFFSET),
    "Stream-End-Offset": ("the tail of the stream", OFFSET),
    "Stream-Earliest-Offset": ("the offset of the first retained entry", OFFSET),
    "Stream-Cursor": ("send it as `cursor` with the next live read", STRING),
    "Stream-Wait-Limit-Ms": ("the maximum wait, if the requested one was longer", COUNT),
    "Stream-Start": (
        "which parameter decided the start of the page, if the request had several",
        {"enum": ["last-event-id", "offset", "since"]},
    ),
    "Stream-Up-To-Date": ("the response reaches the tail", TRUE),
    "Stream-Closed": ("the end of a closed stream: no entries will follow", TRUE),
    "Stream-TTL": ("idle seconds after which the stream expires", COUNT),
    "Stream-Expires-At": ("when the stream expires if it is not used", INSTANT),
    "Stream-Retention": ("seconds after which entries are trimmed", COUNT),
    "Stream-Retention-Bytes": ("bytes of newer payload after which entries are trimmed", COUNT),
    "Stream-Expected-Seq": ("the last accepted `Stream-Seq`", STRING),
    "Stream-Received-Seq": ("the `Stream-Seq` of this request", STRING),
    "Stream-SSE-Data-Encoding": ("the encoding of data events", {"const": "base64"}),
    "Stream-Filter-Scan-Limit-Reached": (
        "the scan stopped at its limit; continue from `Stream-Next-Offset`",
        TRUE,
    ),
    "Stream-Filter-Scan-Limit-Bytes": ("the maximum bytes scanned for one response", COUNT),
    "Stream-Filter-Scanned-Bytes": ("the bytes scanned for this response", COUNT),
    "Producer-Epoch": ("the producer's current epoch", COUNT),
    "Producer-Seq": ("the highest accepted sequence number", COUNT),
    "Producer-Expected-Seq": ("the next expected sequence number", COUNT),
    "Producer-Received-Seq": ("the sequence number of this request", COUNT),
    "Preference-Applied": ("the preference that was applied", {"const": "return=representation"}),
    "ETag": ("identifies this version of the response", STRING),
    "Cache-Control": ("how long the response may be cached", STRING),
    "Location": ("the URL of the stream", {"type": "string", "format": "uri"}),
    "Link": ('the next page, `rel="next"`', STRING),
    "Allow": ("the methods of this path", STRING),
    "Retry-After": ("seconds to wait before a retry", COUNT),
    "WWW-Authenticate": ("the required kind of token", STRING),
    "Upgrade": ("the required protocol", STRING),
    "Access-Control-Allow-Methods": ("methods that scripts may use", STRING),
    "Access-Control-Allow-Headers": ("headers that scripts may send", STRING),
    "Access-Control-Max-Age": ("seconds for which this may be cached", COUNT),
}


def header_components() -> Json:
    """Each header twice: optional, and required."""
    found: Json = {}
    for name, (about, shape) in _HEADERS.items():
        found[name] = {"description": about, "schema": shape}
        found[f"{name}-always"] = {"description": about, "schema": shape, "required": True}
    return found


_NAME_ABOUT = (
    "One or more segments joined by `/`, UTF-8, at most 1,024 bytes, without empty, `.` or `..` segments and "
    "without control characters. A slash may be written literally or as `%2F`."
)

_SEGMENT: Final[Json] = {"type": "string", "pattern": "^[a-z][a-z0-9_-]{0,62}$"}

PARAMETERS: Final[Json] = {
    "db": param("path", "db", "The database.", _SEGMENT),
    "source": param("path", "source", "The source.", _SEGMENT),
    "collection": param("path", "collection", "An odd number of segments, such as `orders`."),
    "path": param("path", "path", "An even number of segments, such as `orders/o-1`."),
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
        "Read entries after this offset: an offset of a response, `-1` for the start, `now` for the tail.",
        {"anyOf": [{"enum": ["-1", "now"]}, OFFSET]},
    ),
    "since": query(
        "since",
        "Start at the first entry of this time or later, RFC 3339 or Unix nanoseconds; `offset` wins.",
    ),
    "last-event-id": param(
        "header",
        "Last-Event-ID",
        "With `live=sse`: the `id` of the last received event, used instead of `offset`.",
    ),
    "filter": query(
        "filter",
        "Only entries that match; requires a JSON stream with a search configuration.",
        {"type": "string", "maxLength": 16384},
        example="service:checkout status:>=500 -has:retry",
    ),
    "live": query(
        "live",
        "Wait for new entries: `long-poll` (or `true`), `sse`, `ws`.",
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
    "cursor": query("cursor", "The `Stream-Cursor` of the last live response."),
    "format": query(
        "format",
        "A JSON array, the concatenated bytes, or record batches as an Arrow stream.",
        {"enum": ["json", "raw", "arrow"]},
    ),
    "max_bytes": query(
        "max_bytes",
        "Maximum payload bytes of a page with `format=arrow`, at most 4 MiB.",
        {"type": "integer", "minimum": 1, "maximum": 999_999_999_999},
    ),
    "max_entries": query(
        "max_entries",
        "Maximum entries of a page with `format=arrow`.",
        {"type": "integer", "minimum": 1, "maximum": 999_999_999_999},
    ),
    "if-none-match": param("header", "If-None-Match", "The `ETag` of an earlier response."),
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
        "`true` closes the stream; other values are ignored.",
        {"enum": ["true"]},
    ),
}
