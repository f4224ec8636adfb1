"""Puts tracing together and connects it with what is traced."""

from __future__ import annotations

from tailrace import __version__
from tailrace.routing.context import Context
from tailrace.server.exporter import SpanExporter, parse_header_list
from tailrace.server.pipeline_state import PipelineState
from tailrace.server.tracer import Tracer
from tailrace.storage.sealing import SealingService
from tailrace.subscriptions.webhooks import WebhookSender


class Tracing:
    """Made only where `traces_url` says where spans go."""

    def __init__(self, context: Context) -> None:
        settings = context.settings
        resource = {
            "service.name": "tailrace",
            "service.version": __version__,
            "service.instance.id": context.deployment,
        }
        self._exporter = SpanExporter(
            settings.traces_url, parse_header_list(settings.traces_headers), resource, __version__
        )
        self.tracer = Tracer(settings.traces_one_in, context.clock, self._exporter.submit)
        reads = context.telemetry.trace_spans.reads
        reads[("exported",)] = lambda: self._exporter.exported
        reads[("failed",)] = lambda: self._exporter.failed
        reads[("dropped",)] = lambda: self._exporter.dropped

    def connect(self, sealing: SealingService, pipeline: PipelineState, webhooks: WebhookSender) -> None:
        sealing.runs.on_run = self.tracer.sealed
        pipeline.on_beat = self.tracer.heard
        webhooks.trace = self.tracer.webhook

    def start(self) -> None:
        self._exporter.start()

    def close(self) -> None:
        self._exporter.close()
