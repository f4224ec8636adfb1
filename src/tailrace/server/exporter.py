"""Sends spans to a collector, on a thread of its own. What it cannot send in time is dropped and counted.

The loop only appends to a queue of bounded length. The thread sleeps while there is nothing to send, gathers
for a moment once there is, and sends everything in batches.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

import httpx2

from tailrace.server.otlp import encode_export
from tailrace.server.span import AttributeValue, Span

logger = logging.getLogger("tailrace.traces")

COLLECTOR_PATH: Final = "/v1/traces"
QUEUE_SPANS_MAX: Final = 4096  # a span is about a kilobyte at most
BATCH_SPANS_MAX: Final = 512
BATCH_WAIT_S: Final = 1.0
ATTEMPT_TIMEOUT_S: Final = 10.0
RETRY_PAUSES_S: Final = (1.0, 2.0)  # between tries of one batch
STOP_S: Final = 5.0
RETRY_STATUSES: Final = frozenset({429, 502, 503, 504})  # the collector asks to be tried again


class SpanExporter:
    """Owned by the loop thread; `submit` is all that it calls while the server runs."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        resource: Mapping[str, AttributeValue],
        version: str,
        *,
        gather_s: float = BATCH_WAIT_S,
    ) -> None:
        self._url = traces_url(url)
        self._headers = {**headers, "Content-Type": "application/x-protobuf"}
        self._resource = dict(resource)
        self._version = version
        self._gather_s = gather_s
        self._queue: deque[Span] = deque()
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._told = False  # that the collector does not answer
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        # Each is added to by one thread only.
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
        """Sends what is left, but holds nobody up for long."""
        self._ending.set()
        self._wake.set()
        self._thread.join(STOP_S)

    def _run(self) -> None:
        with httpx2.Client(timeout=ATTEMPT_TIMEOUT_S) as http:
            while not self._ending.is_set() or self._queue:
                self._wake.wait()
                self._ending.wait(self._gather_s)
                self._wake.clear()
                while self._queue:
                    self._send(http)

    def _send(self, http: httpx2.Client) -> None:
        count = min(len(self._queue), BATCH_SPANS_MAX)
        body = encode_export([self._queue.popleft() for _ in range(count)], self._resource, self._version)
        trouble = ""
        for pause_s in (*RETRY_PAUSES_S, 0.0):
            trouble, again = self._post(http, body)
            if not trouble:
                self.exported += count
                self._told = False
                return
            if not again or self._ending.wait(pause_s):
                break
        self.failed += count
        if not self._told:
            self._told = True
            logger.warning("%d spans could not be exported: %s; further failures are counted", count, trouble)

    def _post(self, http: httpx2.Client, body: bytes) -> tuple[str, bool]:
        """What is wrong, and whether to try again."""
        try:
            answer = http.post(self._url, content=body, headers=self._headers)
        except httpx2.HTTPError as error:
            return f"{type(error).__name__}: {error}", True
        if answer.is_success:
            return "", False
        return f"the collector answered {answer.status_code}", answer.status_code in RETRY_STATUSES


def traces_url(url: str) -> str:
    """The base of a collector gets the path that spans go to; any other path is taken as it is."""
    parts = urlsplit(url)
    return url if parts.path.strip("/") else parts._replace(path=COLLECTOR_PATH).geturl()


def parse_header_list(text: str) -> dict[str, str]:
    """`name=value,name=value`, as other exporters take them."""
    pairs = (part.partition("=") for part in text.split(",") if part.strip())
    return {name.strip(): value.strip() for name, _, value in pairs}
