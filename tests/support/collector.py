"""A collector of traces for tests: a real HTTP server that reads with OpenTelemetry's own package."""

from __future__ import annotations

import queue
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from support.calls import eventually
from support.hooks import Hook


class Seen(NamedTuple):
    """One span, as a collector sees it."""

    span: Span
    resource: dict[str, Any]

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def attributes(self) -> dict[str, Any]:
        return _plain(self.span.attributes)


class Collector(Hook):
    """Answers 200 until it is told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.base_url = self.url.removesuffix("/hook")
        self.spans: list[Seen] = []
        self.paths: set[str] = set()
        self.sent_headers: list[dict[str, str]] = []

    def received(self) -> list[Seen]:
        """All spans so far."""
        while True:
            try:
                call = self.calls.get_nowait()
            except queue.Empty:
                return list(self.spans)
            self.paths.add(call.path)
            self.sent_headers.append(call.headers)
            for group in ExportTraceServiceRequest.FromString(call.raw).resource_spans:
                resource = _plain(group.resource.attributes)
                for scope in group.scope_spans:
                    self.spans += [Seen(span, resource) for span in scope.spans]

    def wait_for(self, name: str) -> list[Seen]:
        """The spans of this name, as soon as there is one."""
        return eventually(lambda: [seen for seen in self.received() if seen.name == name], bool)


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
