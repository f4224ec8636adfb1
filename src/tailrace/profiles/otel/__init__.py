"""The `otel-traces` profile: spans, one record each, and how OpenTelemetry sends them."""

from __future__ import annotations
