"""OTLP exports in Protocol Buffers: decodes `ExportTraceServiceRequest` field by field."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple, cast

from tailrace.schema.json_values import invalid_request
from tailrace.schema.profiles.otlp_export import (
    BYTES,
    FIXED64,
    VARINT,
    Data,
    MalformedMessageError,
    Record,
    SpanExport,
    UnusableSpanError,
    ValueLimits,
    number_or_text,
    read_fields,
    to_signed,
)

_DOUBLE = struct.Struct("<d")
_U64 = struct.Struct("<Q")

Raw = int | Data


class ScopeContext(NamedTuple):
    """What all spans of one scope share; a complaint if it is unusable, and they with it."""

    resource: Record
    scope: Record
    complaint: str


def read_protobuf(body: bytes, export: SpanExport) -> None:
    try:
        for number, kind, value in read_fields(memoryview(body)):
            if number == 1:
                export.begin_resource()
                _resource_spans(_message(kind, value), export)
    except MalformedMessageError as error:
        raise invalid_request(f"OTLP body is not a valid protobuf export: {error}") from None


def _resource_spans(data: Data, export: SpanExport) -> None:
    values = ValueLimits(export.limits)
    scopes: list[Data] = []
    resource, schema_url, complaint = dict[str, object](), None, ""
    for number, kind, value in read_fields(data):
        if number == 1:
            try:
                resource = _attributes_of(_message(kind, value), 1, values)
            except UnusableSpanError as error:
                complaint = str(error)
        elif number == 2:
            export.begin_scope()
            scopes.append(_message(kind, value))
        elif number == 3:
            schema_url = _text(kind, value)
    shared: Record = {"schemaUrl": schema_url, "attributes": resource}
    for scope in scopes:
        _scope_spans(scope, shared, complaint, export, values)


def _scope_spans(
    data: Data, resource: Record, complaint: str, export: SpanExport, values: ValueLimits
) -> None:
    spans: list[Data] = []
    scope: Record = {}
    for number, kind, value in read_fields(data):
        if number == 1:
            try:
                scope |= _scope(_message(kind, value), values)
            except UnusableSpanError as error:
                complaint = complaint or str(error)
        elif number == 2:
            spans.append(_message(kind, value))
        elif number == 3:
            scope["schemaUrl"] = _text(kind, value)
    shared = ScopeContext(resource, scope, complaint)
    for span in spans:
        export.add(partial(_span, span, shared, values))


def _scope(data: Data, values: ValueLimits) -> Record:
    scope: Record = {"attributes": _attributes_of(data, 3, values)}
    for number, kind, value in read_fields(data):
        if number in (1, 2):
            scope["name" if number == 1 else "version"] = _text(kind, value)
    return scope


def _span(data: Data, shared: ScopeContext, values: ValueLimits) -> Record:
    if shared.complaint:
        raise UnusableSpanError(shared.complaint)
    # A copy, since bytes are taken apart quicker than views of them.
    span = _read(bytes(data), _SPAN, values)
    span["resource"] = shared.resource
    span["instrumentationScope"] = shared.scope
    dropped = ("attributes", "events", "links")
    span["dropped"] = {name: span.pop(f"dropped {name}", 0) for name in dropped}
    return span


# -- fields -----------------------------------------------------------------------------------------------


def _message(kind: int, value: Raw) -> Data:
    if kind != BYTES or isinstance(value, int):
        raise MalformedMessageError("a field is not of the type it has to be")
    return value


def _text(kind: int, value: Raw, _values: object = None) -> str:
    return str(_message(kind, value), "utf-8", "replace")


def _hex(kind: int, value: Raw, _values: object = None) -> str:
    return _message(kind, value).hex()


def _number(_kind: int, value: Raw, _values: object = None) -> int:
    if not isinstance(value, int):
        raise MalformedMessageError("a field is not of the type it has to be")
    return value


class Repeated(NamedTuple):
    """A field that is a list of messages."""

    read: Callable[[int, Raw, ValueLimits], object]


FieldReader = Callable[[int, Raw, ValueLimits], object]
MessageTable = dict[int, tuple[str, FieldReader | Repeated]]


def _read(data: Data, table: MessageTable, values: ValueLimits) -> Record:
    """A message by its table; fields that are not in it are left out."""
    found: Record = {}
    attributes: dict[str, object] = {}
    for number, kind, value in read_fields(data):
        name, read = table.get(number, ("", None))
        if read is None:
            continue
        if name == "attributes":
            _add(attributes, _message(kind, value), values, 0)
            found[name] = attributes
        elif isinstance(read, Repeated):
            items = cast("list[object]", found.setdefault(name, []))
            items.append(read.read(kind, value, values))
        else:
            found[name] = read(kind, value, values)
    return found


def _attributes_of(data: Data, wanted: int, values: ValueLimits) -> dict[str, object]:
    attributes: dict[str, object] = {}
    for number, kind, value in read_fields(data):
        if number == wanted:
            _add(attributes, _message(kind, value), values, 0)
    return attributes


def _add(attributes: dict[str, object], data: Data, values: ValueLimits, depth: int) -> None:
    """A key with its value."""
    values.check_depth(depth + 1)
    short = _short_pair(data)
    if short is not None:
        key, text = short
        attributes[key] = text
        return
    key, found = "", None
    for number, kind, value in read_fields(data):
        if number == 1:
            key = _text(kind, value)
        elif number == 2:
            found = _any(_message(kind, value), values, depth + 1)
    attributes[key] = found


def _short_pair(data: Data) -> tuple[str, str] | None:
    """A short key with a short text, which is what most attributes are; None for everything else.

    The bytes are then: 0x0A, length, key, 0x12, length of the rest, 0x0A, length, text.
    """
    size = len(data)
    if not 6 <= size < 0x80 or data[0] != 0x0A:
        return None
    at = 2 + data[1]
    if at + 4 > size or data[at] != 0x12 or at + 2 + data[at + 1] != size:
        return None
    if data[at + 2] != 0x0A or at + 4 + data[at + 3] != size:
        return None
    return str(data[2:at], "utf-8", "replace"), str(data[at + 4 :], "utf-8", "replace")


def _any(data: Data, values: ValueLimits, depth: int) -> object:
    values.check_depth(depth)
    found: object = None
    for number, kind, value in read_fields(data):
        if number == 1:
            found = _text(kind, value)
        elif number == 2 and kind == VARINT:
            found = bool(value)
        elif number == 3 and kind == VARINT and isinstance(value, int):
            found = to_signed(value)
        elif number == 4 and kind == FIXED64:
            found = number_or_text(_DOUBLE.unpack(_U64.pack(value))[0])
        elif number == 5:
            found = _list(_message(kind, value), values, depth)
        elif number == 6:
            found = _map(_message(kind, value), values, depth)
        elif number == 7:
            found = base64.b64encode(_message(kind, value)).decode()
    return found


def _list(data: Data, values: ValueLimits, depth: int) -> list[object]:
    items: list[object] = []
    for number, kind, value in read_fields(data):
        if number == 1:
            values.check_array(len(items) + 1)
            items.append(_any(_message(kind, value), values, depth + 1))
    return items


def _map(data: Data, values: ValueLimits, depth: int) -> dict[str, object]:
    members: dict[str, object] = {}
    for number, kind, value in read_fields(data):
        if number == 1:
            values.check_kv_list(len(members) + 1)
            _add(members, _message(kind, value), values, depth)
    return members


def _inner(table: MessageTable) -> FieldReader:
    return lambda kind, value, values: _read(_message(kind, value), table, values)


_EVENT: Final[MessageTable] = {
    1: ("timeUnixNano", _number),
    2: ("name", _text),
    3: ("attributes", _text),
    4: ("droppedAttributes", _number),
}
_LINK: Final[MessageTable] = {
    1: ("traceId", _hex),
    2: ("spanId", _hex),
    3: ("traceState", _text),
    4: ("attributes", _text),
    5: ("droppedAttributes", _number),
}
_STATUS: Final[MessageTable] = {2: ("message", _text), 3: ("code", _number)}
_SPAN: Final[MessageTable] = {
    1: ("traceId", _hex),
    2: ("spanId", _hex),
    3: ("traceState", _text),
    4: ("parentSpanId", _hex),
    5: ("name", _text),
    6: ("kind", _number),
    7: ("startUnixNano", _number),
    8: ("endUnixNano", _number),
    9: ("attributes", _text),
    10: ("dropped attributes", _number),
    11: ("events", Repeated(_inner(_EVENT))),
    12: ("dropped events", _number),
    13: ("links", Repeated(_inner(_LINK))),
    14: ("dropped links", _number),
    15: ("status", _inner(_STATUS)),
    16: ("flags", _number),
}
