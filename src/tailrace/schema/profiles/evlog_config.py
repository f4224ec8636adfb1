"""How a stream's `evlog` profile is configured."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from tailrace.schema.body import expect_array, expect_bool, expect_object, expect_string, invalid_request

CONTEXT_KEY: Final = "context"
EVLOG_KEYS: Final = (
    *("timestamp", "level", "service", "environment", "version", "region", "requestId", "traceId", "spanId"),
    *(
        "method",
        "path",
        "status",
        "duration",
        "message",
        "why",
        "fix",
        "link",
        "sampling",
        "redaction",
        CONTEXT_KEY,
    ),
)  # of a stored event, in this order
LIST_MAX: Final = 64
PATH_CHARACTERS_MAX: Final = 256


class EvlogConfig(Struct, frozen=True):
    redact_keys: tuple[str, ...] = ()
    request_id_fields: tuple[str, ...] | None = None
    trace_context_fields: tuple[str, ...] | None = None
    parse_traceparent: bool = True
    traces_stream: str | None = None

    def to_json(self) -> dict[str, object]:
        """What is at its default is left out."""
        shown: dict[str, object] = {"kind": "evlog"}
        if self.redact_keys:
            shown["redactKeys"] = list(self.redact_keys)
        correlation: dict[str, object] = {}
        if self.request_id_fields is not None:
            correlation["requestIdFields"] = list(self.request_id_fields)
        if self.trace_context_fields is not None:
            correlation["traceContextFields"] = list(self.trace_context_fields)
        if not self.parse_traceparent:
            correlation["parseTraceparent"] = False
        if correlation:
            shown["correlation"] = correlation
        if self.traces_stream is not None:
            shown["observability"] = {"request": {"tracesStream": self.traces_stream}}
        return shown


def parse_evlog(body: dict[str, object], path: str) -> EvlogConfig:
    given = expect_object(body, path, ("kind", "redactKeys", "correlation", "observability"))
    correlation = expect_object(
        given.get("correlation", {}),
        f"{path}.correlation",
        ("requestIdFields", "traceContextFields", "parseTraceparent"),
    )
    at = f"{path}.correlation"
    return EvlogConfig(
        redact_keys=tuple(dict.fromkeys(key.lower() for key in _texts(given, "redactKeys", path) or ())),
        request_id_fields=_fields(correlation, "requestIdFields", at, ("requestId",)),
        trace_context_fields=_fields(correlation, "traceContextFields", at, ("traceId", "spanId")),
        parse_traceparent=expect_bool(correlation.get("parseTraceparent", True), f"{at}.parseTraceparent"),
        traces_stream=_traces_stream(given.get("observability", {}), f"{path}.observability"),
    )


def _texts(given: dict[str, object], key: str, path: str) -> tuple[str, ...] | None:
    if key not in given:
        return None
    texts: dict[str, None] = {}
    for index, item in enumerate(expect_array(given[key], f"{path}.{key}", LIST_MAX)):
        at = f"{path}.{key}[{index}]"
        text = expect_string(item, at).strip()
        if not text:
            raise invalid_request(f"{at} must not be empty")
        if len(text) > PATH_CHARACTERS_MAX:
            raise invalid_request(f"{at} must have at most {PATH_CHARACTERS_MAX} characters")
        texts[text] = None
    return tuple(texts)


def _fields(
    given: dict[str, object], key: str, path: str, canonical: tuple[str, ...]
) -> tuple[str, ...] | None:
    """Dotted paths. They lead to what the client sent, not to what the server makes of it."""
    fields = _texts(given, key, path)
    for index, field in enumerate(fields or ()):
        first, dot, rest = field.partition(".")
        elsewhere = first in EVLOG_KEYS and not (first == CONTEXT_KEY and dot) and field not in canonical
        if elsewhere or "" in (first, *(rest.split(".") if dot else ())):
            raise invalid_request(f"{path}.{key}[{index}] must be a path into the event or its context")
    return fields


def _traces_stream(value: object, path: str) -> str | None:
    request = expect_object(value, path, ("request",)).get("request", {})
    given = expect_object(request, f"{path}.request", ("tracesStream",))
    if "tracesStream" not in given:
        return None
    name = expect_string(given["tracesStream"], f"{path}.request.tracesStream").strip()
    if not name:
        raise invalid_request(f"{path}.request.tracesStream must not be empty")
    return name
