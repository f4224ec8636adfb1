"""Spans as an OTLP request: the protocol buffers of `ExportTraceServiceRequest`, field by field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from tailrace.schema.profiles.otlp_export import write_bytes, write_fixed64, write_varint
from tailrace.server.span import TEXT_MAX, AttributeValue, Span

_ERROR: Final = 2


def encode_export(spans: Sequence[Span], resource: Mapping[str, AttributeValue], version: str) -> bytes:
    """`resource` says who is telling: at least `service.name`."""
    described = b"".join(_attribute(1, name, value) for name, value in resource.items())
    scope = _text(1, "tailrace") + _text(2, version)
    scoped = write_bytes(1, scope) + b"".join(write_bytes(2, encode_span(span)) for span in spans)
    return write_bytes(1, write_bytes(1, described) + write_bytes(2, scoped))


def encode_span(span: Span) -> bytes:
    context = span.context
    parts = [write_bytes(1, context.trace_id), write_bytes(2, context.span_id)]
    if span.tracestate:
        parts.append(_text(3, span.tracestate))
    if span.parent_id:
        parts.append(write_bytes(4, span.parent_id))
    parts += [_text(5, span.name[:TEXT_MAX]), write_varint(6, span.kind)]
    parts += [write_fixed64(7, span.begun_ns), write_fixed64(8, max(span.begun_ns, span.ended_ns))]
    parts += [_attribute(9, name, value) for name, value in span.attributes.items()]
    if span.failed:
        parts.append(write_bytes(15, write_varint(3, _ERROR)))
    return b"".join(parts)


def _attribute(number: int, name: str, value: AttributeValue) -> bytes:
    written = write_varint(3, value) if isinstance(value, int) else _text(1, value[:TEXT_MAX])
    return write_bytes(number, _text(1, name) + write_bytes(2, written))


def _text(number: int, text: str) -> bytes:
    return write_bytes(number, text.encode("utf-8", "replace"))
