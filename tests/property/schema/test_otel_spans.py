"""Spans against anything: once is enough, what is stored is valid, secrets are gone, both encodings agree."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from tailrace.common.errors import TailraceError
from tailrace.schema.json_schema import compile_schema
from tailrace.schema.json_values import decode_json_record, encode_json_record
from tailrace.schema.profiles.canonical_registries import OTEL_REGISTRY
from tailrace.schema.profiles.otel_spans import (
    OtelSpans,
    configured_secrets,
    is_secret,
    strip_url_queries,
    truncate_utf8,
)
from tailrace.schema.profiles.otlp_export import (
    JSON_MEDIA_TYPE,
    PROTOBUF_MEDIA_TYPE,
    OtelConfig,
    OtlpLimits,
    SpanExport,
    parse_otel,
)
from tailrace.schema.profiles.otlp_json import read_json
from tailrace.schema.profiles.otlp_protobuf import read_protobuf

COMMON = settings(max_examples=80, deadline=None)
VALIDATOR = compile_schema(OTEL_REGISTRY["schema"])
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET, SQL, QUERY = "hunter2-planted", "SELECT planted FROM t", "planted-query"
URL = f"https://host.example/a/b?q={QUERY}#frag-{QUERY}"

texts = st.text(max_size=10) | st.sampled_from(
    [" x ", URL, "[REDACTED]", "\ud800", "😀" * 9, "GET", "503", "a ?b"]
)
scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | texts
names = st.sampled_from(
    [
        *("service.name", "deployment.environment", "cloud.region", "http.method", "http.url", "url.full"),
        *("http.status_code", "http.target", "url.query", "db.statement", "db.query.text", "db.system"),
        *("rpc.service", "messaging.destination", "error.type", "exception.message", "request.id", "a"),
        *("http.request.header.x-request-id", "http.request.header.authorization", "api_key", ""),
    ]
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
maps = st.dictionaries(names, values, max_size=6) | values
nanos = st.integers(-1, 2**64) | st.integers(0, 2**62).map(str) | texts
ids = st.sampled_from([TRACE, SPAN, TRACE.upper(), "0" * 32, "0" * 16, "", None, 5])
parts = st.fixed_dictionaries(
    {"traceId": st.just(TRACE), "spanId": st.just(SPAN)},
    optional={"name": values, "timeUnixNano": nanos, "attributes": maps, "droppedAttributes": values},
)
spans = st.fixed_dictionaries(
    {"traceId": st.just(TRACE.upper()), "spanId": st.just(SPAN), "startUnixNano": st.integers(0, 2**64 - 1)},
    optional={
        "parentSpanId": st.sampled_from([SPAN, "", None]),
        "endUnixNano": nanos,
        "endTimestamp": st.sampled_from(["2026-01-01T00:00:00.5Z", "never", 1767225600000]),
        "duration": scalars,
        "name": texts | scalars,
        "kind": st.integers(-1, 9) | st.sampled_from(["SPAN_KIND_SERVER", "client", "odd"]),
        "status": st.fixed_dictionaries({}, optional={"code": values, "message": texts}) | values,
        "attributes": maps,
        "resource": st.fixed_dictionaries({}, optional={"attributes": maps, "schemaUrl": texts}) | values,
        "instrumentationScope": st.fixed_dictionaries({}, optional={"attributes": maps, "name": texts}),
        "events": st.lists(parts | values, max_size=4) | values,
        "links": st.lists(parts, max_size=4),
        "dropped": st.fixed_dictionaries({}, optional={"events": scalars, "links": scalars}),
        "http": maps,
        "error": maps,
        "flags": scalars,
        "redaction": st.fixed_dictionaries({"keys": st.lists(texts, max_size=3)}),
    },
)
configurations = st.fixed_dictionaries(
    {},
    optional={
        "redactKeys": st.lists(st.sampled_from(["a", "Card-No", "service.name"]), max_size=2),
        "requestIdAttributes": st.lists(names.filter(bool), max_size=2),
        "attributeLimits": st.fixed_dictionaries(
            {},
            optional={
                "maxAttributeValueBytes": st.integers(16, 40),
                "maxAttributesPerSpan": st.integers(1, 3),
                "maxEventsPerSpan": st.integers(0, 2),
                "maxLinksPerSpan": st.integers(0, 2),
                "maxStatementBytes": st.just(16),
            },
        ),
        "store": st.fixed_dictionaries(
            {},
            optional={
                name: st.booleans()
                for name in ("rawResourceAttributes", "rawSpanAttributes", "rawEvents", "rawLinks")
            },
        ),
        "dbStatementMode": st.sampled_from(["drop", "raw"]),
        "urlMode": st.sampled_from(["drop_query", "raw"]),
    },
)


def config_of(body: dict[str, Any]) -> OtelConfig:
    return parse_otel({"kind": "otel-traces", **body}, "profile")


@COMMON
@given(spans, configurations)
def test_pr1_pr2_spans_are_normal_after_one_pass_and_valid(span: Any, body: dict[str, Any]) -> None:
    profile = OtelSpans(config_of(body))
    stored = encode_json_record(profile.normalise(span, 0))
    record: Any = decode_json_record(stored)
    assert VALIDATOR.complaint(record) is None
    assert encode_json_record(profile.normalise(record, 1)) == stored


@COMMON
@given(st.one_of(spans, values, st.fixed_dictionaries({"traceId": ids, "spanId": ids, "timestamp": values})))
def test_pr2_whatever_comes_is_refused_in_words_or_made_valid(span: Any) -> None:
    try:
        record = OtelSpans(OtelConfig()).normalise(span, 0)
    except TailraceError as caught:
        refusal = caught
    else:
        assert VALIDATOR.complaint(decode_json_record(encode_json_record(record))) is None
        return
    assert refusal.status == 400
    assert refusal.message.startswith("otel-traces record")


PLANTED: dict[str, Any] = {
    "password": SECRET,
    "http.request.header.authorization": [SECRET],
    "user-token": {"deep": SECRET},
    "X-Api-Key": SECRET,
    "db_password": SECRET,
    "inner": {"list": [{"secret": SECRET}], "db.statement": SQL, "url.query": QUERY},
    "db.statement": SQL,
    "db.query.text": SQL,
    "db.query.parameter.0": SQL,
    "http.url": URL,
    "http.target": f"/a?{QUERY}",
    "url.query": QUERY,
    "url.fragment": QUERY,
    "note": f"while fetching {URL} it failed",
    "links": [URL, f'"{URL}"'],
}


@pytest.mark.parametrize(
    "store",
    [{}, dict.fromkeys(["rawResourceAttributes", "rawSpanAttributes", "rawEvents", "rawLinks"], False)],
)
def test_pr4_statements_queries_and_secrets_are_left_nowhere(store: dict[str, bool]) -> None:
    span: dict[str, Any] = {
        "traceId": TRACE,
        "spanId": SPAN,
        "startUnixNano": 5,
        "name": f"GET {URL}",
        "status": {"code": 2, "message": f"{URL} said no"},
        "attributes": PLANTED,
        "resource": {"attributes": PLANTED},
        "instrumentationScope": {"name": "s", "attributes": PLANTED},
        "events": [{"name": f"at {URL}", "attributes": {**PLANTED, "exception.message": f"bad {URL}"}}],
        "links": [{"traceId": TRACE, "spanId": SPAN, "attributes": PLANTED}],
        "http": {"url": URL, "target": f"/a?{QUERY}", "path": f"/a#{QUERY}"},
        "db": {"statement": SQL},
    }
    record: Any = OtelSpans(config_of({"store": store})).normalise(span, 0)
    stored = encode_json_record(record).decode()
    for planted in (SECRET, SQL, QUERY):
        assert planted not in stored
    assert record["http"]["url"] == "https://host.example/a/b"
    assert record["http"]["path"] == "/a"
    assert record["error"]["message"] == "bad https://host.example/a/b"
    assert "attributes.password" in record["redaction"]["keys"]
    assert "events.0.attributes.inner.list.secret" in record["redaction"]["keys"]


def test_raw_modes_keep_statements_and_queries() -> None:
    config = config_of(
        {"dbStatementMode": "raw", "urlMode": "raw", "attributeLimits": {"maxStatementBytes": 16}}
    )
    span = {
        "traceId": TRACE,
        "spanId": SPAN,
        "timestamp": 5,
        "attributes": {"db.statement": SQL, "http.url": URL},
    }
    record: Any = OtelSpans(config).normalise(span, 0)
    assert record["db"]["statement"] == SQL[:16].strip()
    assert record["http"]["url"] == record["attributes"]["http.url"] == URL
    assert record["attributes"]["db.statement"] == SQL


@given(st.text(alphabet="ab:/?# \"'", max_size=40), st.integers(1, 30))
def test_cutting_queries_and_texts_once_is_enough(text: str, most: int) -> None:
    cut = strip_url_queries(text)
    assert strip_url_queries(cut) == cut
    assert len(truncate_utf8(text, most).encode()) <= most
    assert text.startswith(truncate_utf8(text, most))


@pytest.mark.parametrize(
    ("key", "secret"),
    [
        ("Authorization", True),
        ("http.request.header.set-cookie", True),
        ("http.request.header.x_api_key", True),
        ("db.password", True),
        ("session-token", True),
        ("card-no", True),
        ("user.card_no", True),
        ("tokens", False),
        ("cookie.jar", False),
        ("key", False),
    ],
)
def test_pr3_names_of_secrets(key: str, secret: bool) -> None:
    assert is_secret(key, configured_secrets(config_of({"redactKeys": ["Card-No"]}))) is secret


# -- exports ----------------------------------------------------------------------------------------------

any_scalars = st.one_of(
    st.builds(lambda value: AnyValue(string_value=value), st.text(max_size=5)),
    st.builds(lambda value: AnyValue(bool_value=value), st.booleans()),
    st.builds(lambda value: AnyValue(int_value=value), st.integers(-(2**63), 2**63 - 1)),
    st.builds(lambda value: AnyValue(double_value=value), st.floats()),
    st.builds(lambda value: AnyValue(bytes_value=value), st.binary(max_size=5)),
    st.just(AnyValue()),
)


def _array(items: list[AnyValue]) -> AnyValue:
    made = AnyValue()
    made.array_value.values.extend(items)
    return made


def _pairs(items: dict[str, AnyValue]) -> AnyValue:
    made = AnyValue()
    made.kvlist_value.values.extend(KeyValue(key=key, value=value) for key, value in items.items())
    return made


any_values = st.recursive(
    any_scalars,
    lambda inner: (
        st.builds(_array, st.lists(inner, max_size=3))
        | st.builds(_pairs, st.dictionaries(st.text(max_size=3), inner, max_size=3))
    ),
    max_leaves=5,
)
attributes = st.dictionaries(st.sampled_from(["a", "service.name", "é"]), any_values, max_size=3).map(
    lambda items: [KeyValue(key=key, value=value) for key, value in items.items()]
)
u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)


@st.composite
def exports(draw: st.DrawFn) -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    for _ in range(draw(st.integers(0, 2))):
        around = request.resource_spans.add(schema_url=draw(st.text(max_size=3)))
        around.resource.attributes.extend(draw(attributes))
        for _ in range(draw(st.integers(0, 2))):
            group = around.scope_spans.add(schema_url=draw(st.text(max_size=3)))
            group.scope.name, group.scope.version = draw(st.text(max_size=3)), draw(st.text(max_size=3))
            group.scope.attributes.extend(draw(attributes))
            for _ in range(draw(st.integers(0, 2))):
                span: Any = group.spans.add(
                    trace_id=draw(st.binary(max_size=17)), span_id=draw(st.binary(max_size=9))
                )
                span.parent_span_id, span.name = draw(st.binary(max_size=8)), draw(st.text(max_size=5))
                span.trace_state, span.kind = draw(st.text(max_size=5)), draw(st.sampled_from(range(6)))
                span.start_time_unix_nano, span.end_time_unix_nano = draw(u64), draw(u64)
                span.flags, span.dropped_attributes_count = draw(u32), draw(u32)
                span.dropped_events_count, span.dropped_links_count = draw(u32), draw(u32)
                span.status.code, span.status.message = (
                    draw(st.sampled_from(range(3))),
                    draw(st.text(max_size=5)),
                )
                span.attributes.extend(draw(attributes))
                event = span.events.add(name=draw(st.text(max_size=5)), time_unix_nano=draw(u64))
                event.attributes.extend(draw(attributes))
                link = span.links.add(
                    trace_id=draw(st.binary(max_size=16)), span_id=draw(st.binary(max_size=8))
                )
                link.attributes.extend(draw(attributes))
                link.dropped_attributes_count = draw(u32)
    return request


def as_otlp_json(request: ExportTraceServiceRequest) -> bytes:
    """The JSON of this protocol has ids in hex, where that of protocol buffers has base64."""

    def turn(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: turn(inner, name) for name, inner in value.items()}
        if isinstance(value, list):
            return [turn(inner) for inner in value]
        return base64.b64decode(value).hex() if key in ("traceId", "spanId", "parentSpanId") else value

    shown = MessageToDict(request, use_integers_for_enums=True)
    return json.dumps(turn(shown)).encode()


def normal(export: SpanExport) -> list[Any]:
    profile = OtelSpans(OtelConfig())
    found: list[Any] = []
    for span in export.spans:
        try:
            found.append(profile.normalise(span, 0))
        except TailraceError as refusal:
            found.append(refusal.message)
    return found


@COMMON
@given(exports())
def test_both_encodings_of_an_export_are_the_same_spans(request: ExportTraceServiceRequest) -> None:
    one, other = SpanExport(OtlpLimits()), SpanExport(OtlpLimits())
    read_protobuf(request.SerializeToString(), one)
    read_json(as_otlp_json(request), other)
    assert normal(one) == normal(other)
    assert len(one.spans) == sum(len(g.spans) for r in request.resource_spans for g in r.scope_spans)


@COMMON
@given(exports(), st.data())
def test_damaged_exports_are_read_or_refused(request: ExportTraceServiceRequest, data: st.DataObject) -> None:
    body = bytearray(request.SerializeToString() or b"\x0a\x00")
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    for read in (read_protobuf, read_json):
        export = SpanExport(OtlpLimits())
        code = "invalid_request"
        try:
            read(bytes(body[: data.draw(st.integers(0, len(body)))]), export)
        except TailraceError as refusal:
            code = refusal.code
        assert code == "invalid_request"
        normal(export)


def nested(depth: int) -> AnyValue:
    value = AnyValue(string_value="x")
    for _ in range(depth):
        value = _array([value])
    return value


def one_span(*values: AnyValue) -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    spans = request.resource_spans.add().scope_spans.add().spans
    for value in values:
        span = spans.add(trace_id=bytes.fromhex(TRACE), span_id=bytes.fromhex(SPAN))
        span.attributes.append(KeyValue(key="a", value=value))
    return request


@pytest.mark.parametrize("media_type", [PROTOBUF_MEDIA_TYPE, JSON_MEDIA_TYPE])
def test_spans_beyond_the_limits_are_rejected_one_by_one(media_type: str) -> None:
    request = one_span(
        nested(15), nested(16), _array([AnyValue(bool_value=True)] * 257), AnyValue(int_value=1)
    )
    request.resource_spans[0].scope_spans[0].spans.extend(
        one_span(AnyValue()).resource_spans[0].scope_spans[0].spans
    )
    export = SpanExport(OtlpLimits(max_spans_per_request=2))
    if media_type == PROTOBUF_MEDIA_TYPE:
        read_protobuf(request.SerializeToString(), export)
    else:
        read_json(as_otlp_json(request), export)
    assert (len(export.spans), export.rejected) == (2, 3)
    assert export.reason == "an attribute is nested deeper than 16 levels"
    answer = export.answer(media_type)
    if media_type == PROTOBUF_MEDIA_TYPE:
        told = ExportTraceServiceResponse.FromString(answer).partial_success
        assert (told.rejected_spans, told.error_message) == (3, export.reason)
    else:
        assert json.loads(answer) == {"partialSuccess": {"rejectedSpans": "3", "errorMessage": export.reason}}
    assert SpanExport(OtlpLimits()).answer(media_type) == (
        b"" if media_type == PROTOBUF_MEDIA_TYPE else b"{}"
    )


def test_too_many_resources_and_scopes_are_refused() -> None:
    request = ExportTraceServiceRequest()
    for _ in range(3):
        request.resource_spans.add().scope_spans.add()
    for limits, what in (
        (OtlpLimits(max_resource_spans_per_request=2), "more than 2 resource spans"),
        (OtlpLimits(max_scope_spans_per_request=2), "more than 2 scope spans"),
    ):
        with pytest.raises(TailraceError, match=what):
            read_protobuf(request.SerializeToString(), SpanExport(limits))
        with pytest.raises(TailraceError, match=what):
            read_json(as_otlp_json(request), SpanExport(limits))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"dbStatementMode": "keep"}, "profile.dbStatementMode: invalid enum value 'keep'"),
        ({"store": {"rawSpans": True}}, "profile.store.rawSpans is not supported"),
        (
            {"observability": {"request": {"tracesStream": "x"}}},
            "profile.observability.request.tracesStream is not",
        ),
        (
            {"otlpLimits": {"maxSpansPerRequest": 50_001}},
            "profile.otlpLimits.maxSpansPerRequest: expected `int` <= 50000",
        ),
        ({"otlpLimits": {"maxSpans": 50_001}}, "profile.otlpLimits.maxSpans"),
        ({"otlpLimits": {"maxSpans": 1, "maxSpansPerRequest": 2}}, "profile.otlpLimits.maxSpans is an older"),
        ({"otlpLimits": {"maxTraces": 1}}, "profile.otlpLimits.maxTraces is not supported"),
        ({"redactKeys": [" "]}, "profile.redactKeys must not hold an empty name"),
        ({"extra": 1}, "profile.extra is not supported"),
    ],
)
def test_configurations_that_are_none(body: dict[str, Any], message: str) -> None:
    with pytest.raises(TailraceError) as refused:
        config_of(body)
    assert refused.value.message.startswith(message)


DOCUMENTED_LIMITS = {
    "maxCompressedBytes": 1 << 20,
    "maxDecodedBytes": 2 << 20,
    "maxResourceSpansPerRequest": 10,
    "maxScopeSpansPerRequest": 20,
    "maxSpansPerRequest": 30,
    "maxAnyValueDepth": 4,
    "maxArrayValuesPerAnyValue": 5,
    "maxKvListValuesPerAnyValue": 6,
}


def test_limits_of_an_export_have_the_documented_names() -> None:
    assert config_of({"otlpLimits": DOCUMENTED_LIMITS}).to_json()["otlpLimits"] == DOCUMENTED_LIMITS


def test_limits_of_an_export_are_accepted_by_their_older_names() -> None:
    older = {"maxResourceSpans": 10, "maxScopeSpans": 20, "maxSpans": 30, "maxAnyValueElements": 5}
    assert config_of({"otlpLimits": older}).to_json()["otlpLimits"] == {
        "maxResourceSpansPerRequest": 10,
        "maxScopeSpansPerRequest": 20,
        "maxSpansPerRequest": 30,
        "maxArrayValuesPerAnyValue": 5,
        "maxKvListValuesPerAnyValue": 5,
    }


def test_arrays_and_maps_of_an_attribute_have_limits_of_their_own() -> None:
    array, members = _array([AnyValue(bool_value=True)] * 3), AnyValue()
    for index in range(3):
        members.kvlist_value.values.add(key=str(index), value=AnyValue(bool_value=True))
    request = one_span(array, members)
    for name, kept in (("maxArrayValuesPerAnyValue", dict), ("maxKvListValuesPerAnyValue", list)):
        for read, body in ((read_protobuf, request.SerializeToString()), (read_json, as_otlp_json(request))):
            export = SpanExport(config_of({"otlpLimits": {name: 2}}).otlp_limits)
            read(body, export)
            assert export.rejected == 1
            (span,) = export.spans
            attributes: Any = span["attributes"]
            assert isinstance(attributes["a"], kept)


def test_what_is_at_its_default_is_not_shown() -> None:
    assert config_of({"store": {"rawLinks": True}}).to_json() == {"kind": "otel-traces"}
    body = {"redactKeys": ["Card"], "observability": {"request": {"eventsStream": "ev"}}, "urlMode": "raw"}
    shown = json.loads(json.dumps(config_of(body).to_json()))
    assert shown == {"kind": "otel-traces", **body, "redactKeys": ["card"]}


def test_what_spans_share_is_cleaned_for_each_of_them() -> None:
    profile = OtelSpans(OtelConfig())
    shared = {"attributes": {"password": SECRET, "service.name": "checkout"}}
    span = {"traceId": TRACE, "spanId": SPAN, "timestamp": 5, "resource": shared}
    one, other = profile.normalise(dict(span), 0), profile.normalise(dict(span), 0)
    changed: Any = profile.normalise({**span, "resource": {"attributes": {"service.name": "x"}}}, 0)
    assert one == other
    assert one["redaction"] == {"keys": ["resource.attributes.password"]}
    assert (changed["service"], changed["redaction"]) == ("x", {"keys": []})
