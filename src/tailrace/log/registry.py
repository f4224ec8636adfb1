"""`__registry__`: the life of every stream, as state messages on a stream of its own."""

from __future__ import annotations

import orjson

from tailrace.common.limits import Limits
from tailrace.common.timestamps import format_rfc3339
from tailrace.log.model import NO_LIFETIME, Lifetime, Stream
from tailrace.protocol.http_headers import DEFAULT_CONTENT_TYPE

REGISTRY_STREAM = "__registry__"


def is_registered(name: str) -> bool:
    """Streams of the server itself do not appear in the registry."""
    return not name.startswith("__") and not name.startswith("hub/")


def registry_lifetime(limits: Limits) -> Lifetime:
    """Its bounds are a setting of the server, and may be others after a restart."""
    age_ms, size_bytes = limits.registry_retention_ms, limits.registry_retention_bytes
    if not age_ms and not size_bytes:
        return NO_LIFETIME
    return Lifetime(retention_s=-(-age_ms // 1000) or None, retention_bytes=size_bytes or None)


def registry_insert(stream: Stream) -> bytes:
    return _registry_message(stream.name, "insert", stream.created_ns, _registry_value(stream, stream.closed))


def registry_update(stream: Stream, now_ns: int) -> bytes:
    return _registry_message(stream.name, "update", now_ns, _registry_value(stream, stream.closed))


def registry_delete(name: str, reason: str, now_ns: int) -> bytes:
    return _registry_message(name, "delete", now_ns, reason=reason)


def registry_snapshot_entry(stream: Stream, now_ns: int) -> bytes:
    """For a stream that exists, as a snapshot has it."""
    return _registry_message(stream.name, "insert", now_ns, _registry_value(stream, stream.visible_closed))


def _registry_value(stream: Stream, closed: bool) -> dict[str, object]:
    return {
        "path": stream.name,
        "contentType": stream.content_type or DEFAULT_CONTENT_TYPE,
        "createdAt": stream.created_ns // 1_000_000,
        "closed": closed,
    }


def _registry_message(
    name: str, operation: str, now_ns: int, value: dict[str, object] | None = None, reason: str | None = None
) -> bytes:
    headers = {"operation": operation, "timestamp": format_rfc3339(now_ns)}
    if reason is not None:
        headers["reason"] = reason
    message: dict[str, object] = {"type": "stream", "key": name}
    if value is not None:
        message["value"] = value
    message["headers"] = headers
    return orjson.dumps(message)
