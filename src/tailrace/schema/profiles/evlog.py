"""The `evlog` profile: configuration, and normalisation of wide events (one for each request) to one form."""

from __future__ import annotations

import re
from typing import Final, cast

from msgspec import Struct

from tailrace.common.timestamps import TIMESTAMP_MS_MAX, TIMESTAMP_MS_MIN, format_rfc3339_ms, is_date_time
from tailrace.schema.json_values import (
    expect_array,
    expect_bool,
    expect_object,
    expect_string,
    invalid_request,
)
from tailrace.schema.profiles.normalisation import (
    REDACTED,
    SecretKeys,
    redact,
    to_integer,
    to_number,
    to_trimmed,
)

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


EVLOG_SECRETS: Final = frozenset({"password", "token", "secret", "authorization", "cookie", "apikey"})
LEVELS: Final = frozenset({"debug", "info", "warn", "error"})

_RESERVED: Final = frozenset(EVLOG_KEYS)
_INTEGER_TEXT = re.compile(r"[+-]?[0-9]{1,18}")
_NUMBER_TEXT = re.compile(r"[+-]?(?:[0-9]{1,400}(?:\.[0-9]{0,400})?|\.[0-9]{1,400})(?:[eE][+-]?[0-9]{1,4})?")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?", re.IGNORECASE)

EvlogRecord = dict[str, object]


class Evlog:
    """Events of one stream, by its configuration."""

    __slots__ = ("_request_paths", "_secrets", "_span_paths", "_trace_paths", "_traceparent", "config")

    def __init__(self, config: EvlogConfig) -> None:
        self.config = config
        self._secrets = SecretKeys(EVLOG_SECRETS | set(config.redact_keys))
        self._request_paths = None if config.request_id_fields is None else _paths(config.request_id_fields)
        configured = config.trace_context_fields or ()
        self._trace_paths = _paths([path for path in configured if path.endswith(".traceId")])
        self._span_paths = _paths([path for path in configured if path.endswith(".spanId")])
        self._traceparent = config.parse_traceparent and "traceparent" not in self._secrets

    def normalise(self, record: object, now_ms: int) -> EvlogRecord:
        """The canonical event. The record is used up: parts of it may be changed in place."""
        if type(record) is not dict:
            raise invalid_request("evlog record must be an object")
        given = cast("EvlogRecord", record)
        get = given.get
        context = _context(given)
        timestamp = _timestamp(get("timestamp"), now_ms, context)
        # Redact before any field is derived: a secret must not appear elsewhere.
        redacted = redact(context, self._secrets)
        sampling = get("sampling")
        if type(sampling) is not dict:
            sampling = None
        elif sampling:
            redacted += redact(cast("EvlogRecord", sampling), self._secrets, "sampling")
        trace_id, span_id = self._trace(given, context)
        status = _status(get("status"))
        why, fix, link = to_trimmed(get("why")), to_trimmed(get("fix")), to_trimmed(get("link"))
        level = get("level")
        if type(level) is not str or (level := level.strip().lower()) not in LEVELS:
            level = _level(status, why or fix or link)
        return {
            "timestamp": timestamp,
            "level": level,
            "service": to_trimmed(get("service")),
            "environment": to_trimmed(get("environment")),
            "version": to_trimmed(get("version")),
            "region": to_trimmed(get("region")),
            "requestId": self._request_id(given, context),
            "traceId": trace_id,
            "spanId": span_id,
            "method": to_trimmed(get("method")),
            "path": to_trimmed(get("path")),
            "status": status,
            "duration": _duration(get("duration")),
            "message": to_trimmed(get("message")),
            "why": why,
            "fix": fix,
            "link": link,
            "sampling": sampling,
            "redaction": {"keys": redacted},
            "context": context,
        }

    def _request_id(self, given: EvlogRecord, context: EvlogRecord) -> str | None:
        paths = self._request_paths
        if paths is None:
            return to_trimmed(given.get("requestId")) or _shown(context.get("requestId"))
        for path in paths:
            found = to_trimmed(given.get("requestId")) if path == ("requestId",) else _at(context, path)
            if found is not None:
                return found
        return None

    def _trace(self, given: EvlogRecord, context: EvlogRecord) -> tuple[str | None, str | None]:
        trace_id, span_id = _id(given.get("traceId")), _id(given.get("spanId"))
        if trace_id is not None and span_id is not None:
            return trace_id, span_id
        around = context.get("traceContext")
        if type(around) is dict:
            outer = cast("EvlogRecord", around)
            trace_id, span_id = trace_id or _id(outer.get("traceId")), span_id or _id(outer.get("spanId"))
        if trace_id is None:
            trace_id = _first_id(context, self._trace_paths)
        if span_id is None:
            span_id = _first_id(context, self._span_paths)
        if self._traceparent and (trace_id is None or span_id is None):
            parent = _parent(given, context)
            if parent is not None:
                return trace_id or parent[0], span_id or parent[1]
        return trace_id, span_id


def evlog_routing_key(record: EvlogRecord) -> str | None:
    return cast("str | None", record["requestId"] or record["traceId"])


def _paths(fields: list[str] | tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """A path into the context, whether or not it names the context: other keys end up there anyway."""
    return tuple(tuple(path.removeprefix(f"{CONTEXT_KEY}.").split(".")) for path in fields)


def _context(given: EvlogRecord) -> EvlogRecord:
    """What has no place of its own, in one object: an event's own context and its other keys."""
    own = given.get(CONTEXT_KEY)
    if type(own) is dict:
        context = cast("EvlogRecord", own).copy()
    elif own is None:
        context = {}
    else:
        context: EvlogRecord = {CONTEXT_KEY: own}
    for key, value in given.items():
        if key not in _RESERVED:
            context[key] = value
    return context


def _timestamp(value: object, now_ms: int, context: EvlogRecord) -> str:
    """The event's own timestamp, else the server's; an invalid one is stored in the context."""
    if type(value) is str:
        text = value.strip()
        if is_date_time(text):
            return text
        if not text:
            value = None
    elif (ms := to_number(value)) is not None and TIMESTAMP_MS_MIN <= ms <= TIMESTAMP_MS_MAX:
        return format_rfc3339_ms(int(ms // 1))
    if value is not None:
        context["timestamp"] = value
    return format_rfc3339_ms(now_ms)


def _level(status: int | None, explained: str | None) -> str:
    if explained or (status is not None and status >= 500):
        return "error"
    return "warn" if status is not None and status >= 400 else "info"


def _status(value: object) -> int | None:
    if type(value) is str and _INTEGER_TEXT.fullmatch(text := value.strip()):
        return int(text)
    return to_integer(value)


def _duration(value: object) -> int | float | None:
    if type(value) is str:
        text = value.strip()
        if _INTEGER_TEXT.fullmatch(text):
            return int(text)
        if not _NUMBER_TEXT.fullmatch(text):
            return None
        value = float(text)
    return to_number(value)


def _shown(value: object) -> str | None:
    """A text that was not taken away."""
    text = to_trimmed(value)
    return None if text == REDACTED else text


def _at(context: EvlogRecord, path: tuple[str, ...]) -> str | None:
    value = cast("object", context)
    for key in path:
        if type(value) is not dict:
            return None
        value = cast("EvlogRecord", value).get(key)
    return _shown(value)


def _id(value: object) -> str | None:
    """An identifier; one that is all zeros says that there is none."""
    text = _shown(value)
    return text if text is not None and text.strip("0") else None


def _first_id(context: EvlogRecord, paths: tuple[tuple[str, ...], ...]) -> str | None:
    for path in paths:
        if found := _id(_at(context, path)):
            return found
    return None


def _parent(given: EvlogRecord, context: EvlogRecord) -> tuple[str, str] | None:
    """The ids of the first usable W3C `traceparent`."""
    own = given.get(CONTEXT_KEY)
    candidates = (
        given.get("traceparent"),
        _at(context, ("traceContext", "traceparent")),
        cast("EvlogRecord", own).get("traceparent") if type(own) is dict else None,
        _at(context, ("headers", "traceparent")),
    )
    for candidate in candidates:
        if type(candidate) is str and (match := _TRACEPARENT.fullmatch(candidate.strip())):
            trace_id, span_id = match[1].lower(), match[2].lower()
            if trace_id.strip("0") and span_id.strip("0"):
                return trace_id, span_id
    return None
