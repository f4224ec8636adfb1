"""Spans as OpenTelemetry sends them, on a real server: both encodings, both routes, and what is refused."""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from conftest import StartServer
from support.sealing import SEALING_ENV, wait_sealed
from support.wire import Answer, Wire, fresh, request_bytes

JSON, PROTOBUF = "application/json", "application/x-protobuf"
START = 1767225600_000_000_000
PROFILE = json.dumps({"profile": {"kind": "otel-traces"}})
SQL, QUERY, SECRET = "SELECT planted FROM cards", "planted-query", "hunter2-planted"


def export(count: int, **changes: Any) -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    around = request.resource_spans.add()
    around.resource.attributes.append(KeyValue(key="service.name", value=AnyValue(string_value="Checkout")))
    group = around.scope_spans.add()
    group.scope.name = "lib"
    for number in range(1, count + 1):
        span = group.spans.add(trace_id=number.to_bytes(16, "big"), span_id=number.to_bytes(8, "big"))
        span.name, span.kind = f"GET /orders/{number}", 2  # pyright: ignore[reportAttributeAccessIssue]
        span.start_time_unix_nano = START + number * 1_000_000_000
        span.end_time_unix_nano = span.start_time_unix_nano + number * 1_000_000
        status = 500 if number % 3 == 0 else 200
        pairs: dict[str, Any] = {"http.request.method": "GET", "http.route": "/orders/{id}", **changes}
        for key, value in pairs.items():
            span.attributes.append(KeyValue(key=key, value=AnyValue(string_value=value)))
        span.attributes.append(KeyValue(key="http.response.status_code", value=AnyValue(int_value=status)))
        if status == 500:
            event = span.events.add(name="exception", time_unix_nano=START)
            told = AnyValue(string_value="Payment Provider refused the card")
            event.attributes.append(KeyValue(key="exception.message", value=told))
    return request


def as_json(request: ExportTraceServiceRequest) -> bytes:
    shown: Any = MessageToDict(request, use_integers_for_enums=True)
    for around in shown["resourceSpans"]:
        for group in around["scopeSpans"]:
            for number, span in enumerate(group["spans"], 1):
                span["traceId"], span["spanId"] = f"{number:032x}", f"{number:016x}"
    return json.dumps(shown).encode()


def stream(http: Wire) -> str:
    name = fresh("otlp")
    assert http.put(name, JSON).status == 201
    assert http.post(f"{name}/_profile", JSON, PROFILE).status == 200
    return name


def send(http: Wire, name: str, media_type: str, body: bytes, **headers: str) -> Answer:
    return http.post(f"{name}/_otlp/v1/traces", media_type, body, **headers)


def search(http: Wire, name: str, q: str) -> list[Any]:
    answer = http.post(f"{name}/_search", JSON, json.dumps({"q": q, "sort": ["offset:asc"], "size": 500}))
    assert answer.status == 200, answer.body
    assert answer.json["coverage"]["complete"] is True
    return [hit["source"] for hit in answer.json["hits"]]


@pytest.mark.parametrize("media_type", [JSON, PROTOBUF])
@pytest.mark.parametrize("gzipped", [False, True])
def test_an_export_is_stored_and_searchable_at_once(http: Wire, media_type: str, gzipped: bool) -> None:
    name = stream(http)
    request = export(7)
    body = request.SerializeToString() if media_type == PROTOBUF else as_json(request)
    if gzipped:
        answer = send(http, name, media_type, gzip.compress(body), content_encoding="gzip")
    else:
        answer = send(http, name, f"{media_type}; charset=utf-8", body)
    assert (answer.status, answer.body) == (200, b"" if media_type == PROTOBUF else b"{}")
    assert answer["content-type"].startswith(media_type)
    assert answer["stream-next-offset"] == http.head(name)["stream-next-offset"]
    spans = http.get(f"{name}?offset=-1").json
    assert [span["spanId"] for span in spans] == [f"{number:016x}" for number in range(1, 8)]
    assert spans[0]["service"] == "Checkout"
    assert spans[0]["timestamp"] == "2026-01-01T00:00:01.000Z"
    assert (spans[0]["duration"], spans[0]["kind"], spans[0]["instrumentationScope"]["name"]) == (
        1.0,
        "server",
        "lib",
    )
    assert [span["duration"] for span in search(http, name, "svc:checkout error:true")] == [3.0, 6.0]
    assert http.get(f"{name}?offset=-1&key={2:032x}").json == [spans[1]]


def test_pr5_free_text_is_found_in_any_case_and_phrases_in_text_fields(http: Wire) -> None:
    name = stream(http)
    assert send(http, name, PROTOBUF, export(6).SerializeToString()).status == 200
    failed = [f"{number:016x}" for number in (3, 6)]
    for q in ("PAYMENT", '"provider Refused"', "exception", "op:get* payment", 'error.message:"the card"'):
        assert [span["spanId"] for span in search(http, name, q)] == failed, q
    assert [span["spanId"] for span in search(http, name, '"get /Orders/2"')] == [f"{2:016x}"]
    assert search(http, name, '"card the"') == []


def test_rollups_count_spans(http: Wire) -> None:
    name = stream(http)
    assert send(http, name, PROTOBUF, export(6).SerializeToString()).status == 200
    body = {
        "rollup": "http_server",
        "from": START // 1_000_000,
        "to": START // 1_000_000 + 60_000,
        "interval": "1m",
        "group_by": ["service", "http.statusCode"],
    }
    answer = http.post(f"{name}/_aggregate", JSON, json.dumps(body)).json
    (bucket,) = answer["buckets"]
    told = {group["key"]["http.statusCode"]: group["measures"] for group in bucket["groups"]}
    assert {code: measures["requests"]["count"] for code, measures in told.items()} == {"200": 4, "500": 2}
    assert told["500"]["errors"]["count"] == 2
    assert told["500"]["latency"]["max"] == 6.0


def test_pr3_pr4_nothing_planted_is_in_any_file(start_server: StartServer) -> None:
    server = start_server(env=SEALING_ENV)
    http = Wire(server.port)
    name = stream(http)
    planted = {
        "db.statement": SQL,
        "http.url": f"https://h/x?{QUERY}",
        "http.request.header.authorization": SECRET,
        "note": f"see https://h/y?{QUERY}",
    }
    assert send(http, name, PROTOBUF, export(5, **planted).SerializeToString()).status == 200
    direct = {"traceId": "a" * 32, "spanId": "b" * 16, "timestamp": 5, "attributes": planted}
    assert http.post(name, JSON, json.dumps([direct])).status == 204
    assert http.call("POST", "/v1/server/_seal").json == {"sealed": True}
    wait_sealed(server.data_dir)
    http.close()
    server.stop()
    for path in server.data_dir.rglob("*"):
        held = path.read_bytes() if path.is_file() else b""
        for text in (SQL, QUERY, SECRET):
            assert text.encode() not in held, path
    assert not any(text in server.log for text in (SQL, QUERY, SECRET))


def test_bad_spans_are_left_out_and_told(http: Wire) -> None:
    name = stream(http)
    request = export(3)
    request.resource_spans[0].scope_spans[0].spans[1].trace_id = bytes(16)
    answer = send(http, name, PROTOBUF, request.SerializeToString())
    told = ExportTraceServiceResponse.FromString(answer.body).partial_success
    assert (answer.status, told.rejected_spans) == (200, 1)
    assert told.error_message.startswith("otel-traces record.traceId must be")
    assert len(http.get(f"{name}?offset=-1").json) == 2
    before = http.head(name)["stream-next-offset"]
    nothing = send(http, name, JSON, b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"name":"x"}]}]}]}')
    assert nothing.json["partialSuccess"]["rejectedSpans"] == "1"
    assert nothing["stream-next-offset"] == http.head(name)["stream-next-offset"] == before
    assert send(http, name, JSON, b"{}").body == b"{}"


def test_a_large_export_is_stored_whole_and_in_order(http: Wire) -> None:
    name = stream(http)
    assert send(http, name, PROTOBUF, export(1200).SerializeToString()).status == 200
    assert http.get(f"/v1/stream/{name}/_details").json["stream"]["next_offset"] == "1200"
    last = http.post(f"{name}/_search", JSON, json.dumps({"q": "has:traceId", "size": 1})).json["hits"][0]
    assert last["source"]["spanId"] == f"{1200:016x}"


@pytest.mark.parametrize(
    ("media_type", "body", "headers", "status", "message"),
    [
        ("text/plain", b"x", {}, 415, "OTLP traces require application/x-protobuf or application/json"),
        (
            JSON,
            b"{}",
            {"content_encoding": "br"},
            415,
            "Content-Encoding of OTLP traces must be gzip or identity",
        ),
        (JSON, b"{", {}, 400, "OTLP body is not valid JSON"),
        (JSON, b"[]", {}, 400, "OTLP body must be an object"),
        (JSON, b'{"resourceSpans":5}', {}, 400, "OTLP resourceSpans must be an array"),
        (JSON, b'{"resourceSpans":[5]}', {}, 400, "OTLP resourceSpans must be an array of objects"),
        (PROTOBUF, b"\x0a\xff", {}, 400, "OTLP body is not a valid protobuf export"),
        (PROTOBUF, b"\x0b", {}, 400, "OTLP body is not a valid protobuf export"),
        (PROTOBUF, b"nothing", {"content_encoding": "gzip"}, 400, "OTLP body is not valid gzip"),
        (
            PROTOBUF,
            gzip.compress(b"x" * 9)[:-9],
            {"content_encoding": "gzip"},
            400,
            "OTLP body is truncated gzip",
        ),
        (
            PROTOBUF,
            gzip.compress(bytes(17 << 20)),
            {"content_encoding": "gzip"},
            413,
            "OTLP export is larger",
        ),
        (JSON, b'{"resourceSpans":[' + b"{}," * 1024 + b"{}]}", {}, 400, "OTLP export has more than 1024"),
        (JSON, b'{"resourceSpans":' + b"[" * 5000, {}, 400, "OTLP body is not valid JSON"),
    ],
    # Not the bodies: one has thousands of bytes, and gzip writes down the time.
    ids=lambda value: "body" if isinstance(value, bytes) else str(value),
)
def test_exports_that_are_none(
    http: Wire, media_type: str, body: bytes, headers: dict[str, str], status: int, message: str
) -> None:
    name = stream(http)
    answer = send(http, name, media_type, body, **headers)
    assert answer.status == status
    assert answer.json["error"]["message"].startswith(message)
    assert http.get(f"{name}?offset=-1").json == []


def test_a_stream_needs_the_profile_and_a_path_its_method(http: Wire) -> None:
    name = fresh("otlp")
    assert send(http, name, JSON, b"{}").code == "not_found"
    http.put(name, JSON)
    answer = send(http, name, JSON, b"{}")
    assert answer.json["error"] == {
        "code": "invalid_request",
        "message": "OTLP traces require a stream with the otel-traces profile",
    }
    assert http.get(f"{name}/_otlp/v1/traces").code == "method_not_allowed"
    assert http.post(f"{name}/_otlp/v1/metrics", JSON, "{}").code == "not_found"
    assert http.post("/v1/traces", JSON, "{}").code == "not_found"
    assert http.get("/v1/traces").code == "method_not_allowed"


def test_the_profile_comes_before_data_and_needs_json(http: Wire) -> None:
    name = fresh("otlp")
    http.put(name, JSON, "[1]")
    answer = http.post(f"{name}/_profile", JSON, PROFILE)
    message = answer.json["error"]["message"]
    assert message.startswith("otel-traces profile must be installed before appending data; with ?adopt=true")
    plain = fresh("otlp")
    http.put(plain, "text/plain")
    answer = http.post(f"{plain}/_profile", JSON, PROFILE)
    assert (
        answer.json["error"]["message"] == "otel-traces profile requires application/json stream content-type"
    )


def test_records_may_be_appended_without_otlp(http: Wire) -> None:
    name = stream(http)
    span = {"traceId": "A" * 32, "spanId": "b" * 16, "timestamp": "2026-01-01T00:00:00.5Z", "name": " x "}
    assert http.post(name, JSON, json.dumps([span, span])).status == 204
    stored = http.get(f"{name}?offset=-1").json[0]
    assert (stored["traceId"], stored["startUnixNano"], stored["name"]) == (
        "a" * 32,
        "1767225600500000000",
        "x",
    )
    answer = http.post(name, JSON, json.dumps([span, {**span, "spanId": "0" * 16}]))
    assert answer.json["error"]["message"] == (
        "record 1: otel-traces record.spanId must be 16 hex digits that are not all zero"
    )


@pytest.mark.parametrize("auto", ["true", "false"])
def test_the_stream_of_the_settings_is_made_if_they_say_so(
    start_server: StartServer, tmp_path: Path, auto: str
) -> None:
    env = {"TAILRACE_OTLP_TRACES_STREAM": "traces/all", "TAILRACE_OTLP_AUTO_CREATE": auto}
    server = start_server(env=env)
    http = Wire(server.port)
    body = export(3).SerializeToString()
    answer = http.post("/v1/traces", PROTOBUF, body)
    if auto == "false":
        assert (answer.status, answer.code) == (404, "not_found")
        assert http.get("traces/all").status == 404
    else:
        assert answer.status == 200
        assert http.post("/v1/traces", PROTOBUF, body).status == 200
        assert http.get("traces/all/_profile").json["profile"] == {"kind": "otel-traces"}
        http.close()
        server.restart()
        http = Wire(server.port)
        assert len(search(http, "traces/all", "svc:checkout")) == 6
    http.close()


def test_pairs_of_streams_are_told(http: Wire) -> None:
    spans, events = fresh("pair"), fresh("pair")
    for name, profile in (
        (spans, {"kind": "otel-traces", "observability": {"request": {"eventsStream": events}}}),
        (events, {"kind": "evlog", "observability": {"request": {"tracesStream": spans}}}),
    ):
        http.put(name, JSON)
        assert http.post(f"{name}/_profile", JSON, json.dumps({"profile": profile})).status == 200
        pair = {"request": {"events_stream": events, "traces_stream": spans}}
        assert http.get(f"{name}/_details").json["stream"]["observability"] == pair
        (listed,) = http.get(f"/v1/streams?prefix={name}").json
        assert listed["observability"] == pair
    alone = stream(http)
    assert "observability" not in http.get(f"{alone}/_details").json["stream"]


def test_an_export_never_goes_to_a_later_stream_of_that_name(start_server: StartServer) -> None:
    http = Wire(start_server().port)
    asked = request_bytes(
        "POST",
        "/v1/stream/again/_otlp/v1/traces",
        {"Content-Type": PROTOBUF},
        export(1500).SerializeToString(),
    )
    with contextlib.closing(http), http.connect() as sender:
        for _ in range(8):
            assert http.put("again", JSON).status == 201
            assert http.post("again/_profile", JSON, PROFILE).status == 200
            sender.send(asked)
            assert http.delete("again").status == 204
            assert http.put("again", JSON).status == 201
            assert sender.read_answer("POST").status in {200, 400, 404}
            assert http.get("again?offset=-1").json == []
            assert http.delete("again").status == 204


def test_a_stream_may_be_deleted_while_exports_come(start_server: StartServer) -> None:
    """Whatever happens in between, an export is stored whole in the stream it finds, or refused."""
    http = Wire(start_server().port)
    body = export(1500).SerializeToString()
    statuses: list[int] = []

    def sends(port: int) -> None:
        wire = Wire(port)
        statuses.extend(wire.post("racy/_otlp/v1/traces", PROTOBUF, body).status for _ in range(3))
        wire.close()

    assert http.put("racy", JSON).status == 201
    assert http.post("racy/_profile", JSON, PROFILE).status == 200
    senders = [threading.Thread(target=sends, args=(http.port,)) for _ in range(2)]
    for sender in senders:
        sender.start()
    while any(sender.is_alive() for sender in senders):
        assert http.delete("racy").status == 204
        assert http.put("racy", JSON).status == 201
        assert http.post("racy/_profile", JSON, PROFILE).status == 200
    for sender in senders:
        sender.join()
    assert set(statuses) <= {200, 400, 404}
    assert http.get("racy/_details").status == 200
    http.close()
