"""Records by profile: what becomes of them, and the words of each refusal."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tailrace.common.errors import TailraceError
from tailrace.schema.profiles import metrics, state_protocol
from tailrace.schema.profiles.evlog import Evlog, EvlogConfig, evlog_routing_key
from tailrace.schema.profiles.normalisation import KEYS_CACHED_MAX, PATHS_MAX, REDACTED, SecretKeys, redact

NOW_MS = 1_763_244_775_603
NOW = "2025-11-15T22:12:55.603Z"
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


def event(given: dict[str, Any], **config: Any) -> dict[str, Any]:
    return Evlog(EvlogConfig(**config)).normalise(given, NOW_MS)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {"timestamp": NOW, "level": "info", "service": None, "context": {}, "redaction": {"keys": []}}),
        ({"timestamp": 0}, {"timestamp": "1970-01-01T00:00:00.000Z", "context": {}}),
        ({"timestamp": " 2026-01-01T00:00:00+02:00 "}, {"timestamp": "2026-01-01T00:00:00+02:00"}),
        ({"timestamp": "2026-02-30T00:00:00.000Z"}, {"timestamp": NOW}),
        ({"timestamp": "soon"}, {"timestamp": NOW, "context": {"timestamp": "soon"}}),
        ({"timestamp": 1e18}, {"timestamp": NOW, "context": {"timestamp": 1e18}}),
        ({"timestamp": True}, {"timestamp": NOW, "context": {"timestamp": True}}),
        ({"timestamp": "", "service": "  "}, {"timestamp": NOW, "service": None, "context": {}}),
        ({"status": " 404 ", "duration": "1.5e2"}, {"status": 404, "duration": 150.0, "level": "warn"}),
        ({"status": 200.0, "duration": 7}, {"status": 200, "duration": 7}),
        ({"status": 2.5, "duration": "1e999"}, {"status": None, "duration": None}),
        ({"status": "x", "duration": True}, {"status": None, "duration": None}),
        ({"level": " WARN "}, {"level": "warn"}),
        ({"level": "fatal", "status": 503}, {"level": "error"}),
        ({"why": "no stock"}, {"level": "error", "why": "no stock"}),
        ({"context": {"requestId": " r1 "}}, {"requestId": "r1"}),
        ({"requestId": "r2", "context": {"requestId": "r1"}}, {"requestId": "r2"}),
        ({"context": 5, "a": 1}, {"context": {"context": 5, "a": 1}}),
        ({"context": {"a": 0, "b": 2}, "a": 1}, {"context": {"a": 1, "b": 2}}),
        (
            {"traceId": "0" * 32, "traceContext": {"traceId": "t", "spanId": "s"}},
            {"traceId": "t", "spanId": "s"},
        ),
        ({"traceparent": PARENT}, {"traceId": TRACE, "spanId": SPAN}),
        ({"headers": {"traceparent": PARENT.upper()}}, {"traceId": TRACE, "spanId": SPAN}),
        ({"context": {"traceparent": PARENT}, "traceparent": "bad"}, {"traceId": TRACE, "spanId": SPAN}),
        ({"traceparent": f"00-{'0' * 32}-{SPAN}-01"}, {"traceId": None, "spanId": None}),
        ({"sampling": {"rate": 0.1}}, {"sampling": {"rate": 0.1}}),
    ],
)
def test_events(given: dict[str, Any], found: dict[str, Any]) -> None:
    record = event(given)
    assert {key: record[key] for key in found} == found


def test_pr3_secrets_are_replaced_and_their_places_listed() -> None:
    record = event(
        {
            "password": "p",
            "user": {"Token": "t", "cards": [{"APIKEY": "k", "last": 4}]},
            "context": {"cookie": {"a": 1}, "pin": 7},
        },
        redact_keys=("pin",),
    )
    assert record["redaction"] == {"keys": ["cookie", "password", "pin", "user.Token", "user.cards.0.APIKEY"]}
    assert record["context"]["user"] == {
        "Token": "[REDACTED]",
        "cards": [{"APIKEY": "[REDACTED]", "last": 4}],
    }
    assert record["context"]["cookie"] == record["context"]["pin"] == "[REDACTED]"


def test_pr3_lists_of_places_are_bounded_and_replacement_is_not() -> None:
    record = event({"items": [{"token": "planted"} for _ in range(PATHS_MAX + 5)]})
    assert len(record["redaction"]["keys"]) == PATHS_MAX
    assert "planted" not in str(record)
    deep: dict[str, Any] = {"token": "planted"}
    for _ in range(500):
        deep = {"k" * 2000: deep, "token": "planted"}
    record = event(deep)
    assert "planted" not in str(record)
    assert sum(map(len, record["redaction"]["keys"])) < 1_000_000


def test_correlation_paths_lead_into_the_event_and_its_context() -> None:
    config = {"request_id_fields": ("headers.rid",), "trace_context_fields": ("otel.traceId",)}
    record = event({"headers": {"rid": "h"}, "requestId": "own", "otel": {"traceId": "t"}}, **config)
    assert (record["requestId"], record["traceId"], evlog_routing_key(record)) == ("h", "t", "h")
    record = event({"requestId": "own", "traceparent": PARENT}, parse_traceparent=False, **config)
    assert (record["requestId"], record["traceId"], evlog_routing_key(record)) == (None, None, None)


INTERVAL: dict[str, Any] = {
    "metric": "latency",
    "unit": "ms",
    "windowStart": 1000,
    "windowEnd": 11000,
    "count": 4,
    "sum": 20,
}


def test_an_interval_is_completed() -> None:
    record = metrics.normalise_metric(
        INTERVAL
        | {
            "stream": "orders",
            "tags": {"é": True, "b": 2, "a": 1.5, "none": None},
            "buckets": {"4": 3, "16": 1},
        }
    )
    assert list(cast("dict[str, str]", record["tags"])) == ["a", "b", "é"]
    assert record["attributes"] == record["tags"] == {"a": "1.5", "b": "2", "é": "true"}
    assert record["dimensionPairs"] == ["a=1.5", "b=2", "é=true"]
    assert record["seriesKey"] == "summary|delta|latency|ms|orders||a=1.5\0b=2\0é=true"
    assert (record["intervalMs"], record["avg"], record["p50"], record["p99"]) == (10_000, 5, 4, 16)
    assert (record["min"], record["max"], record["instance"]) == (None, None, None)
    assert record["summary"] == {
        "count": 4,
        "sum": 20,
        "min": None,
        "max": None,
        "histogram": {"4": 3, "16": 1},
    }


def test_a_summary_may_hold_the_numbers() -> None:
    given = {key: value for key, value in INTERVAL.items() if key not in ("count", "sum")}
    record = metrics.normalise_metric(
        given | {"summary": {"count": 2.0, "sum": 3, "min": 1, "max": 2, "histogram": {"1": 2}}}
    )
    assert [record[key] for key in ("count", "sum", "min", "max", "p50")] == [2, 3, 1, 2, 1]
    empty = metrics.normalise_metric(INTERVAL | {"count": 0, "sum": 0, "min": 5})
    assert [empty[key] for key in ("min", "avg", "p95", "dimensionKey")] == [None, 0, 0, None]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metric": " "}, "metrics record.metric must be a non-empty string"),
        ({"unit": None}, "metrics record.unit must be a non-empty string"),
        ({"windowStart": "1"}, "metrics record.windowStart and windowEnd must be integers"),
        ({"windowEnd": 1.5}, "metrics record.windowStart and windowEnd must be integers"),
        ({"windowEnd": 999}, "metrics record.windowEnd must be >= windowStart"),
        ({"count": None}, "metrics interval requires count"),
        ({"count": -1}, "metrics interval requires count"),
        ({"sum": True}, "metrics interval requires sum"),
        ({"sum": 10**400}, "metrics interval requires sum"),
        ({"kind": "event"}, "metrics record.kind must be interval"),
        ({"intervalMs": -1}, "metrics record.intervalMs must be an integer >= 0"),
        ({"stream": 5}, "metrics record.stream must be a string"),
        ({"p50": "x"}, "metrics record.p50 must be a number"),
        ({"tags": [1]}, "metrics record.tags must be an object"),
        ({"tags": {"a": []}}, "metrics record.tags.a must be a string, a number or a boolean"),
        ({"buckets": {"1": -1}}, "metrics record.buckets.1 must be a number >= 0"),
        ({"summary": 1}, "metrics record.summary must be an object"),
    ],
)
def test_intervals_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TailraceError) as refusal:
        metrics.normalise_metric(INTERVAL | change)
    assert refusal.value.message == message


def test_only_objects_are_records() -> None:
    for call, message in (
        (lambda: event(cast("Any", [])), "evlog record must be an object"),
        (lambda: metrics.normalise_metric(1), "metrics record must be an object"),
        (lambda: state_protocol.check_state_record("x"), "state-protocol records must be JSON objects"),
    ):
        with pytest.raises(TailraceError) as refusal:
            call()
        assert refusal.value.message == message


INSERT: dict[str, Any] = {"type": "todos", "key": "1", "value": {"a": 1}, "headers": {"operation": "insert"}}


def test_changes_and_controls_are_told_apart() -> None:
    change = state_protocol.parse_change(INSERT | {"old_value": 5})
    assert change == state_protocol.Change("todos", "insert", 5, {"a": 1})
    for control in state_protocol.CONTROLS:
        record = {"headers": {"control": control, "offset": "0"}}
        state_protocol.check_state_record(record)
        assert state_protocol.parse_change(record) is None
    assert state_protocol.parse_change({"older": "than the profile"}) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"headers": None}, "record.headers must be an object"),
        ({"headers": {}}, "record.headers must have either operation or control"),
        (
            {"headers": {"operation": "insert", "control": "reset"}},
            "record.headers must have either operation or control",
        ),
        ({"headers": {"operation": "upsert"}}, "record.headers.operation must be insert, update, or delete"),
        (
            {"headers": {"control": []}},
            "record.headers.control must be snapshot-start, snapshot-end, or reset",
        ),
        ({"headers": {"control": "reset"}}, "record.type is not supported"),
        ({"headers": {"operation": "insert", "x": 1}}, "record.headers.x is not supported"),
        ({"headers": {"operation": "insert", "txid": 1}}, "record.headers.txid must be a string"),
        (
            {"headers": {"operation": "insert", "timestamp": "now"}},
            "record.headers.timestamp must be an RFC 3339 date-time",
        ),
        ({"type": ""}, "record.type must be a non-empty string"),
        ({"key": 1}, "record.key must be a non-empty string"),
        ({"extra": 1}, "record.extra is not supported"),
    ],
)
def test_state_records_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TailraceError) as refusal:
        state_protocol.check_state_record(INSERT | change)
    assert refusal.value.message == f"state-protocol {message}"


def test_inserts_and_updates_need_a_value() -> None:
    record = {"type": "todos", "key": "1", "headers": {"operation": "delete"}}
    state_protocol.check_state_record(record)
    for operation in ("insert", "update"):
        with pytest.raises(TailraceError) as refusal:
            state_protocol.check_state_record(record | {"headers": {"operation": operation}})
        assert refusal.value.message == f"state-protocol {operation} records must include value"


def test_keys_are_remembered_within_bounds_and_secrets_found_beyond_them() -> None:
    secrets = SecretKeys(frozenset({"token"}))
    for number in range(KEYS_CACHED_MAX + 10):
        assert redact({f"key {number}": "x"}, secrets) == []
    assert len(secrets.harmless) == KEYS_CACHED_MAX
    record: dict[str, object] = {"deep": [{"ToKeN": "x"}], "x" * 500: {"token": 1}}
    assert redact(record, secrets) == ["deep.0.ToKeN", "x" * 500 + ".token"]
    assert len(secrets.harmless) == KEYS_CACHED_MAX
    assert record == {"deep": [{"ToKeN": REDACTED}], "x" * 500: {"token": REDACTED}}
