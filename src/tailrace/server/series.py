"""Which records an interval is worth: bounded in number, and hardly any while nothing happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from heapq import nlargest
from itertools import chain
from typing import Literal, NamedTuple

from tailrace.log.publish import StreamTraffic
from tailrace.schema.profiles.metrics import Record, normalise_metric

QUIET_MS_MAX = 300_000  # something unchanged is told again after this time
BUSIEST_STREAMS = 50  # streams that have series of their own
OTHER_STREAMS = "__other__"
DROPPED_SERIES = "tailrace.metrics.series_dropped"
NO_TAGS: Mapping[str, str] = {}
NO_TRAFFIC: tuple[Mapping[str, StreamTraffic], StreamTraffic] = ({}, StreamTraffic())


class MetricSource(NamedTuple):
    """A series that always exists. Counters are told by how much they grew, gauges as they are."""

    metric: str
    unit: str
    kind: Literal["counter", "gauge"]
    read: Callable[[], float]
    tags: Mapping[str, str] = NO_TAGS


class TimingSource(NamedTuple):
    """How often something happened and how many seconds that took together, told in milliseconds."""

    metric: str
    read: Callable[[], tuple[int, float]]
    own: bool = False  # writing the metrics makes it happen: alone that is not worth a record


class MetricInterval(NamedTuple):
    start_ms: int
    end_ms: int


class SeriesRecorder:
    """Remembers what was told last. Nothing here knows streams by name but the traffic of one interval."""

    def __init__(
        self, sources: list[MetricSource], timings: list[TimingSource], instance: str, series_max: int
    ) -> None:
        self._sources = sources
        self._timings = timings
        self._instance = instance
        self._series_max = series_max
        self._last: dict[int, float] = {}  # by place in `sources`
        self._told_ms: dict[int | str, int] = {}  # by place in `sources`, or by the name of a series
        self._timed_so_far = [timing.read() for timing in timings]
        self.dropped = 0

    def records(
        self,
        window: MetricInterval,
        shares: Mapping[str, StreamTraffic],
        others: StreamTraffic,
        served: tuple[Mapping[str, StreamTraffic], StreamTraffic] = NO_TRAFFIC,
    ) -> list[Record]:
        """Canonical records of one interval, at most as many as there may be series.

        `shares` are what was appended, `served` is what was read.
        """
        found: list[Record] = []
        dropped = 0
        for record in chain(
            self._all(window, shares, others),
            self._traffic(window, "append", shares, others),
            self._traffic(window, "read", *served),
        ):
            if len(found) < self._series_max - 1:
                found.append(record)
            else:
                dropped += 1
        self.dropped += dropped
        if dropped:
            found.append(self._record(window, DROPPED_SERIES, "count", 1, dropped, dropped))
        return found

    def _all(
        self, window: MetricInterval, shares: Mapping[str, StreamTraffic], others: StreamTraffic
    ) -> Iterator[Record]:
        for place, source in enumerate(self._sources):
            record = self._told(window, place, source)
            if record is not None:
                yield record
        busy = bool(shares or others.entries)
        for place, timing in enumerate(self._timings):
            record = self._timed(window, place, timing, worth=busy or not timing.own)
            if record is not None:
                yield record

    def _told(self, window: MetricInterval, place: int, source: MetricSource) -> Record | None:
        value = source.read()
        last = self._last.get(place)
        self._last[place] = value
        # What a counter had when the server started is no growth.
        told = value if source.kind == "gauge" else value - (value if last is None else last)
        changed = value != last if source.kind == "gauge" else told != 0
        if not self._is_due(window, place, changed=changed):
            return None
        count = 1 if source.kind == "gauge" or told else 0
        return self._record(window, source.metric, source.unit, count, told, told, tags=source.tags)

    def _is_due(self, window: MetricInterval, series: int | str, *, changed: bool) -> bool:
        """Whether a series gets a record: when there is something new, and else once in a while."""
        if not changed and window.end_ms - self._told_ms.get(series, 0) < QUIET_MS_MAX:
            return False
        self._told_ms[series] = window.end_ms
        return True

    def _timed(
        self, window: MetricInterval, place: int, timing: TimingSource, *, worth: bool
    ) -> Record | None:
        count, seconds = timing.read()
        count_was, seconds_was = self._timed_so_far[place]
        self._timed_so_far[place] = (count, seconds)
        if not self._is_due(window, timing.metric, changed=worth and count != count_was):
            return None
        spent_ms = round((seconds - seconds_was) * 1000, 3)
        return self._record(window, timing.metric, "ms", count - count_was, spent_ms, None)

    def _traffic(
        self, window: MetricInterval, what: str, shares: Mapping[str, StreamTraffic], others: StreamTraffic
    ) -> Iterator[Record]:
        busiest = dict(nlargest(BUSIEST_STREAMS, shares.items(), key=lambda item: (item[1].bytes, item[0])))
        rest = StreamTraffic()
        for share in (others, *(share for name, share in shares.items() if name not in busiest)):
            rest.entries += share.entries
            rest.bytes += share.bytes
        due = self._is_due(window, what, changed=bool(busiest or rest.entries))
        if rest.entries or (due and not busiest):
            busiest[OTHER_STREAMS] = rest
        for name, share in busiest.items():
            for metric, unit, total in (
                (f"tieredstore.{what}.bytes", "bytes", share.bytes),
                (f"tieredstore.{what}.entries", "count", share.entries),
            ):
                yield self._record(window, metric, unit, share.entries, total, None, stream=name)

    def _record(
        self,
        window: MetricInterval,
        metric: str,
        unit: str,
        count: int,
        total: float,
        extreme: float | None,
        *,
        tags: Mapping[str, str] = NO_TAGS,
        stream: str | None = None,
    ) -> Record:
        given: Record = {
            "metric": metric,
            "unit": unit,
            "windowStart": window.start_ms,
            "windowEnd": window.end_ms,
            "instance": self._instance,
            "stream": stream,
            "tags": dict(tags),
            "count": count,
            "sum": total,
            "min": extreme,
            "max": extreme,
        }
        return normalise_metric(given)
