"""OTLP exports in JSON: the same messages, with hexadecimal ids and lower camel case names."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, Final, cast

import msgspec
from msgspec import Raw, Struct

from tailrace.schema.json_values import invalid_request
from tailrace.schema.profiles.otlp_export import (
    Record,
    SpanExport,
    UnusableSpanError,
    ValueLimits,
    number_or_text,
)

_INTEGER = re.compile(r"-?[0-9]{1,19}")
_DROPPED: Final = {
    "attributes": "droppedAttributesCount",
    "events": "droppedEventsCount",
    "links": "droppedLinksCount",
}


class _ScopeSpans(Struct, rename="camel"):
    scope: Any = None
    schema_url: Any = None
    spans: list[Raw] = []


class _ResourceSpans(Struct, rename="camel"):
    resource: Any = None
    schema_url: Any = None
    scope_spans: list[_ScopeSpans] = []


class _Outline(Struct, rename="camel"):
    """An export with its spans not decoded yet: as objects, all of them at once would be far too large."""

    resource_spans: list[_ResourceSpans] = []


_OUTLINE: Final = msgspec.json.Decoder(_Outline)


def read_json(body: bytes, export: SpanExport) -> None:
    try:
        _read_outline(_outline(body), export)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise invalid_request(f"OTLP body is not valid JSON: {error}") from None


def _outline(body: bytes) -> _Outline:
    try:
        return _OUTLINE.decode(body)
    except msgspec.ValidationError:
        return _checked_outline(body)


def _checked_outline(body: bytes) -> _Outline:
    """Of an export that is not quite as it should be: what is wrong is refused, by its name."""
    document = cast("object", msgspec.json.decode(body))
    if not isinstance(document, dict):
        raise invalid_request("OTLP body must be an object")
    return _Outline(
        [
            _ResourceSpans(
                around.get("resource"),
                around.get("schemaUrl"),
                [
                    _ScopeSpans(
                        group.get("scope"),
                        group.get("schemaUrl"),
                        [Raw(msgspec.json.encode(span)) for span in _objects(group, "spans")],
                    )
                    for group in _objects(around, "scopeSpans")
                ],
            )
            for around in _objects(cast("object", document), "resourceSpans")
        ]
    )


def _read_outline(outline: _Outline, export: SpanExport) -> None:
    values = ValueLimits(export.limits)
    for around in outline.resource_spans:
        export.begin_resource()
        resource, complaint = _shared(_object(around.resource), values)
        resource["schemaUrl"] = around.schema_url
        for group in around.scope_spans:
            export.begin_scope()
            given = _object(group.scope)
            scope, scope_complaint = _shared(given, values)
            scope |= {"name": given.get("name"), "version": given.get("version")}
            scope["schemaUrl"] = group.schema_url
            for raw in group.spans:
                span: object = msgspec.json.decode(raw)
                if not isinstance(span, dict):
                    raise invalid_request("OTLP spans must be an array of objects")
                found = cast("Record", span)
                export.add(partial(_span, found, resource, scope, complaint or scope_complaint, values))


def _shared(holder: Record, values: ValueLimits) -> tuple[Record, str]:
    """What has attributes for many spans; a complaint if they are unusable."""
    try:
        return {"attributes": _attributes(holder, values, 0)}, ""
    except UnusableSpanError as error:
        return {"attributes": {}}, str(error)


def _span(given: Record, resource: Record, scope: Record, complaint: str, values: ValueLimits) -> Record:
    if complaint:
        raise UnusableSpanError(complaint)
    span = given.copy()
    span["attributes"] = _attributes(given, values, 0)
    for name in ("events", "links"):
        span[name] = [_part(part, values) for part in _list(given.get(name))]
    span["dropped"] = {name: _whole(given.get(key)) for name, key in _DROPPED.items()}
    span["resource"], span["instrumentationScope"] = resource, scope
    return span


def _part(value: object, values: ValueLimits) -> Record:
    """An event or a link."""
    given = _object(value)
    part = given.copy()
    part["attributes"] = _attributes(given, values, 0)
    part["droppedAttributes"] = _whole(given.get(_DROPPED["attributes"]))
    return part


def _attributes(holder: Record, values: ValueLimits, depth: int) -> dict[str, object]:
    """A list of keys with their values, as a map."""
    attributes: dict[str, object] = {}
    for item in _list(holder.get("attributes" if depth == 0 else "values")):
        pair = _object(item)
        key = pair.get("key", "")
        if not isinstance(key, str):
            raise UnusableSpanError("an attribute's key is no text")
        if depth:
            values.check_kv_list(len(attributes) + 1)
        attributes[key] = _any(_object(pair.get("value")), values, depth + 1)
    return attributes


def _any(value: Record, values: ValueLimits, depth: int) -> object:
    values.check_depth(depth)
    for kind, found in value.items():
        if kind in ("stringValue", "bytesValue") and isinstance(found, str):
            return found
        if kind == "boolValue" and isinstance(found, bool):
            return found
        if kind == "intValue":
            return _integer(found)
        if kind == "doubleValue":
            return _double(found)
        if kind == "arrayValue":
            items = _list(_object(found).get("values"))
            values.check_array(len(items))
            return [_any(_object(item), values, depth + 1) for item in items]
        if kind == "kvlistValue":
            return _attributes(_object(found), values, depth)
    return None


def _integer(value: object) -> int:
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63:
        return value
    raise UnusableSpanError("an attribute's intValue is no 64-bit number")


def _double(value: object) -> float | str:
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number_or_text(float(value)) if abs(value) < 1.7e308 else number_or_text(float("inf"))
    raise UnusableSpanError("an attribute's doubleValue is no number")


def _whole(value: object) -> object:
    """Counts may come as text: 64-bit numbers of this encoding do."""
    return int(value) if isinstance(value, str) and _INTEGER.fullmatch(value) else value


def _object(value: object) -> Record:
    return cast("Record", value) if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []


def _objects(holder: object, name: str) -> list[Record]:
    found = _object(holder).get(name)
    if found is None:
        return []
    if not isinstance(found, list):
        raise invalid_request(f"OTLP {name} must be an array")
    items = cast("list[object]", found)
    if not all(isinstance(item, dict) for item in items):
        raise invalid_request(f"OTLP {name} must be an array of objects")
    return cast("list[Record]", items)
