"""Spans of an export on their way to appends: in batches, and never more than an export may take."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tailrace.schema.profiles.otlp_export import SpanExport
from tailrace.schema.profiles.otlp_json import read_json
from tailrace.schema.profiles.profile import OtelTracesProfile
from tailrace.server import otlp_routes
from tailrace.server.otlp_routes import APPEND_SPANS, SpanBatcher

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PROFILE = OtelTracesProfile({"kind": "otel-traces"}, "profile")


def export_of(spans: int, resource: str = "x", *, wrong: int = 0) -> tuple[SpanExport, SpanBatcher]:
    """So many spans of one resource; the first few of them have no usable id."""
    listed = [
        {"traceId": TRACE, "spanId": f"{n + 1 - wrong if n >= wrong else 0:016x}", "startTimeUnixNano": "1"}
        for n in range(spans)
    ]
    attribute: dict[str, Any] = {"key": "about", "value": {"stringValue": resource}}
    body = {"resourceSpans": [{"resource": {"attributes": [attribute]}, "scopeSpans": [{"spans": listed}]}]}
    batches = SpanBatcher(PROFILE, 0)
    export = SpanExport(PROFILE.config.otlp_limits, batches.add)
    read_json(orjson.dumps(body), export)
    return export, batches


def test_spans_become_batches_and_are_not_kept_as_objects() -> None:
    export, batches = export_of(APPEND_SPANS + 3, wrong=2)
    assert [len(batch.lengths) for batch in batches.all] == [APPEND_SPANS, 1]
    assert [len(batch.body()) for batch in batches.all] == [
        batch.size + len(batch.lengths) - 1 for batch in batches.all
    ]
    assert {key for batch in batches.all for key in batch.keys} == {TRACE}
    assert (export.spans, export.rejected) == ([], 2)
    assert export.reason.startswith("otel-traces record.spanId")
    first = orjson.loads(b"[" + batches.all[0].body() + b"]")[0]
    assert (first["spanId"], first["resource"]["attributes"]) == (f"{1:016x}", {"about": "x"})


def test_what_a_resource_says_counts_in_every_span(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp_routes, "EXPORT_BYTES", 50_000)
    export, batches = export_of(20, "x" * 8000)
    assert 30_000 < sum(batch.size for batch in batches.all) <= 50_000
    assert sum(len(batch.lengths) for batch in batches.all) + export.rejected == 20
    assert export.reason == "the normalised export must have at most 50000 bytes"
