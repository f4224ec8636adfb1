"""Metric types: definitions, counters, gauges, histograms, and Prometheus text format.

A counter is an integer with one writer and a gauge is a function called at scrape time, so that measuring
costs an append almost nothing. Each histogram has one writing thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, Literal

from msgspec import Struct

if TYPE_CHECKING:
    from prometheus_client import Metric as Family

MetricKind = Literal["counter", "gauge", "histogram"]
ReadValue = Callable[[], float]

LATENCY_BUCKETS_S: Final = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
)


class MetricDefinition(Struct, frozen=True, kw_only=True):
    """One row of a table of metrics."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def exposed(self) -> str:
        """The name in Prometheus."""
        return f"tailrace_{self.name}_total" if self.kind == "counter" else f"tailrace_{self.name}"


def counter(name: str, text: str, *labels: str) -> MetricDefinition:
    return MetricDefinition(name=name, kind="counter", help=text, labels=labels)


def gauge(name: str, text: str, *labels: str) -> MetricDefinition:
    return MetricDefinition(name=name, kind="gauge", help=text, labels=labels)


def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> MetricDefinition:
    return MetricDefinition(name=name, kind="histogram", help=text, labels=labels, buckets=buckets)


class MetricValue:
    """A counter or gauge without labels: add to `value`, or set `read` to compute it at scrape time."""

    __slots__ = ("read", "value")

    def __init__(self) -> None:
        self.value: float = 0
        self.read: ReadValue | None = None

    def current(self) -> float:
        return self.value if self.read is None else self.read()


class LabeledValues:
    """Counters or gauges with labels. Label values must come from fixed sets, never from a client."""

    __slots__ = ("each", "reads", "values")

    def __init__(self) -> None:
        # For counts that another component has: returns all rows at scrape time.
        self.each: Callable[[], Iterable[tuple[list[str], float]]] | None = None
        self.values: defaultdict[tuple[object, ...], float] = defaultdict(float)
        self.reads: dict[tuple[object, ...], ReadValue] = {}

    def add(self, *labels: object) -> None:
        self.values[labels] += 1

    def current(self) -> Iterable[tuple[list[str], float]]:
        for labels, value in list(self.values.items()):
            yield [str(label) for label in labels], value
        for labels, read in self.reads.items():
            yield [str(label) for label in labels], read()
        if self.each is not None:
            yield from self.each()


class Histogram:
    """A histogram with fixed bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        assert list(bounds) == sorted(set(bounds))
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        running, rows = 0, list[tuple[str, float]]()
        for bound, count in zip((*map(str, map(float, self.bounds)), "+Inf"), self.counts, strict=True):
            running += count
            rows.append((bound, running))
        return rows


class LabeledHistograms:
    """A histogram with one label from a fixed set, or with rows from `each`."""

    __slots__ = ("bounds", "by_label", "each")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.by_label: dict[str, Histogram] = {}
        self.each: Callable[[], Iterable[tuple[list[str], Histogram]]] | None = None

    def current(self) -> Iterable[tuple[list[str], Histogram]]:
        for label, inner in list(self.by_label.items()):
            yield [label], inner
        if self.each is not None:
            yield from self.each()

    def observe(self, value: float, label: str) -> None:
        found = self.by_label.get(label)
        if found is None:
            found = self.by_label[label] = Histogram(self.bounds)
        found.observe(value)


def render_prometheus(values: object, table: dict[str, MetricDefinition]) -> bytes:
    """A table's metrics in Prometheus text format, with the process metrics (memory, CPU, open files)."""
    # Imported at the first scrape, to keep start-up fast.
    from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

    registry = CollectorRegistry()
    registry.register(_Collector(values, table))
    ProcessCollector("", lambda: "self", "/proc", registry)
    return generate_latest(registry)


class _Collector:
    def __init__(self, values: object, table: dict[str, MetricDefinition]) -> None:
        self._values = values
        self._table = table

    def collect(self) -> Iterable[Family]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        for metric in self._table.values():
            held = getattr(self._values, metric.name)
            name = f"tailrace_{metric.name}"
            if isinstance(held, Histogram):
                family = HistogramMetricFamily(name, metric.help)
                family.add_metric([], held.cumulative(), held.total)
                yield family
                continue
            if isinstance(held, LabeledHistograms):
                family = HistogramMetricFamily(name, metric.help, labels=metric.labels)
                for labels, inner in held.current():
                    family.add_metric(labels, inner.cumulative(), inner.total)
                yield family
                continue
            shape = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = shape(name, metric.help, labels=metric.labels)
            if isinstance(held, LabeledValues):
                for labels, value in held.current():
                    family.add_metric(labels, value)
            else:
                assert isinstance(held, MetricValue)
                family.add_metric([], held.current())
            yield family
