"""The `otel-traces` profile: normalisation of spans, semantic conventions and redaction of attributes.

Old and new attribute names of the OpenTelemetry conventions are accepted. Before a span is stored, secrets,
statements and query strings are removed and the rest is bounded, in all attribute maps of the span alike, so
that a value removed in one place cannot appear in another.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple, cast

from tailrace.common.timestamps import parse_rfc3339_ns
from tailrace.schema.json_values import invalid_request
from tailrace.schema.profiles.normalisation import (
    PATH_CHARACTERS_MAX,
    PATHS_MAX,
    REDACTED,
    to_integer,
    to_number,
    to_trimmed,
)
from tailrace.schema.profiles.otlp_export import OtelConfig
from tailrace.schema.timestamps import TIMESTAMP_MS_MAX

Record = dict[str, object]
AttributeNames = Sequence[str]

REQUEST_ID_ATTRIBUTES: Final = (
    "request.id",
    "http.request_id",
    "http.request.header.x_request_id",
    "http.request.header.x-request-id",
    "http.request.header.x_correlation_id",
    "http.request.header.x-correlation-id",
    "correlation.id",
)
RESOURCE_ATTRIBUTES: Final[Mapping[str, AttributeNames]] = {
    "service": ("service.name",),
    "serviceNamespace": ("service.namespace",),
    "serviceInstanceId": ("service.instance.id",),
    "environment": ("deployment.environment.name", "deployment.environment"),
    "version": ("service.version",),
    "region": ("cloud.region",),
}
HTTP_ATTRIBUTES: Final[Mapping[str, AttributeNames]] = {
    "method": ("http.request.method", "http.method"),
    "route": ("http.route",),
    "path": ("url.path", "http.path"),
    "target": ("http.target",),
    "url": ("url.full", "http.url"),
    "statusCode": ("http.response.status_code", "http.status_code"),
    "userAgent": ("user_agent.original", "http.user_agent"),
}
DB_ATTRIBUTES: Final[Mapping[str, AttributeNames]] = {
    "system": ("db.system.name", "db.system"),
    "name": ("db.namespace", "db.name"),
    "operation": ("db.operation.name", "db.operation"),
    "statement": ("db.query.text", "db.statement"),
}
RPC_ATTRIBUTES: Final[Mapping[str, AttributeNames]] = {
    "system": ("rpc.system.name", "rpc.system"),
    "service": ("rpc.service",),
    "method": ("rpc.method",),
}
MESSAGING_ATTRIBUTES: Final[Mapping[str, AttributeNames]] = {
    "system": ("messaging.system",),
    "destination": ("messaging.destination.name", "messaging.destination"),
    "operation": ("messaging.operation.type", "messaging.operation.name", "messaging.operation"),
}
ERROR_ATTRIBUTES: Final[Mapping[str, AttributeNames]] = {
    "type": ("error.type", "exception.type"),
    "message": ("exception.message", "error.message"),
    "stacktrace": ("exception.stacktrace",),
}

_INTEGER_TEXT = re.compile(r"[+-]?[0-9]{1,18}")
_PATH = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]{0,31}://[^/?#]*([^?#]*)")


def attribute_names(group: Mapping[str, AttributeNames]) -> frozenset[str]:
    """All attributes that a group is made of."""
    return frozenset(name for names in group.values() for name in names)


def first_text(attributes: Record, names: AttributeNames) -> str | None:
    """The first of these attributes that is a text; of a list (headers are lists) its first item."""
    for name in names:
        value = attributes.get(name)
        if value is None:
            continue
        if type(value) is list:
            items = cast("list[object]", value)
            value = items[0] if items else None
        text = str(value) if type(value) is int else to_trimmed(cast("object", value))
        if text is not None and text != REDACTED:
            return text
    return None


def parse_whole_number(value: object) -> int | None:
    if type(value) is str and _INTEGER_TEXT.fullmatch(text := value.strip()):
        return int(text)
    return to_integer(value)


def first_number(attributes: Record, names: AttributeNames) -> int | None:
    for name in names:
        found = parse_whole_number(attributes.get(name))
        if found is not None:
            return found
    return None


def url_path(target: str | None, url: str | None) -> str | None:
    """The path that a target or a URL names."""
    if target is not None and target.startswith("/"):
        return target.partition("?")[0].partition("#")[0] or None
    if url is not None and (match := _PATH.match(url)):
        return match[1] or "/"
    return None


OTEL_SECRETS: Final = frozenset(
    {"password", "token", "secret", "authorization", "cookie"}
    | {"apikey", "api_key", "set_cookie", "x_api_key"}
)
STATEMENTS: Final = frozenset({"db.statement", "db.query.text", "db.query.parameter", "db.query.parameters"})
_PARAMETER: Final = "db.query.parameter."
QUERIES: Final = frozenset({"url.query", "url.fragment"})
# Values that are a path with a query behind it, without a scheme in front.
TARGETS: Final = frozenset({"http.target", "url.path", "url.original", "http.path", "http.url", "url.full"})
DEPTH_MAX: Final = 32  # of a value inside a value
KEY_CHARACTERS_CACHED: Final = 100
KEYS_CACHED_MAX: Final = 4096

PLAIN, TARGET, SECRET, DROPPED = range(4)  # what becomes of an attribute, by its key

_URL_END = re.compile(r"[\s\"'<>]")
_QUERY = re.compile(r"[?#]")

Attributes = dict[str, object]


class AttributeCleaner:
    """Cleans the parts of one span after the other, and remembers where it took secrets away."""

    __slots__ = ("_bytes_max", "_count_max", "_drops_queries", "_fates", "found")

    def __init__(self, config: OtelConfig, fates: AttributeRules) -> None:
        self._fates = fates
        self._bytes_max = config.attribute_limits.max_attribute_value_bytes
        self._count_max = config.attribute_limits.max_attributes_per_span
        self._drops_queries = fates.drops_queries
        self.found: set[str] = set()

    def attributes(self, value: object, place: str) -> tuple[Attributes, int]:
        """A map as it is stored, and how many of its members had to go for want of room."""
        if type(value) is not dict:
            return {}, 0
        given = cast("Attributes", value)
        kept: Attributes = {}
        fate_of = self._fates.rule_for
        cut = 0
        for key, item in given.items():
            if item is None or not key:
                continue
            if len(kept) >= self._count_max:
                cut += 1
                continue
            fate = fate_of(key)
            if fate == PLAIN and type(item) is str:
                kept[key] = self._plain(item)
            elif fate != DROPPED:
                kept[key] = self._value(key, fate, item, place, 0)
        return kept, cut

    def text(self, value: object) -> str | None:
        """Text of a span that is no attribute."""
        if type(value) is not str:
            return None
        return self._plain(value) or None

    def _plain(self, text: str) -> str:
        if self._drops_queries and "://" in text:
            text = strip_url_queries(text)
        return text if len(text) * 4 <= self._bytes_max else truncate_utf8(text, self._bytes_max)

    def target(self, text: str | None) -> str | None:
        """A path or a URL, without what follows its path."""
        return _QUERY.split(text, 1)[0] if text is not None and self._drops_queries else text

    def _value(self, key: str, fate: int, item: object, place: str, depth: int) -> object:
        if fate == SECRET:
            if len(self.found) < PATHS_MAX:
                self.found.add(f"{place}.{key}"[:PATH_CHARACTERS_MAX])
            return REDACTED
        return self._cleaned(fate, item, f"{place}.{key}", depth)

    def _cleaned(self, fate: int, item: object, place: str, depth: int) -> object:
        if type(item) is str:
            if fate == TARGET:
                return truncate_utf8(self.target(item) or "", self._bytes_max)
            return self._plain(item)
        if type(item) is list:
            items = cast("list[object]", item)
            if depth > DEPTH_MAX:
                return None
            return [self._cleaned(fate, one, place, depth + 1) for one in items]
        if type(item) is dict:
            members = cast("Attributes", item)
            if depth > DEPTH_MAX:
                return None
            fates = ((name, self._fates.rule_for(name), one) for name, one in members.items())
            return {
                name: self._value(name, inner, one, place[:PATH_CHARACTERS_MAX], depth + 1)
                for name, inner, one in fates
                if inner != DROPPED
            }
        return item


class AttributeRules:
    """What becomes of attributes, by their keys. Spans of one service have the same few keys."""

    __slots__ = ("_drops_statements", "_known", "_secrets", "drops_queries")

    def __init__(self, config: OtelConfig) -> None:
        self._secrets = configured_secrets(config)
        self._drops_statements = config.db_statement_mode == "drop"
        self.drops_queries = config.url_mode == "drop_query"
        self._known: dict[str, int] = {}

    def rule_for(self, key: str) -> int:
        fate = self._known.get(key)
        if fate is None:
            fate = self._fate(key)
            if len(key) <= KEY_CHARACTERS_CACHED:
                if len(self._known) >= KEYS_CACHED_MAX:
                    self._known.clear()
                self._known[key] = fate
        return fate

    def _fate(self, key: str) -> int:
        name = key.lower()
        if self._drops_statements and (name in STATEMENTS or name.startswith(_PARAMETER)):
            return DROPPED
        if self.drops_queries and name in QUERIES:
            return DROPPED
        if is_secret(key, self._secrets):
            return SECRET
        return TARGET if self.drops_queries and name in TARGETS else PLAIN


def configured_secrets(config: OtelConfig) -> frozenset[str]:
    return OTEL_SECRETS | {key.replace("-", "_") for key in config.redact_keys}


def is_secret(key: str, secrets: frozenset[str]) -> bool:
    """Whether a name, or what follows its last dot, dash or underscore, is one of a secret."""
    name = key.lower()
    plain = name.replace("-", "_")
    if plain in secrets or plain.rpartition(".")[2] in secrets:
        return True
    return name.rpartition("-")[2] in secrets or plain.rpartition("_")[2] in secrets


def strip_url_queries(text: str) -> str:
    """The text with every URL in it cut behind its path, in one pass."""
    at = text.find("://")
    if at < 0:
        return text
    pieces: list[str] = []
    copied = 0
    while at >= 0:
        ends = _URL_END.search(text, at)
        end = len(text) if ends is None else ends.start()
        query = _QUERY.search(text, at, end)
        if query is not None:
            pieces.append(text[copied : query.start()])
            copied = end
        at = text.find("://", end)
    pieces.append(text[copied:])
    return "".join(pieces)


def truncate_utf8(text: str, bytes_max: int) -> str:
    """As much of the text as fits, whole characters only."""
    if len(text) * 4 <= bytes_max:
        return text
    encoded = text.encode("utf-8", "surrogatepass")
    if len(encoded) <= bytes_max:
        return text
    return encoded[:bytes_max].decode("utf-8", "ignore")


NANO_MAX: Final = 2**64 - 1
KINDS: Final = ("unspecified", "internal", "server", "client", "producer", "consumer")
STATUSES: Final = ("unset", "ok", "error")

_TRACE_ID = re.compile(r"[0-9a-f]{32}")
_SPAN_ID = re.compile(r"[0-9a-f]{16}")
_NANOS = re.compile(r"[0-9]{1,20}")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NONE: Final[dict[str, object]] = {}
_KNOWN: Final = {
    "http": attribute_names(HTTP_ATTRIBUTES),
    "db": attribute_names(DB_ATTRIBUTES),
    "rpc": attribute_names(RPC_ATTRIBUTES),
    "messaging": attribute_names(MESSAGING_ATTRIBUTES),
    "error": attribute_names(ERROR_ATTRIBUTES),
}


class OtelSpans:
    """Spans of one stream, by its configuration."""

    __slots__ = ("_fates", "_request_ids", "_shared", "config")

    def __init__(self, config: OtelConfig) -> None:
        self.config = config
        self._fates = AttributeRules(config)
        configured = config.request_id_attributes
        self._request_ids = REQUEST_ID_ATTRIBUTES if configured is None else configured
        self._shared: dict[str, SharedAttributes] = {}  # the resource and the scope that were seen last

    def normalise(self, record: object, now_ms: int) -> Record:
        """The canonical span. Spans have their own timestamps: the server's time is not used."""
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
        around = {name: self._own(name, self.resource, names) for name, names in RESOURCE_ATTRIBUTES.items()}
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
            or first_text(self.resource, request_ids),
            "http": http,
            "db": self._db(),
            "rpc": self._group("rpc", RPC_ATTRIBUTES),
            "messaging": self._group("messaging", MESSAGING_ATTRIBUTES),
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

    # -- fields derived from attributes ---------------------------------------------------------------------

    def _own(self, name: str, attributes: Record, names: AttributeNames) -> str | None:
        return self._text(self.given.get(name)) or first_text(attributes, names)

    def _group(self, group: str, names: Mapping[str, AttributeNames]) -> Record:
        given, attributes = _object(self.given.get(group)), self.attributes
        if attributes.keys().isdisjoint(_KNOWN[group]):
            attributes = _NONE
        if not given:
            return {name: first_text(attributes, known) for name, known in names.items()}
        return {
            name: self._text(given.get(name)) or first_text(attributes, known)
            for name, known in names.items()
        }

    def _http(self) -> Record:
        given = _object(self.given.get("http"))
        http = self._group("http", HTTP_ATTRIBUTES)
        for name in ("target", "url", "path"):
            http[name] = self.clean.target(cast("str | None", http[name]))
        if http["path"] is None:
            target, url = cast("str | None", http["target"]), cast("str | None", http["url"])
            http["path"] = url_path(target, url)
        status = parse_whole_number(given.get("statusCode"))
        if status is None:
            status = first_number(self.attributes, HTTP_ATTRIBUTES["statusCode"])
        http["statusCode"] = status
        return http

    def _db(self) -> Record:
        db = self._group("db", DB_ATTRIBUTES)
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
        error = self._group("error", ERROR_ATTRIBUTES)
        for event in events:
            attributes = cast("Record", event["attributes"])
            for name, names in ERROR_ATTRIBUTES.items():
                error[name] = error[name] or first_text(attributes, names)
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
