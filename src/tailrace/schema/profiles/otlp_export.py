"""An OTLP export: configuration, limits, rejected spans, the response, and protobuf wire primitives."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from typing import Annotated, Final, Literal, cast

import msgspec
import orjson
from msgspec import Meta, Struct

from tailrace.schema.json_values import expect_object, invalid_request, shorten

OTEL_KIND: Final = "otel-traces"
Text = Annotated[str, Meta(min_length=1, max_length=256)]
Texts = Annotated[tuple[Text, ...], Meta(max_length=64)]
MIB = 1024 * 1024


class _ConfigPart(Struct, frozen=True, omit_defaults=True, rename="camel", forbid_unknown_fields=True):
    """A part of the configuration; what is at its default is not shown."""


class AttributeLimits(_ConfigPart, frozen=True):
    max_attribute_value_bytes: Annotated[int, Meta(ge=16, le=MIB)] = 8192
    max_attributes_per_span: Annotated[int, Meta(ge=1, le=4096)] = 256
    max_events_per_span: Annotated[int, Meta(ge=0, le=4096)] = 128
    max_links_per_span: Annotated[int, Meta(ge=0, le=4096)] = 128
    max_statement_bytes: Annotated[int, Meta(ge=16, le=MIB)] = 4096


class StoredAttributes(_ConfigPart, frozen=True):
    """Which attributes are stored unchanged, beside the fields derived from them."""

    raw_resource_attributes: bool = True
    raw_span_attributes: bool = True
    raw_events: bool = True
    raw_links: bool = True


class OtlpLimits(_ConfigPart, frozen=True):
    """Limits of one export. A stream may lower the server's limits, not raise them."""

    max_compressed_bytes: Annotated[int, Meta(ge=1, le=4 * MIB)] = 4 * MIB
    max_decoded_bytes: Annotated[int, Meta(ge=1, le=16 * MIB)] = 16 * MIB
    max_resource_spans_per_request: Annotated[int, Meta(ge=1, le=1024)] = 1024
    max_scope_spans_per_request: Annotated[int, Meta(ge=1, le=4096)] = 4096
    max_spans_per_request: Annotated[int, Meta(ge=1, le=50_000)] = 50_000
    max_any_value_depth: Annotated[int, Meta(ge=1, le=16)] = 16
    max_array_values_per_any_value: Annotated[int, Meta(ge=1, le=256)] = 256
    max_kv_list_values_per_any_value: Annotated[int, Meta(ge=1, le=256)] = 256


class Request(_ConfigPart, frozen=True):
    events_stream: Text | None = None


class Observability(_ConfigPart, frozen=True):
    request: Request = Request()


class OtelConfig(_ConfigPart, frozen=True):
    redact_keys: Texts = ()
    request_id_attributes: Texts | None = None
    attribute_limits: AttributeLimits = AttributeLimits()
    store: StoredAttributes = StoredAttributes()
    db_statement_mode: Literal["drop", "raw"] = "drop"
    url_mode: Literal["drop_query", "raw"] = "drop_query"
    otlp_limits: OtlpLimits = OtlpLimits()
    observability: Observability = Observability()

    @property
    def events_stream(self) -> str | None:
        return self.observability.request.events_stream

    def to_json(self) -> dict[str, object]:
        return {"kind": OTEL_KIND} | _without_empty(msgspec.to_builtins(self))


# Names that older documents of streams have, and what each is called now.
_OLD_LIMITS: Final = {
    "maxResourceSpans": ("maxResourceSpansPerRequest",),
    "maxScopeSpans": ("maxScopeSpansPerRequest",),
    "maxSpans": ("maxSpansPerRequest",),
    "maxAnyValueElements": ("maxArrayValuesPerAnyValue", "maxKvListValuesPerAnyValue"),
}

_PARTS: Final[dict[str, type[Struct]]] = {
    "attributeLimits": AttributeLimits,
    "store": StoredAttributes,
    "otlpLimits": OtlpLimits,
    "observability": Observability,
}


def parse_otel(body: dict[str, object], path: str) -> OtelConfig:
    given = dict(expect_object(body, path, ("kind", *_names(OtelConfig))))
    if "otlpLimits" in given:
        given["otlpLimits"] = _current_limits(expect_object(given["otlpLimits"], f"{path}.otlpLimits"), path)
    for part, kind in _PARTS.items():
        inner = expect_object(given.get(part, {}), f"{path}.{part}", _names(kind))
        if part == "observability":
            expect_object(inner.get("request", {}), f"{path}.{part}.request", _names(Request))
    try:
        config = msgspec.convert({name: given[name] for name in given if name != "kind"}, OtelConfig)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `$")
        raise invalid_request(
            f"{path}{shorten(where.rstrip('`'))}: {reason[:1].lower()}{reason[1:]}"
        ) from None
    lowered = tuple(dict.fromkeys(key.strip().lower() for key in config.redact_keys))
    if "" in lowered:
        raise invalid_request(f"{path}.redactKeys must not hold an empty name")
    return msgspec.structs.replace(config, redact_keys=lowered)


def _current_limits(given: dict[str, object], path: str) -> dict[str, object]:
    """The limits by their current names."""
    current: dict[str, object] = {}
    for name, value in given.items():
        for new in _OLD_LIMITS.get(name, (name,)):
            if new != name and new in given:
                raise invalid_request(f"{path}.otlpLimits.{name} is an older name of {new}; give one of them")
            current[new] = value
    return current


def _without_empty(shown: dict[str, object]) -> dict[str, object]:
    """A part that is all at its defaults is not shown either."""
    kept: dict[str, object] = {}
    for name, value in shown.items():
        if isinstance(value, dict):
            value = _without_empty(cast("dict[str, object]", value))
        if value != {}:
            kept[name] = value
    return kept


def _names(kind: type[Struct]) -> tuple[str, ...]:
    return tuple(field.encode_name for field in msgspec.structs.fields(kind))


Data = bytes | memoryview

VARINT: Final = 0
FIXED64: Final = 1
BYTES: Final = 2
FIXED32: Final = 5

_U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I")


class MalformedMessageError(ValueError):
    """The bytes are no message."""


def read_fields(data: Data) -> Iterator[tuple[int, int, int | Data]]:
    """Number, wire type and value of each field, in the order of the message."""
    at, end = 0, len(data)
    while at < end:
        # Nearly all tags and lengths are one byte: those are not worth a call.
        tag = data[at]
        if tag < 0x80:
            at += 1
        else:
            tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if number == 0:
            raise MalformedMessageError("a field has no number")
        if kind == BYTES:
            if at < end and (size := data[at]) < 0x80:
                at += 1
            else:
                size, at = _varint(data, at)
            if size > end - at:
                raise MalformedMessageError("a field is longer than its message")
            yield number, kind, data[at : at + size]
            at += size
        elif kind == VARINT:
            value, at = _varint(data, at)
            yield number, kind, value
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
            if size > end - at:
                raise MalformedMessageError("a field is longer than its message")
            yield number, kind, (_U64 if size == 8 else _U32).unpack_from(data, at)[0]
            at += size
        else:
            raise MalformedMessageError("a field has an unknown type")


def _varint(data: Data, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        if at >= len(data):
            raise MalformedMessageError("a number is cut off")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (2**64 - 1), at
        shift += 7
    raise MalformedMessageError("a number is too long")


def to_signed(value: int) -> int:
    """A 64-bit number as it was before it was written."""
    return value - 2**64 if value >= 2**63 else value


def write_varint(number: int, value: int) -> bytes:
    return _encode_varint(number << 3) + _encode_varint(value & (2**64 - 1))


def write_fixed64(number: int, value: int) -> bytes:
    return _encode_varint(number << 3 | FIXED64) + _U64.pack(value)


def write_bytes(number: int, value: bytes) -> bytes:
    return _encode_varint(number << 3 | BYTES) + _encode_varint(len(value)) + value


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


PROTOBUF_MEDIA_TYPE: Final = "application/x-protobuf"
JSON_MEDIA_TYPE: Final = "application/json"

Record = dict[str, object]


class UnusableSpanError(ValueError):
    """This span is not taken; those around it are."""


class SpanExport:
    """Gathers the spans of one export, within its limits, or hands each on as soon as it is read."""

    def __init__(self, limits: OtlpLimits, keep: Callable[[Record], None] | None = None) -> None:
        self.limits = limits
        self.spans: list[Record] = []  # empty if `keep` consumes them
        self._keep = keep or self.spans.append
        self._read = 0
        self.rejected = 0
        self.reason = ""
        self._resources = 0
        self._scopes = 0

    def begin_resource(self) -> None:
        self._resources += 1
        if self._resources > self.limits.max_resource_spans_per_request:
            raise invalid_request(
                f"OTLP export has more than {self.limits.max_resource_spans_per_request} resource spans"
            )

    def begin_scope(self) -> None:
        self._scopes += 1
        if self._scopes > self.limits.max_scope_spans_per_request:
            raise invalid_request(
                f"OTLP export has more than {self.limits.max_scope_spans_per_request} scope spans"
            )

    def add(self, build: Callable[[], Record]) -> None:
        """One more span, made only if there is room for it."""
        if self._read >= self.limits.max_spans_per_request:
            self.reject(f"an export may have {self.limits.max_spans_per_request} spans")
            return
        try:
            span = build()
            self._read += 1
            self._keep(span)
        except UnusableSpanError as error:
            self.reject(str(error))

    def reject(self, reason: str) -> None:
        """Count a rejected span; the response has the first reason."""
        self.rejected += 1
        self.reason = self.reason or reason

    def answer(self, media_type: str) -> bytes:
        """The response body, in the encoding of the request."""
        if media_type == PROTOBUF_MEDIA_TYPE:
            if not self.rejected:
                return b""
            partial = write_varint(1, self.rejected) + write_bytes(2, self.reason.encode())
            return write_bytes(1, partial)
        if not self.rejected:
            return b"{}"
        partial_success = {"rejectedSpans": str(self.rejected), "errorMessage": self.reason}
        return orjson.dumps({"partialSuccess": partial_success})


class ValueLimits:
    """Bounds on values inside values."""

    __slots__ = ("_array_max", "_depth_max", "_kv_list_max")

    def __init__(self, limits: OtlpLimits) -> None:
        self._depth_max = limits.max_any_value_depth
        self._array_max = limits.max_array_values_per_any_value
        self._kv_list_max = limits.max_kv_list_values_per_any_value

    def check_depth(self, depth: int) -> None:
        if depth > self._depth_max:
            raise UnusableSpanError(f"an attribute is nested deeper than {self._depth_max} levels")

    def check_array(self, count: int) -> None:
        _check_count(count, self._array_max)

    def check_kv_list(self, count: int) -> None:
        _check_count(count, self._kv_list_max)


def _check_count(count: int, count_max: int) -> None:
    if count > count_max:
        raise UnusableSpanError(f"an attribute has more than {count_max} elements")


def number_or_text(value: float) -> float | str:
    """A number that JSON can carry, else its name."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
