"""What the conventions of OpenTelemetry say about a span's attributes, old names and new ones alike."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, cast

from tailrace.schema.profiles.redaction import REDACTED
from tailrace.schema.profiles.values import to_integer, to_trimmed

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
