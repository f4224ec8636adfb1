"""How a stream's `otel-traces` profile is configured."""

from __future__ import annotations

from typing import Annotated, Final, Literal, cast

import msgspec
from msgspec import Meta, Struct

from tailrace.schema.body import expect_object, invalid_request, shorten

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
    """Which attributes are kept as they came, beside what is taken out of them."""

    raw_resource_attributes: bool = True
    raw_span_attributes: bool = True
    raw_events: bool = True
    raw_links: bool = True


class OtlpLimits(_ConfigPart, frozen=True):
    """Of one export. A stream may ask for less than the server takes, not for more."""

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
