"""One export of spans: what was taken out of it, and how it is answered."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import orjson

from tailrace.schema.body import invalid_request
from tailrace.schema.profiles.config import OtlpLimits
from tailrace.schema.profiles.protobuf import write_bytes, write_varint

PROTOBUF_MEDIA_TYPE: Final = "application/x-protobuf"
JSON_MEDIA_TYPE: Final = "application/json"

Record = dict[str, object]


class UnusableSpanError(ValueError):
    """This span is not taken; those around it are."""


class SpanExport:
    """Gathers the spans of one export, within its limits, or hands each on as soon as it is read."""

    def __init__(self, limits: OtlpLimits, keep: Callable[[Record], None] | None = None) -> None:
        self.limits = limits
        self.spans: list[Record] = []  # unless somebody else keeps them
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

    def take(self, build: Callable[[], Record]) -> None:
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
        """The first reason is told, and how many there were."""
        self.rejected += 1
        self.reason = self.reason or reason

    def answer(self, media_type: str) -> bytes:
        """The body of the answer, in the encoding of the request."""
        if media_type == PROTOBUF_MEDIA_TYPE:
            if not self.rejected:
                return b""
            partial = write_varint(1, self.rejected) + write_bytes(2, self.reason.encode())
            return write_bytes(1, partial)
        if not self.rejected:
            return b"{}"
        told = {"rejectedSpans": str(self.rejected), "errorMessage": self.reason}
        return orjson.dumps({"partialSuccess": told})


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
