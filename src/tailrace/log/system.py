"""Streams of the server itself whose bounds are settings, not something the journal says."""

from __future__ import annotations

from typing import Final

from tailrace.log import outbox, registry

METRICS_STREAM: Final = "__stream_metrics__"
AUDIT_STREAM: Final = "__audit__"
BOUNDED_STREAMS: Final = (registry.REGISTRY_STREAM, outbox.SEGMENTS_STREAM, METRICS_STREAM, AUDIT_STREAM)
