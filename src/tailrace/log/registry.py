"""`__registry__`: the life of every stream, as state messages on a stream of its own."""

from __future__ import annotations

import orjson

from tailrace.limits import Limits
from tailrace.log.model import NO_LIFETIME, Lifetime, Stream
from tailrace.log.records import Append, Create
from tailrace.protocol.content_types import DEFAULT
from tailrace.protocol.durations import format_instant

NAME = "__registry__"


def is_listed(name: str) -> bool:
    """Streams of the server itself do not appear in the registry."""
    return not name.startswith("__") and not name.startswith("hub/")


def lifetime(limits: Limits) -> Lifetime:
    """Its bounds are a setting of the server, and may be others after a restart."""
    age_ms, size_bytes = limits.registry_retention_ms, limits.registry_retention_bytes
    if not age_ms and not size_bytes:
        return NO_LIFETIME
    return Lifetime(retention_s=-(-age_ms // 1000) or None, retention_bytes=size_bytes or None)


def inserted(registry: Stream, create: Create, content_type: str | None, closed: bool) -> Append:
    value = _value(create.name, content_type, create.created_ns, closed)
    return _event(registry, create.name, "insert", value, create.created_ns)


def updated(registry: Stream, stream: Stream, content_type: str | None, closed: bool, now_ns: int) -> Append:
    value = _value(stream.name, content_type, stream.created_ns, closed)
    return _event(registry, stream.name, "update", value, now_ns)


def deleted(registry: Stream, name: str, reason: str, now_ns: int) -> Append:
    return _event(registry, name, "delete", None, now_ns, reason)


def present(stream: Stream, now_ns: int) -> bytes:
    """The message for a stream that exists, as a snapshot has it."""
    value = _value(stream.name, stream.content_type, stream.created_ns, stream.visible_closed)
    headers = {"operation": "insert", "timestamp": format_instant(now_ns)}
    return orjson.dumps({"type": "stream", "key": stream.name, "value": value, "headers": headers})


def _value(name: str, content_type: str | None, created_ns: int, closed: bool) -> dict[str, object]:
    return {
        "path": name,
        "contentType": content_type or DEFAULT,
        "createdAt": created_ns // 1_000_000,
        "closed": closed,
    }


def _event(
    registry: Stream,
    name: str,
    operation: str,
    value: dict[str, object] | None,
    now_ns: int,
    reason: str | None = None,
) -> Append:
    headers = {"operation": operation, "timestamp": format_instant(now_ns)}
    if reason is not None:
        headers["reason"] = reason
    message: dict[str, object] = {"type": "stream", "key": name}
    if value is not None:
        message["value"] = value
    message["headers"] = headers
    time_ns = max(registry.last_ns, now_ns)
    return Append(registry.number, registry.tail + 1, 1, orjson.dumps(message), None, time_ns)
