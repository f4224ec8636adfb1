"""Writes `__stream_metrics__`: one append for each interval, and never at the expense of anybody else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import orjson

from tailrace.common.clock import Clock
from tailrace.common.errors import TailraceError
from tailrace.log.decide import AppendRequest, CreateRequest
from tailrace.log.log import Log
from tailrace.log.model import NO_LIFETIME, Lifetime, Stream
from tailrace.log.publish import TrafficCounts
from tailrace.log.system_streams import METRICS_STREAM
from tailrace.log.transaction import ignore_reply
from tailrace.schema.profiles.canonical_registries import METRICS_SCHEMA_REGISTRY
from tailrace.schema.profiles.profile import API_VERSION
from tailrace.schema.registry import Registry, VersionBoundary
from tailrace.server.series import MetricInterval, SeriesRecorder

logger = logging.getLogger("tailrace.metrics")

JSON_CONTENT_TYPE = "application/json"
METRICS_PROFILE = orjson.dumps({"apiVersion": API_VERSION, "profile": {"kind": "metrics"}})


class MetricsWriter:
    """The stream is there from the start: a reader may follow it before the first interval is over."""

    def __init__(self, log: Log, clock: Clock, loop: asyncio.AbstractEventLoop, book: SeriesRecorder) -> None:
        self._log = log
        self._clock = clock
        self._loop = loop
        self._book = book
        self._flush_s = log.limits.metrics_flush_ms / 1000
        self._since_ms = self._now_ms()
        self._timer: asyncio.TimerHandle | None = None
        self.failures = 0

    def start(self) -> None:
        if self._flush_s:
            self._log.publisher.traffic = TrafficCounts()
            self._log.reader.served = TrafficCounts()
            self._try(self.stream)
            self._timer = self._loop.call_later(self._flush_s, self._due)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _due(self) -> None:
        self._timer = self._loop.call_later(self._flush_s, self._due)
        self.flush()

    def flush(self) -> None:
        """Whatever goes wrong is counted, and told once."""
        self._try(self._flush)

    def _try(self, write: Callable[[], object]) -> None:
        """A failure stays here: the next flush tries again."""
        try:
            write()
        except Exception as error:
            self.failures += 1
            if self.failures == 1:
                known = isinstance(error, TailraceError)
                logger.warning("metrics are not written: %s", error, exc_info=None if known else error)
        else:
            self.failures = 0

    def _flush(self) -> None:
        traffic, served = self._log.publisher.traffic, self._log.reader.served
        if traffic is None or served is None:
            return
        window = MetricInterval(self._since_ms, self._now_ms())
        self._since_ms = window.end_ms
        records = self._book.records(window, *traffic.take(), served.take())
        if not records:
            return
        entries = [orjson.dumps(record) for record in records]
        request = AppendRequest(b",".join(entries), JSON_CONTENT_TYPE, [len(entry) for entry in entries])
        self._log.append(self.stream(), request, ignore_reply, None)

    def stream(self) -> Stream:
        """Made with all that belongs to it, if it is not there."""
        name = METRICS_STREAM + self._log.own_suffix
        stream = self._log.find(name)
        if stream is None:
            self._log.create(CreateRequest(name, JSON_CONTENT_TYPE), ignore_reply, None)
            stream = self._log.existing(name)
            registry = Registry(
                name=name,
                version=1,
                boundaries=(VersionBoundary(0, 1),),
                schemas={1: METRICS_SCHEMA_REGISTRY["schema"]},
            )
            self._log.describe(stream, "schema", registry.to_json())
            self._log.describe(stream, "profile", METRICS_PROFILE)
        # How much of it is kept is a setting, which may be another one after a restart.
        retention_ms = self._log.limits.metrics_retention
        wanted = Lifetime(retention_s=-(-retention_ms // 1000)) if retention_ms else NO_LIFETIME
        if stream.lifetime != wanted:
            stream.lifetime = wanted
        return stream

    def _now_ms(self) -> int:
        return self._clock.now_ns() // 1_000_000
