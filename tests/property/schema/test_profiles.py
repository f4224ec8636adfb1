"""Normalisers against anything: once is enough, what is stored is valid, and secrets are gone."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.common.errors import TailraceError
from tailrace.schema.json_schema import compile_schema
from tailrace.schema.json_values import decode_json_record, encode_json_record
from tailrace.schema.profiles import canonical_registries, metrics
from tailrace.schema.profiles.evlog import EVLOG_KEYS, EVLOG_SECRETS, Evlog, EvlogConfig, parse_evlog
from tailrace.schema.profiles.normalisation import REDACTED
from tailrace.schema.search_config import parse_search_config

COMMON = settings(max_examples=60, deadline=None)
NOW_MS = 1_763_244_775_603
SECRET = "hunter2-planted"

EVLOG_VALIDATOR = compile_schema(canonical_registries.EVLOG_REGISTRY["schema"])
METRICS_VALIDATOR = compile_schema(canonical_registries.METRICS_REGISTRY["schema"])

texts = st.text(max_size=12) | st.sampled_from(
    [" x ", "", "0000", "info", "ERROR", "200", "1.5e3", "[REDACTED]"]
)
instants = st.sampled_from(
    [
        "2026-11-15T22:12:55.603Z",
        " 2026-11-15T22:12:55+01:00 ",
        "2026-02-30T00:00:00.000Z",
        "0000-01-01T00:00:00Z",
    ]
)
parents = st.sampled_from(
    [
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "00-" + "0" * 32 + "-00f067aa0ba902b7-01",
        "00-4BF92F3577B34DA6A3CE929D0E0E4737-00F067AA0BA902B8-00-more",
    ]
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
    | instants
    | parents
)
names = st.sampled_from(
    [
        *EVLOG_KEYS,
        "traceparent",
        "traceContext",
        "headers",
        "rid",
        "password",
        "Token",
        "APIKEY",
        "card",
        "items",
    ]
) | st.text(max_size=5)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=8,
)
objects = st.dictionaries(
    st.sampled_from(["requestId", "traceId", "spanId", "traceparent", "rid", "Token", "a"]),
    values,
    max_size=4,
)
# Every canonical key is there as often as not, so that a pass has something to do.
events = st.builds(
    lambda usual, others: {**others, **usual},
    st.fixed_dictionaries(
        {},
        optional={
            **dict.fromkeys(EVLOG_KEYS, scalars),
            **dict.fromkeys(("context", "headers", "traceContext", "card"), objects | scalars),
            "traceparent": parents,
            "rid": texts,
        },
    ),
    st.dictionaries(names, values, max_size=4),
)
paths = st.sampled_from(
    [
        "requestId",
        "context.requestId",
        "rid",
        "headers.rid",
        "context.headers.rid",
        "headers.traceId",
        "card.spanId",
    ]
)
configurations = st.builds(
    EvlogConfig,
    redact_keys=st.lists(st.sampled_from(["card", "rid", "traceparent", "tracecontext"]), max_size=2).map(
        tuple
    ),
    request_id_fields=st.none() | st.lists(paths, max_size=3).map(tuple),
    trace_context_fields=st.none() | st.lists(paths, max_size=3).map(tuple),
    parse_traceparent=st.booleans(),
)


@COMMON
@given(events, configurations)
def test_pr1_pr2_events_are_normal_after_one_pass_and_valid(
    event: dict[str, Any], config: EvlogConfig
) -> None:
    profile = Evlog(config)
    stored = encode_json_record(profile.normalise(event, NOW_MS))
    record: Any = decode_json_record(stored)
    assert tuple(record) == EVLOG_KEYS
    assert EVLOG_VALIDATOR.complaint(record) is None
    assert encode_json_record(profile.normalise(record, NOW_MS + 1)) == stored


@COMMON
@given(events, st.sampled_from([*sorted(EVLOG_SECRETS), "Card", "PassWord"]), st.data())
def test_pr3_no_redacted_value_is_left(event: dict[str, Any], key: str, data: st.DataObject) -> None:
    """The secret lies under its key: among arrays, in the context, beside the canonical keys."""
    planted: dict[str, Any] = {key: data.draw(st.sampled_from([SECRET, [SECRET], {"deep": [{"x": SECRET}]}]))}
    place = data.draw(st.sampled_from(["top", "context", "array", "headers", "sampling"]))
    if place == "top":
        event |= planted
    elif place == "array":
        event["list"] = [1, [planted, {"a": copy.deepcopy(planted)}]]
    else:
        event[place] = planted
    config = EvlogConfig(
        redact_keys=("card",),
        request_id_fields=(f"context.{key}", f"headers.{key}", key, "requestId"),
        trace_context_fields=(f"headers.{key}.traceId",),
    )
    stored = encode_json_record(Evlog(config).normalise(event, NOW_MS))
    assert SECRET.encode() not in stored
    assert REDACTED.encode() in stored


numbers = st.integers(-(10**6), 10**6) | st.floats(allow_nan=False, allow_infinity=False) | st.none()
intervals = st.fixed_dictionaries(
    {
        "metric": st.sampled_from(["cpu", " requests "]),
        "unit": st.just("ms"),
        "windowStart": st.integers(0, 10**13) | st.just(1e12),
        "count": st.integers(0, 10**9),
        "sum": st.integers(-(10**9), 10**9) | st.floats(-1e300, 1e300),
    },
    optional={
        "windowLength": st.integers(0, 10**6),
        "kind": st.sampled_from(["interval", None]),
        "stream": texts,
        "instance": texts,
        "tags": st.dictionaries(texts, scalars, max_size=4),
        "attributes": st.dictionaries(texts, scalars, max_size=4),
        "buckets": st.dictionaries(st.sampled_from(["1", "2", "4", "0.5", "x", "-8"]), st.integers(0, 9)),
        **dict.fromkeys(("min", "max", "avg", "p50", "p95", "p99"), numbers),
        "summary": st.fixed_dictionaries({}, optional={"min": numbers, "histogram": st.just({"8": 2})}),
        "sketch": values,
        "other": values,
    },
)


@COMMON
@given(intervals)
def test_pr1_pr2_intervals_are_normal_after_one_pass_and_valid(interval: dict[str, Any]) -> None:
    interval["windowEnd"] = int(interval["windowStart"]) + interval.pop("windowLength", 0)
    stored = encode_json_record(metrics.normalise_metric(interval))
    record: Any = decode_json_record(stored)
    assert METRICS_VALIDATOR.complaint(record) is None
    assert encode_json_record(metrics.normalise_metric(record)) == stored


@COMMON
@given(values)
def test_pr2_whatever_comes_is_refused_in_words_or_made_valid(value: Any) -> None:
    for normalise, validator in (
        (metrics.normalise_metric, METRICS_VALIDATOR),
        (lambda record: Evlog(EvlogConfig()).normalise(record, NOW_MS), EVLOG_VALIDATOR),
    ):
        try:
            record = normalise(copy.deepcopy(value))
        except TailraceError:
            continue
        assert validator.accepts(record)


@COMMON
@given(st.dictionaries(st.sampled_from(["redactKeys", "correlation", "observability", "other"]), values))
def test_a_configuration_is_refused_in_words_or_comes_back_as_it_was_read(body: dict[str, Any]) -> None:
    try:
        config = parse_evlog({"kind": "evlog", **body}, "profile")
    except TailraceError:
        return
    assert parse_evlog(config.to_json(), "profile") == config


def test_canonical_search_objects_are_accepted() -> None:
    aliases = parse_search_config(canonical_registries.EVLOG_REGISTRY["search"]).aliases
    assert " ".join(aliases) == "env msg req span time trace ts"
    assert "dimensionPairs" in parse_search_config(canonical_registries.METRICS_REGISTRY["search"]).fields
