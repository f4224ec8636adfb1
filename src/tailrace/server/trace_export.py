"""Export of spans to an OTLP collector: encoding (`ExportTraceServiceRequest`), sending thread, and wiring.

The event loop appends spans to a bounded queue; when it is full they are dropped and counted. A thread waits
a moment after the first span and sends the queue in batches.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

import httpx2

from tailrace import __version__
from tailrace.common.logging_setup import log_fields
from tailrace.routing.context import Context
from tailrace.schema.profiles.otlp_export import write_bytes, write_fixed64, write_varint
from tailrace.server.tracing import TEXT_MAX, AttributeValue, Span, Tracer

_ERROR: Final = 2


def encode_export(spans: Sequence[Span], resource: Mapping[str, AttributeValue], version: str) -> bytes:
    """`resource` identifies this server: at least `service.name`."""
    described = b"".join(_attribute(1, name, value) for name, value in resource.items())
    scope = _text(1, "tailrace") + _text(2, version)
    scoped = write_bytes(1, scope) + b"".join(write_bytes(2, encode_span(span)) for span in spans)
    return write_bytes(1, write_bytes(1, described) + write_bytes(2, scoped))


def encode_span(span: Span) -> bytes:
    context = span.context
    parts = [write_bytes(1, context.trace_id), write_bytes(2, context.span_id)]
    if span.tracestate:
        parts.append(_text(3, span.tracestate))
    if span.parent_id:
        parts.append(write_bytes(4, span.parent_id))
    parts += [_text(5, span.name[:TEXT_MAX]), write_varint(6, span.kind)]
    parts += [write_fixed64(7, span.begun_ns), write_fixed64(8, max(span.begun_ns, span.ended_ns))]
    parts += [_attribute(9, name, value) for name, value in span.attributes.items()]
    if span.failed:
        parts.append(write_bytes(15, write_varint(3, _ERROR)))
    return b"".join(parts)


def _attribute(number: int, name: str, value: AttributeValue) -> bytes:
    written = write_varint(3, value) if isinstance(value, int) else _text(1, value[:TEXT_MAX])
    return write_bytes(number, _text(1, name) + write_bytes(2, written))


def _text(number: int, text: str) -> bytes:
    return write_bytes(number, text.encode("utf-8", "replace"))


logger = logging.getLogger("tailrace.traces")

COLLECTOR_PATH: Final = "/v1/traces"
QUEUE_SPANS_MAX: Final = 4096  # a span has at most about a kilobyte
BATCH_SPANS_MAX: Final = 512
BATCH_WAIT_S: Final = 1.0
ATTEMPT_TIMEOUT_S: Final = 10.0
RETRY_PAUSES_S: Final = (1.0, 2.0)  # between attempts for one batch
STOP_S: Final = 5.0
RETRY_STATUSES: Final = frozenset({429, 502, 503, 504})  # retryable according to the OTLP specification


class SpanExporter:
    """Sends spans on a thread of its own; the event loop only calls `submit` while the server runs."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        resource: Mapping[str, AttributeValue],
        version: str,
        *,
        batch_wait_s: float = BATCH_WAIT_S,
    ) -> None:
        self._url = traces_url(url)
        self._headers = {**headers, "Content-Type": "application/x-protobuf"}
        self._resource = dict(resource)
        self._version = version
        self._batch_wait_s = batch_wait_s
        self._queue: deque[Span] = deque()
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._failure_logged = False
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        # Each counter is incremented by one thread only.
        self.exported = 0
        self.failed = 0
        self.dropped = 0

    def start(self) -> None:
        self._thread.start()

    def submit(self, span: Span) -> None:
        if len(self._queue) >= QUEUE_SPANS_MAX:
            self.dropped += 1
            return
        self._queue.append(span)
        if not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        """Send the remaining spans, for at most STOP_S."""
        self._ending.set()
        self._wake.set()
        self._thread.join(STOP_S)

    def _run(self) -> None:
        with httpx2.Client(timeout=ATTEMPT_TIMEOUT_S) as http:
            while not self._ending.is_set() or self._queue:
                self._wake.wait()
                self._ending.wait(self._batch_wait_s)
                self._wake.clear()
                while self._queue:
                    self._send(http)

    def _send(self, http: httpx2.Client) -> None:
        count = min(len(self._queue), BATCH_SPANS_MAX)
        body = encode_export([self._queue.popleft() for _ in range(count)], self._resource, self._version)
        error_text = ""
        for pause_s in (*RETRY_PAUSES_S, 0.0):
            error_text, retry = self._post(http, body)
            if not error_text:
                self.exported += count
                self._failure_logged = False
                return
            if not retry or self._ending.wait(pause_s):
                break
        self.failed += count
        if not self._failure_logged:
            self._failure_logged = True
            logger.warning(
                "cannot export spans, counting further failures",
                extra=log_fields(spans=count, error=error_text),
            )

    def _post(self, http: httpx2.Client, body: bytes) -> tuple[str, bool]:
        """The error, if any, and whether to retry."""
        try:
            response = http.post(self._url, content=body, headers=self._headers)
        except httpx2.HTTPError as error:
            return f"{type(error).__name__}: {error}", True
        if response.is_success:
            return "", False
        return f"the collector responded with {response.status_code}", response.status_code in RETRY_STATUSES


def traces_url(url: str) -> str:
    """A URL without a path gets the standard path for traces; any other path is left as it is."""
    parts = urlsplit(url)
    return url if parts.path.strip("/") else parts._replace(path=COLLECTOR_PATH).geturl()


def parse_header_list(text: str) -> dict[str, str]:
    """Parse `name=value,name=value`, the format of OTEL_EXPORTER_OTLP_HEADERS."""
    pairs = (part.partition("=") for part in text.split(",") if part.strip())
    return {name.strip(): value.strip() for name, _, value in pairs}


class Tracing:
    """Tracer and exporter of a server; only created if `traces_url` is set."""

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

    def start(self) -> None:
        self._exporter.start()

    def close(self) -> None:
        self._exporter.close()
