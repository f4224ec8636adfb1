"""One span, in one form whoever sent it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple, cast

from tailrace.common.timestamps import parse_rfc3339_ns
from tailrace.schema.body import invalid_request
from tailrace.schema.profiles import semantics
from tailrace.schema.profiles.cleaning import AttributeCleaner, AttributeRules, truncate_utf8
from tailrace.schema.profiles.config import OtelConfig
from tailrace.schema.profiles.redaction import PATH_CHARACTERS_MAX, PATHS_MAX
from tailrace.schema.profiles.values import to_integer, to_number, to_trimmed
from tailrace.schema.timestamps import TIMESTAMP_MS_MAX

NANO_MAX: Final = 2**64 - 1
KINDS: Final = ("unspecified", "internal", "server", "client", "producer", "consumer")
STATUSES: Final = ("unset", "ok", "error")

_TRACE_ID = re.compile(r"[0-9a-f]{32}")
_SPAN_ID = re.compile(r"[0-9a-f]{16}")
_NANOS = re.compile(r"[0-9]{1,20}")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NONE: Final[dict[str, object]] = {}
_KNOWN: Final = {
    "http": semantics.attribute_names(semantics.HTTP_ATTRIBUTES),
    "db": semantics.attribute_names(semantics.DB_ATTRIBUTES),
    "rpc": semantics.attribute_names(semantics.RPC_ATTRIBUTES),
    "messaging": semantics.attribute_names(semantics.MESSAGING_ATTRIBUTES),
    "error": semantics.attribute_names(semantics.ERROR_ATTRIBUTES),
}

Record = dict[str, object]


class OtelSpans:
    """Spans of one stream, by its configuration."""

    __slots__ = ("_fates", "_request_ids", "_shared", "config")

    def __init__(self, config: OtelConfig) -> None:
        self.config = config
        self._fates = AttributeRules(config)
        configured = config.request_id_attributes
        self._request_ids = semantics.REQUEST_ID_ATTRIBUTES if configured is None else configured
        self._shared: dict[str, SharedAttributes] = {}  # the resource and the scope that were seen last

    def normalise(self, record: object, now_ms: int) -> Record:
        """The canonical span. A span brings its own times, so the server's is not asked for."""
        if type(record) is not dict:
            raise invalid_request("otel-traces record must be an object")
        given, cleaner = cast("Record", record), AttributeCleaner(self.config, self._fates)
        resource = self._cleaned(_object(given.get("resource")), "resource.attributes", cleaner)
        scope = self._cleaned(
            _object(given.get("instrumentationScope")), "instrumentationScope.attributes", cleaner
        )
        return _Span(given, self.config, cleaner, resource, scope).canonical(self._request_ids)

    def _cleaned(self, holder: Record, place: str, cleaner: AttributeCleaner) -> Record:
        """Attributes that many spans of an export share are one object, and are cleaned once."""
        attributes = holder.get("attributes")
        last = self._shared.get(place)
        if last is not None and last.given is attributes:
            cleaner.found |= last.found
            return last.attributes
        own = AttributeCleaner(self.config, self._fates)
        kept, _ = own.attributes(attributes, place)
        cleaner.found |= own.found
        if attributes:
            self._shared[place] = SharedAttributes(attributes, kept, own.found)
        return kept


def span_routing_key(record: Record) -> str:
    return cast("str", record["traceId"])


class SharedAttributes(NamedTuple):
    """Attributes as they were given, as they are stored, and where secrets were."""

    given: object
    attributes: Record
    found: set[str]


class _Span:
    """A record on its way to the canonical form. What the record says itself wins over its attributes."""

    def __init__(
        self, given: Record, config: OtelConfig, cleaner: AttributeCleaner, resource: Record, scope: Record
    ) -> None:
        self.given = given
        self.config = config
        self.clean = cleaner
        self.resource = resource
        self.scope = scope
        self.attributes, self.cut = cleaner.attributes(given.get("attributes"), "attributes")

    def canonical(self, request_ids: tuple[str, ...]) -> Record:
        given, clean, config = self.given, self.clean, self.config
        trace_id, span_id, parent_id = self._ids()
        start, end = self._times()
        resource, scope = _object(given.get("resource")), _object(given.get("instrumentationScope"))
        events, events_cut = self._events()
        links, links_cut = self._links()
        status = self._status()
        http = self._http()
        error = self._error(status, http, events)
        around = {
            name: self._own(name, self.resource, names)
            for name, names in semantics.RESOURCE_ATTRIBUTES.items()
        }
        name = self._text(given.get("name")) or ""
        redacted = sorted(clean.found | set(_texts(_object(given.get("redaction")).get("keys"))))
        dropped = _object(given.get("dropped"))
        start_text = str(start)
        parts = (trace_id, span_id, start_text, around["service"] or "", name)
        identity = "\0".join(parts).encode("utf-8", "surrogatepass")
        return {
            "schemaVersion": 1,
            "signal": "trace.span",
            "timestamp": _instant(start),
            "endTimestamp": _instant(end),
            "startUnixNano": start_text,
            "endUnixNano": str(end),
            "duration": max(0, end - start) / 1_000_000,
            "traceId": trace_id,
            "spanId": span_id,
            "parentSpanId": parent_id,
            "traceState": self._text(given.get("traceState")),
            "traceFlags": self._flags(),
            "name": name,
            "kind": _named(given.get("kind"), KINDS, "SPAN_KIND_"),
            "status": status,
            **around,
            "requestId": self._own("requestId", self.attributes, request_ids)
            or semantics.first_text(self.resource, request_ids),
            "http": http,
            "db": self._db(),
            "rpc": self._group("rpc", semantics.RPC_ATTRIBUTES),
            "messaging": self._group("messaging", semantics.MESSAGING_ATTRIBUTES),
            "error": error,
            "instrumentationScope": {
                "name": self._text(scope.get("name")),
                "version": self._text(scope.get("version")),
                "schemaUrl": self._text(scope.get("schemaUrl")),
                "attributes": self.scope,
            },
            "resource": {
                "schemaUrl": self._text(resource.get("schemaUrl")),
                "attributes": self.resource if config.store.raw_resource_attributes else {},
            },
            "attributes": self.attributes if config.store.raw_span_attributes else {},
            "events": events if config.store.raw_events else [],
            "eventNames": self._event_names(events),
            "links": links if config.store.raw_links else [],
            "dropped": {
                "attributes": _count(dropped.get("attributes")) + self.cut,
                "events": _count(dropped.get("events")) + events_cut,
                "links": _count(dropped.get("links")) + links_cut,
            },
            "redaction": {"keys": redacted[:PATHS_MAX]},
            "identity": {
                "spanKey": f"{trace_id}:{span_id}",
                "dedupeKey": hashlib.sha256(identity).hexdigest(),
            },
        }

    # -- what every span has ------------------------------------------------------------------------------

    def _ids(self) -> tuple[str, str, str | None]:
        given = self.given
        trace_id = _id(given.get("traceId"), _TRACE_ID)
        if trace_id is None:
            raise invalid_request("otel-traces record.traceId must be 32 hex digits that are not all zero")
        span_id = _id(given.get("spanId"), _SPAN_ID)
        if span_id is None:
            raise invalid_request("otel-traces record.spanId must be 16 hex digits that are not all zero")
        parent = given.get("parentSpanId")
        parent_id = _id(parent, _SPAN_ID)
        if parent_id is None and parent not in (None, ""):
            raise invalid_request(
                "otel-traces record.parentSpanId must be 16 hex digits that are not all zero"
            )
        return trace_id, span_id, parent_id

    def _times(self) -> tuple[int, int]:
        given = self.given
        start = _time(given.get("startUnixNano"), given.get("startTimeUnixNano"), given.get("timestamp"))
        if start is None:
            raise invalid_request("otel-traces record.startUnixNano must be a time in nanoseconds")
        end = _time(given.get("endUnixNano"), given.get("endTimeUnixNano"), given.get("endTimestamp"))
        if end is None:
            lasted_ms = to_number(given.get("duration"))
            end = start if lasted_ms is None or lasted_ms < 0 else start + int(min(lasted_ms, 1e12) * 1e6)
        return start, min(end, NANO_MAX)

    def _flags(self) -> Record:
        flags = self.given.get("traceFlags", self.given.get("flags"))
        given = to_integer(_object(cast("object", flags)).get("raw") if type(flags) is dict else flags)
        raw = None if given is None or not 0 <= given < 2**32 else given
        return {"sampled": None if raw is None else bool(raw & 1), "raw": raw}

    def _status(self) -> Record:
        given = _object(self.given.get("status"))
        return {
            "code": _named(given.get("code"), STATUSES, "STATUS_CODE_"),
            "message": self._text(given.get("message")),
        }

    # -- what its attributes tell ---------------------------------------------------------------------------

    def _own(self, name: str, attributes: Record, names: semantics.AttributeNames) -> str | None:
        return self._text(self.given.get(name)) or semantics.first_text(attributes, names)

    def _group(self, group: str, names: Mapping[str, semantics.AttributeNames]) -> Record:
        given, attributes = _object(self.given.get(group)), self.attributes
        if attributes.keys().isdisjoint(_KNOWN[group]):
            attributes = _NONE
        if not given:
            return {name: semantics.first_text(attributes, known) for name, known in names.items()}
        return {
            name: self._text(given.get(name)) or semantics.first_text(attributes, known)
            for name, known in names.items()
        }

    def _http(self) -> Record:
        given = _object(self.given.get("http"))
        http = self._group("http", semantics.HTTP_ATTRIBUTES)
        for name in ("target", "url", "path"):
            http[name] = self.clean.target(cast("str | None", http[name]))
        if http["path"] is None:
            target, url = cast("str | None", http["target"]), cast("str | None", http["url"])
            http["path"] = semantics.url_path(target, url)
        status = semantics.parse_whole_number(given.get("statusCode"))
        if status is None:
            status = semantics.first_number(self.attributes, semantics.HTTP_ATTRIBUTES["statusCode"])
        http["statusCode"] = status
        return http

    def _db(self) -> Record:
        db = self._group("db", semantics.DB_ATTRIBUTES)
        statement = cast("str | None", db["statement"])
        if self.config.db_statement_mode == "drop":
            statement = None
        elif statement is not None:
            statement = (
                truncate_utf8(statement, self.config.attribute_limits.max_statement_bytes).strip() or None
            )
        db["statement"] = statement
        return db

    def _error(self, status: Record, http: Record, events: list[Record]) -> Record:
        error = self._group("error", semantics.ERROR_ATTRIBUTES)
        for event in events:
            told = cast("Record", event["attributes"])
            for name, names in semantics.ERROR_ATTRIBUTES.items():
                error[name] = error[name] or semantics.first_text(told, names)
        failed = status["code"] == "error"
        if failed and error["message"] is None:
            error["message"] = status["message"]
        answered = cast("int | None", http["statusCode"]) or 0
        is_error = failed or answered >= 500 or error["type"] is not None
        return {"isError": is_error, **error}

    # -- events and links -----------------------------------------------------------------------------------

    def _events(self) -> tuple[list[Record], int]:
        given, cut = _bounded(self.given.get("events"), self.config.attribute_limits.max_events_per_span)
        events: list[Record] = []
        for index, event in enumerate(given):
            attributes, lost = self.clean.attributes(event.get("attributes"), f"events.{index}.attributes")
            at = _time(event.get("timeUnixNano"), None, event.get("timestamp"))
            events.append(
                {
                    "name": self._text(event.get("name")) or "",
                    "timestamp": None if at is None else _instant(at),
                    "timeUnixNano": None if at is None else str(at),
                    "attributes": attributes,
                    "droppedAttributes": _count(event.get("droppedAttributes")) + lost,
                }
            )
        return events, cut

    def _event_names(self, events: list[Record]) -> list[str]:
        if events:
            return [cast("str", event["name"]) for event in events]
        most = self.config.attribute_limits.max_events_per_span
        return [self._text(name) or "" for name in _texts(self.given.get("eventNames"))[:most]]

    def _links(self) -> tuple[list[Record], int]:
        given, cut = _bounded(self.given.get("links"), self.config.attribute_limits.max_links_per_span)
        links: list[Record] = []
        for index, link in enumerate(given):
            trace_id, span_id = _id(link.get("traceId"), _TRACE_ID), _id(link.get("spanId"), _SPAN_ID)
            if trace_id is None or span_id is None:
                raise invalid_request(f"otel-traces record.links[{index}] must have a traceId and a spanId")
            attributes, lost = self.clean.attributes(link.get("attributes"), f"links.{index}.attributes")
            links.append(
                {
                    "traceId": trace_id,
                    "spanId": span_id,
                    "traceState": self._text(link.get("traceState")),
                    "attributes": attributes,
                    "droppedAttributes": _count(link.get("droppedAttributes")) + lost,
                }
            )
        return links, cut

    def _text(self, value: object) -> str | None:
        return None if value is None else to_trimmed(self.clean.text(to_trimmed(value)))


def _instant(ns: int) -> str:
    """With milliseconds. The times of spans end in the year 2554, long before those of the calendar."""
    return (_EPOCH + timedelta(milliseconds=ns // 1_000_000)).isoformat(timespec="milliseconds")[:-6] + "Z"


def _object(value: object) -> Record:
    return cast("Record", value) if type(value) is dict else {}


def _bounded(value: object, most: int) -> tuple[list[Record], int]:
    items = cast("list[object]", value) if type(value) is list else []
    return [_object(item) for item in items[:most]], max(0, len(items) - most)


def _texts(value: object) -> list[str]:
    items = cast("list[object]", value) if type(value) is list else []
    return [item[:PATH_CHARACTERS_MAX] for item in items if type(item) is str]


def _count(value: object) -> int:
    found = to_integer(value)
    return found if found is not None and 0 <= found < 2**53 else 0


def _id(value: object, form: re.Pattern[str]) -> str | None:
    """An identifier in hex; one that is all zeros is none."""
    if type(value) is not str:
        return None
    text = value.strip().lower()
    return text if form.fullmatch(text) and text.strip("0") else None


def _named(value: object, names: tuple[str, ...], prefix: str) -> str:
    """A name, whether given as one, as a constant of the protocol or by its number."""
    if type(value) is int:
        return names[value] if 0 <= value < len(names) else names[0]
    if type(value) is not str:
        return names[0]
    text = value.strip()
    name = text.upper().removeprefix(prefix).lower()
    return name if name in names else names[0]


def _time(nanos: object, same: object, moment: object) -> int | None:
    """Nanoseconds since 1970: by one of two names, or as an instant in words or milliseconds."""
    for value in (nanos, same):
        found = int(value) if type(value) is str and _NANOS.fullmatch(value) else value
        if type(found) is int and 0 <= found <= NANO_MAX:
            return found
    if type(moment) is str:
        found = parse_rfc3339_ns(moment.strip())
    else:
        ms = to_number(moment)
        found = None if ms is None or not 0 <= ms <= TIMESTAMP_MS_MAX else int(ms * 1_000_000)
    return found if found is not None and 0 <= found <= NANO_MAX else None
