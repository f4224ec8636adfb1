"""The metrics of an edge."""

from __future__ import annotations

from typing import Final, Literal

from tailrace.common.metrics import (
    LATENCY_BUCKETS_S,
    Histogram,
    LabeledValues,
    MetricDefinition,
    MetricValue,
    render_prometheus,
)


def _row(
    name: str, kind: Literal["counter", "gauge"], text: str, labels: tuple[str, ...] = ()
) -> MetricDefinition:
    return MetricDefinition(name=f"edge_{name}", kind=kind, help=text, labels=labels)


TABLE: Final[dict[str, MetricDefinition]] = {
    metric.name: metric
    for metric in (
        _row("info", "gauge", "Always 1; the label is the edge's version.", ("version",)),
        _row("ready", "gauge", "1 while enough upstreams are healthy, else 0."),
        _row(
            "requests",
            "counter",
            "Responses, by kind, X-Cache and status.",
            ("kind", "cache", "status"),
        ),
        _row("refused", "counter", "Requests that the edge itself refused, by error code.", ("code",)),
        _row("connections", "gauge", "Open connections of clients."),
        _row("connections_max", "gauge", "Open connections at which further ones are refused."),
        _row("connections_refused", "counter", "Connections refused because there were too many."),
        _row("received_bytes", "counter", "Bytes received from clients."),
        _row("sent_bytes", "counter", "Bytes sent to clients."),
        _row("body_bytes", "gauge", "Bytes of request bodies that wait for their upstream."),
        _row("clients", "gauge", "Live readers, by mode; held: waiting for a lost upstream.", ("mode",)),
        _row("channels", "gauge", "Streams that are followed, each on one upstream socket."),
        _row("private_sockets", "gauge", "Upstream sockets of single readers."),
        _row("ring_bytes", "gauge", "Recent batches held for readers."),
        _row("batches", "counter", "Batches received from upstreams."),
        _row("encodings", "counter", "Encodings of batches: one per wire form, shared by all readers."),
        _row("fanout_bytes", "counter", "Bytes of batches sent to live readers, by mode.", ("mode",)),
        _row("join", "counter", "Live readers that joined a channel, by path.", ("path",)),
        MetricDefinition(
            name="edge_delivery_seconds",
            kind="histogram",
            help="Time from a batch's arrival to its write to the last reader.",
            buckets=LATENCY_BUCKETS_S,
        ),
        _row("cache_bytes", "gauge", "Bytes of cached slices, by tier.", ("tier",)),
        _row("cache_evictions", "counter", "Evicted slices, by tier.", ("tier",)),
        _row("cache_invalidations", "counter", "Streams whose slices were dropped, by reason.", ("reason",)),
        _row("coalesced", "counter", "Reads that joined an equal one in progress."),
        _row("recent_hits", "counter", "Reads at the tail served from a recent response."),
        _row("revalidated", "counter", "Reads at the tail that the upstream confirmed as unchanged."),
        _row(
            "ttl_renewals",
            "counter",
            "TTL renewals for reads served here, by outcome.",
            ("outcome",),
        ),
        _row("reconnects", "counter", "Upstream sockets reopened, by the reason of their end.", ("reason",)),
        _row(
            "following",
            "gauge",
            "1 while deletions (registry) or revocations of all upstreams are followed, else 0.",
            ("what",),
        ),
        _row("token_refused", "gauge", "1 while an upstream refuses the edge's own token, else 0."),
        _row("upstream_healthy", "gauge", "1 while an upstream is healthy, else 0.", ("upstream",)),
        _row(
            "upstream_requests",
            "gauge",
            "Requests to an upstream in progress (active) or waiting for a connection (queued).",
            ("upstream", "state"),
        ),
        _row("detached", "counter", "Live readers that were too slow and read slices again."),
        _row("overload", "counter", "Requests refused at a limit, by limit.", ("limit",)),
    )
}


class EdgeTelemetry:
    """The metrics of one edge; every attribute is a row of the table."""

    def __init__(self, version: str = "") -> None:
        self.edge_info = LabeledValues()
        self.edge_info.reads[(version,)] = lambda: 1.0
        self.edge_ready = MetricValue()
        self.edge_requests = LabeledValues()
        self.edge_refused = LabeledValues()
        self.edge_connections = MetricValue()
        self.edge_connections_max = MetricValue()
        self.edge_connections_refused = MetricValue()
        self.edge_received_bytes = MetricValue()
        self.edge_sent_bytes = MetricValue()
        self.edge_body_bytes = MetricValue()
        self.edge_clients = LabeledValues()
        self.edge_channels = MetricValue()
        self.edge_private_sockets = MetricValue()
        self.edge_ring_bytes = MetricValue()
        self.edge_batches = MetricValue()
        self.edge_encodings = MetricValue()
        self.edge_fanout_bytes = LabeledValues()
        self.edge_join = LabeledValues()
        self.edge_delivery_seconds = Histogram(TABLE["edge_delivery_seconds"].buckets)
        self.edge_cache_bytes = LabeledValues()
        self.edge_cache_evictions = LabeledValues()
        self.edge_cache_invalidations = LabeledValues()
        self.edge_coalesced = MetricValue()
        self.edge_recent_hits = MetricValue()
        self.edge_revalidated = MetricValue()
        self.edge_ttl_renewals = LabeledValues()
        self.edge_reconnects = LabeledValues()
        self.edge_following = LabeledValues()
        self.edge_token_refused = MetricValue()
        self.edge_upstream_healthy = LabeledValues()
        self.edge_upstream_requests = LabeledValues()
        self.edge_detached = MetricValue()
        self.edge_overload = LabeledValues()

    def render(self) -> bytes:
        """The text of `/metrics`."""
        return render_prometheus(self, TABLE)
