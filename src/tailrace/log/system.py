"""Streams of the server itself whose bounds are settings, not something the journal says."""

from __future__ import annotations

from typing import Final

from tailrace.log import outbox, registry

METRICS: Final = "__stream_metrics__"
AUDIT: Final = "__audit__"
BOUNDED: Final = (registry.NAME, outbox.NAME, METRICS, AUDIT)
