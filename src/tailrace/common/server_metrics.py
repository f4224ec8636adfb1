"""The table of server metrics and their values. ``docs/metrics.md`` is generated from it."""

from __future__ import annotations

from typing import Final

from tailrace.common.metrics import (
    LATENCY_BUCKETS_S,
    Histogram,
    LabeledHistograms,
    LabeledValues,
    MetricDefinition,
    MetricValue,
    counter,
    gauge,
    histogram,
    render_prometheus,
)

MATCH_BUCKETS_S: Final = (
    0.00001,
    0.000025,
    0.00005,
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.05,
    0.25,
)
JOB_BUCKETS_S: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
BATCH_SIZE_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)

_COLLECTION_LABELS: Final = ("database", "collection")  # `*` for collections without their own labels

SERVER_METRICS: Final[dict[str, MetricDefinition]] = {
    metric.name: metric
    for metric in (
        gauge("info", "Always 1; the label is the server's version.", "version"),
        gauge("ready", "1 while appends and reads are served, else 0."),
        # The network.
        counter("requests", "Responses sent, by method and status.", "method", "status"),
        counter("refused", "Error responses, by error code.", "code"),
        counter("malformed_requests", "Connections closed because they sent invalid HTTP."),
        counter("received_bytes", "Bytes received from clients."),
        counter("sent_bytes", "Bytes sent to clients."),
        gauge("connections", "Open connections."),
        gauge("connections_max", "Limit of open connections."),
        counter("connections_refused", "Connections refused because of the limit."),
        counter("relayed_requests", "Requests relayed to the worker that owns the stream."),
        counter("moved_connections", "Connections handed over to the worker that owns the stream."),
        gauge("live_connections", "Live readers, by mode.", "mode"),
        counter("live_demoted", "Live readers that were too slow and were demoted to catch-up reading."),
        counter("spark_reads", "Reads by the Spark source, which cannot extend Spark's own metrics."),
        # Identities.
        gauge("api_keys", "API keys."),
        gauge("revocations", "Revoked tokens and subjects that are remembered."),
        counter("connections_revoked", "Connections closed because their token was revoked or expired."),
        counter("identity_limited", "Requests refused by the rate limit of an identity."),
        # Appends.
        counter("append_entries", "Entries made durable."),
        counter("append_bytes", "Payload bytes made durable."),
        gauge("append_queue_bytes", "Bytes waiting for a commit."),
        gauge("append_waiting_requests", "Appends and other writes waiting for room in the log."),
        gauge("append_waiting_bytes", "Bytes of the writes waiting for room in the log."),
        counter("append_waits", "Writes that had to wait for room in the log."),
        histogram("commit_records", "Journal records that shared one sync.", BATCH_SIZE_BUCKETS),
        histogram("sync_seconds", "Duration of one write and sync of the journal.", LATENCY_BUCKETS_S),
        counter("journal_failures", "Failed writes or syncs of the journal."),
        # State.
        gauge("streams", "Streams."),
        gauge("streams_loaded", "Streams held in memory."),
        gauge("tail_memory_bytes", "Recent entries held in memory."),
        gauge("journal_bytes", "Size of the journal files."),
        gauge("checkpoint_lag_bytes", "Journal bytes that are not in the hot store yet."),
        counter("checkpoints", "Checkpoints written to the hot store."),
        gauge("disk_free_bytes", "Free space on the disk of the data directory."),
        # Traces.
        counter("trace_spans", "Spans recorded by the server, by outcome.", "outcome"),
        # Cold history.
        gauge("hot_bytes", "Payload in the hot store."),
        gauge("hot_free_bytes", "Free pages of the hot store, reusable or returned to the disk later."),
        gauge("unsealed_bytes", "Payload that is not on the object store yet."),
        gauge("spooled_bytes", "Segments written locally and not uploaded yet."),
        gauge("seal_queue", "Streams due to be sealed."),
        counter("sealed_segments", "Segments recorded in a manifest."),
        counter("sealed_bytes", "Size of the segments recorded in a manifest."),
        counter("seal_failures", "Sealing jobs that failed and are retried."),
        gauge("seal_conflicts", "Streams whose entries on the object store differ from this server's."),
        counter("trimmed_entries", "Entries removed by retention."),
        counter("trimmed_segments", "Segments removed by retention."),
        counter("trimmed_bytes", "Size of the segments removed by retention."),
        counter("sweeps", "Completed sweeps of the object store."),
        counter("swept_objects", "Objects examined by sweeps."),
        counter("swept_orphans", "Orphaned objects deleted by sweeps."),
        counter("swept_orphan_bytes", "Size of the orphaned objects deleted by sweeps."),
        counter(
            "swept_tombstones", "Tombstones of deleted streams that sweeps removed from the object store."
        ),
        gauge("object_store_ok", "1 while the object store is usable, else 0."),
        counter("object_requests", "Requests to the object store, by kind.", "kind"),
        counter("object_sent_bytes", "Bytes sent to the object store."),
        counter("object_received_bytes", "Bytes received from the object store."),
        gauge("cold_cache_bytes", "Local disk cache of data read from the object store."),
        counter("cold_reads", "Ranges of segments read, by source.", "source"),
        counter("cold_failures", "Reads of sealed entries that failed on a missing or damaged segment."),
        # The pipeline and index files.
        gauge("pipeline_state", "1 for the current state of the pipeline, 0 for the others.", "state"),
        counter("pipeline_restarts", "Restarts of the pipeline after a failure."),
        gauge("pipeline_backlog_segments", "Segments without index files."),
        gauge("pipeline_backlog_oldest_seconds", "Age of the oldest segment without index files."),
        counter("pipeline_publish", "Publish requests, by job and outcome.", "job", "outcome"),
        counter("pipeline_rows", "Entries that index files or compacted segments were published for.", "job"),
        counter("compacted_segments", "Segments that were compacted into larger ones."),
        histogram("pipeline_segment_seconds", "Time to build an index file.", JOB_BUCKETS_S, "family"),
        histogram(
            "pipeline_seal_to_published_seconds",
            "Time from sealing a segment to the publication of its index files.",
            JOB_BUCKETS_S,
        ),
        gauge("pipeline_rss_bytes", "Memory of all pipeline processes, as reported by the pipeline."),
        gauge("pipeline_quarantined_segments", "Segments whose index files cannot be built."),
        gauge("companion_cache_bytes", "Local disk cache of index files, without lexicons."),
        gauge("lexicon_cache_bytes", "Local disk cache of routing key lexicons."),
        gauge("companion_opened_bytes", "Index files open in memory."),
        counter("companion_opens", "Index files fetched and opened for queries."),
        counter("companion_unusable", "Missing or damaged index files; queries scanned the entries instead."),
        # Bootstrap.
        counter("bootstraps", "1 if this server was restored from the object store at start."),
        gauge("bootstrap_seconds", "Duration of the bootstrap."),
        gauge("bootstrap_restored", "Restored items, by kind.", "kind"),
        gauge("bootstrap_problems", "Items that could not be restored unchanged."),
        # Subscriptions.
        gauge("subscriptions", "Subscriptions."),
        counter("webhook_deliveries", "Webhook calls, by outcome.", "outcome"),
        # Documents and live queries.
        counter(
            "watch_changes",
            "Document changes processed, by operation; by partition if enabled.",
            *_COLLECTION_LABELS,
            "op",
            "partition",
        ),
        gauge(
            "watch_match_lag_changes",
            "Durable changes not matched yet; by partition if enabled.",
            *_COLLECTION_LABELS,
            "partition",
        ),
        gauge(
            "watch_partition_state",
            "Partitions in each state; by partition if enabled.",
            *_COLLECTION_LABELS,
            "state",
            "partition",
        ),
        gauge(
            "watch_generation",
            "Generation; for collections without their own labels the highest.",
            *_COLLECTION_LABELS,
        ),
        counter(
            "watch_match_candidates", "Predicates that the index proposed for changes.", *_COLLECTION_LABELS
        ),
        counter("watch_match_hits", "Predicates that matched.", *_COLLECTION_LABELS),
        gauge(
            "watch_match_hit_ratio",
            "Ratio of candidates that matched, since start.",
            *_COLLECTION_LABELS,
        ),
        histogram(
            "watch_match_latency_seconds",
            "Time to match a change against all predicates.",
            MATCH_BUCKETS_S,
            *_COLLECTION_LABELS,
        ),
        counter(
            "watch_match_fallback", "Predicates evaluated by the expression library.", *_COLLECTION_LABELS
        ),
        counter("watch_match_slow", "Changes that took longer than 1 ms to match."),
        gauge(
            "watch_index_predicates",
            "Distinct watched predicates, by kind of index.",
            *_COLLECTION_LABELS,
            "kind",
        ),
        gauge(
            "watch_scan_list_predicates",
            "Distinct watched predicates that no index supports.",
            *_COLLECTION_LABELS,
        ),
        counter(
            "watch_dedup_dropped",
            "Duplicates dropped, by stage.",
            *_COLLECTION_LABELS,
            "stage",
        ),
        gauge(
            "watch_bloom_fp_ratio",
            "False positive ratio of the Bloom filter, measured when it was last built.",
            *_COLLECTION_LABELS,
        ),
        counter("watch_bloom_rebuilds", "Bloom filters built by jobs and published.", *_COLLECTION_LABELS),
        gauge("watch_connections", "Realtime connections, by transport.", "transport"),
        gauge("watch_subscriptions", "Subscriptions of realtime connections.", "state", "priority"),
        counter("watch_deliveries", "Events sent, by operation.", "op"),
        histogram(
            "watch_delivery_latency_seconds",
            "Time from commit to the socket write.",
            LATENCY_BUCKETS_S,
        ),
        gauge("watch_outbound_bytes", "Unsent bytes of realtime connections, sampled every second."),
        gauge("watch_watermark_level", "Unsent bytes of all realtime connections relative to the limit."),
        counter(
            "watch_demotions", "Subscriptions that were too slow and were demoted to reading from the log."
        ),
        counter("watch_delivered_batches", "Batches of job deliveries that were read, by result.", "result"),
        counter(
            "watch_delivered_skipped", "Changes that did not have to be read because a job had matched them."
        ),
        counter("watch_resync_required", "Subscriptions that had to resync, by reason.", "reason"),
        counter("watch_resume", "Resumes, by result and by read path.", "result", "path"),
        counter("watch_snapshots", "Snapshots started."),
        histogram("watch_snapshot_seconds", "Time from a snapshot request to its last page.", JOB_BUCKETS_S),
        counter("watch_snapshot_documents", "Documents sent in snapshots."),
        gauge("watch_replication_connections", "Connections of replicating clients."),
        counter("watch_pull", "Pages pulled by replicating clients."),
        counter("watch_push_rows", "Documents pushed by replicating clients, by result.", "result"),
        counter("watch_conflicts", "Conflicts returned to replicating clients."),
        counter(
            "watch_resync",
            "RESYNC notices sent to replicating clients because their stream could not continue.",
        ),
        counter("watch_auth_failures", "Realtime clients that failed to authenticate, by code.", "code"),
        gauge(
            "watch_slo_burn", "Error budget burn rate of the worst collection; 1 is sustainable.", "objective"
        ),
        counter("watch_audit_dropped", "Audit events that could not be written."),
        counter("watch_purged_tombstones", "Tombstones of deleted documents that were purged."),
        counter("watch_published_views", "Collection views written to the object store."),
        gauge("watch_sources", "Change sources, by phase.", "phase"),
        counter("watch_source_changes", "Changes read from sources, by operation.", "op"),
        counter("watch_source_repeats", "Duplicate changes from sources that were skipped."),
        counter("watch_source_restarts", "Source sessions that ended and were restarted."),
        counter("watch_source_gaps", "Sources that could not continue from their position."),
        gauge(
            "watch_source_lag_seconds",
            "Age of the newest change read from a source that has more.",
            *_COLLECTION_LABELS,
        ),
        gauge(
            "watch_source_lag_changes",
            "Changes of a source not written to the log yet; for databases a lower bound.",
            *_COLLECTION_LABELS,
        ),
        gauge(
            "watch_source_retained_bytes",
            "Log that a source database retains for this server; the maximum of all sources.",
        ),
        # The hub.
        gauge("hub_sessions", "Sessions of actors, disconnected ones included."),
        gauge("hub_detached_sessions", "Disconnected sessions that can be resumed."),
        gauge("hub_actors", "Registered addresses, by whether they are durable.", "durable"),
        gauge("hub_registry_fill_ratio", "Registered addresses relative to the limit."),
        counter("hub_messages", "Messages from actors, by kind and result.", "kind", "result"),
        counter(
            "hub_deliveries", "Message copies delivered to connections, from the log, or stored.", "mode"
        ),
        counter("hub_errors", "Errors sent to actors, by code.", "code"),
        counter("hub_dead_letters", "Messages that could not be delivered, by reason.", "reason"),
        counter("hub_dropped", "Messages dropped for slow connections."),
        counter("hub_duplicates", "Duplicate messages, by how they were detected.", "by"),
        counter("hub_from_rewritten", "Messages whose `from` was corrected to the sender's address."),
        counter("hub_rate_limited", "Messages refused by rate limits, by kind.", "kind"),
        counter("hub_pauses", "Pause requests sent to senders."),
        gauge("hub_queue_messages", "Unsent messages of all sessions."),
        gauge("hub_queue_bytes", "Unsent bytes of all sessions."),
        gauge("hub_mailbox_lag", "Uncommitted messages in mailboxes of connected owners."),
        gauge("hub_asks_open", "Pending asks."),
        counter("hub_ws_closes", "Closed hub connections, by code.", "code"),
        histogram(
            "hub_relay_seconds",
            "Time from receiving a message to its effects, sampled one in 16.",
            LATENCY_BUCKETS_S,
        ),
        histogram(
            "hub_commit_wait_seconds", "Time from writing a hub entry to its commit.", LATENCY_BUCKETS_S
        ),
        histogram("hub_broadcast_seconds", "Time from a broadcast to its last delivery.", LATENCY_BUCKETS_S),
    )
}


class ServerMetrics:
    """The metric values of one server; every attribute is a row of the table."""

    def __init__(self, version: str = "") -> None:
        self.info = LabeledValues()
        self.ready = MetricValue()
        self.requests = LabeledValues()
        self.refused = LabeledValues()
        self.malformed_requests = MetricValue()
        self.received_bytes = MetricValue()
        self.sent_bytes = MetricValue()
        self.connections = MetricValue()
        self.relayed_requests = MetricValue()
        self.moved_connections = MetricValue()
        self.connections_max, self.connections_refused = MetricValue(), MetricValue()
        self.live_connections = LabeledValues()
        self.live_demoted = MetricValue()
        self.spark_reads = MetricValue()
        self.api_keys = MetricValue()
        self.revocations = MetricValue()
        self.connections_revoked = MetricValue()
        self.identity_limited = MetricValue()
        self.append_entries = MetricValue()
        self.append_bytes = MetricValue()
        self.append_queue_bytes = MetricValue()
        self.commit_records = Histogram(SERVER_METRICS["commit_records"].buckets)
        self.sync_seconds = Histogram(SERVER_METRICS["sync_seconds"].buckets)
        self.journal_failures = MetricValue()
        self.streams = MetricValue()
        self.streams_loaded = MetricValue()
        self.append_waiting_requests, self.append_waiting_bytes = MetricValue(), MetricValue()
        self.append_waits = MetricValue()
        self.tail_memory_bytes = MetricValue()
        self.journal_bytes = MetricValue()
        self.checkpoint_lag_bytes = MetricValue()
        self.checkpoints = MetricValue()
        self.disk_free_bytes = MetricValue()
        self.trace_spans = LabeledValues()
        self.hot_bytes = MetricValue()
        self.hot_free_bytes = MetricValue()
        self.unsealed_bytes = MetricValue()
        self.spooled_bytes = MetricValue()
        self.seal_queue = MetricValue()
        self.sealed_segments = MetricValue()
        self.sealed_bytes = MetricValue()
        self.seal_failures = MetricValue()
        self.seal_conflicts = MetricValue()
        self.trimmed_entries = MetricValue()
        self.trimmed_segments = MetricValue()
        self.trimmed_bytes = MetricValue()
        self.sweeps = MetricValue()
        self.swept_objects = MetricValue()
        self.swept_orphans = MetricValue()
        self.swept_orphan_bytes = MetricValue()
        self.swept_tombstones = MetricValue()
        self.object_store_ok = MetricValue()
        self.object_requests = LabeledValues()
        self.object_sent_bytes = MetricValue()
        self.object_received_bytes = MetricValue()
        self.cold_cache_bytes = MetricValue()
        self.cold_reads = LabeledValues()
        self.cold_failures = MetricValue()
        self.bootstraps = MetricValue()
        self.bootstrap_seconds = MetricValue()
        self.bootstrap_restored = LabeledValues()
        self.bootstrap_problems = MetricValue()
        self.subscriptions = MetricValue()
        self.webhook_deliveries = LabeledValues()
        self._add_index_metrics()
        self._add_hub_metrics()
        self._add_watch_metrics()
        assert vars(self).keys() == SERVER_METRICS.keys(), "the class and the table differ"
        self.info.values[(version,)] = 1

    def _add_index_metrics(self) -> None:
        """Building and reading index files."""
        self.pipeline_state = LabeledValues()
        self.pipeline_restarts = MetricValue()
        self.pipeline_backlog_segments = MetricValue()
        self.pipeline_backlog_oldest_seconds = MetricValue()
        self.pipeline_publish = LabeledValues()
        self.pipeline_rows = LabeledValues()
        self.compacted_segments = MetricValue()
        self.pipeline_segment_seconds = LabeledHistograms(JOB_BUCKETS_S)
        self.pipeline_seal_to_published_seconds = Histogram(JOB_BUCKETS_S)
        self.pipeline_rss_bytes = MetricValue()
        self.pipeline_quarantined_segments = MetricValue()
        self.companion_cache_bytes = MetricValue()
        self.lexicon_cache_bytes = MetricValue()
        self.companion_opened_bytes = MetricValue()
        self.companion_opens = MetricValue()
        self.companion_unusable = MetricValue()

    def _add_watch_metrics(self) -> None:
        """Documents and live queries."""
        self.watch_changes = LabeledValues()
        self.watch_match_lag_changes = LabeledValues()
        self.watch_partition_state = LabeledValues()
        self.watch_generation = LabeledValues()
        self.watch_match_candidates = LabeledValues()
        self.watch_match_hits = LabeledValues()
        self.watch_match_hit_ratio = LabeledValues()
        self.watch_match_latency_seconds = LabeledHistograms(MATCH_BUCKETS_S)
        self.watch_match_fallback = LabeledValues()
        self.watch_match_slow = MetricValue()
        self.watch_index_predicates = LabeledValues()
        self.watch_scan_list_predicates = LabeledValues()
        self.watch_dedup_dropped = LabeledValues()
        self.watch_bloom_fp_ratio = LabeledValues()
        self.watch_bloom_rebuilds = LabeledValues()
        self.watch_connections = LabeledValues()
        self.watch_subscriptions = LabeledValues()
        self.watch_deliveries = LabeledValues()
        self.watch_push_rows = LabeledValues()
        self.watch_delivery_latency_seconds = Histogram(LATENCY_BUCKETS_S)
        self.watch_outbound_bytes = MetricValue()
        self.watch_watermark_level = MetricValue()
        self.watch_demotions = MetricValue()
        self.watch_delivered_batches = LabeledValues()
        self.watch_delivered_skipped = MetricValue()
        self.watch_resync_required = LabeledValues()
        self.watch_resume = LabeledValues()
        self.watch_snapshots = MetricValue()
        self.watch_snapshot_seconds = Histogram(JOB_BUCKETS_S)
        self.watch_snapshot_documents = MetricValue()
        self.watch_replication_connections = MetricValue()
        self.watch_pull = MetricValue()
        self.watch_conflicts = MetricValue()
        self.watch_resync = MetricValue()
        self.watch_auth_failures = LabeledValues()
        self.watch_slo_burn = LabeledValues()
        self.watch_audit_dropped = MetricValue()
        self.watch_purged_tombstones = MetricValue()
        self.watch_published_views = MetricValue()
        self.watch_sources = LabeledValues()
        self.watch_source_changes = LabeledValues()
        self.watch_source_repeats = MetricValue()
        self.watch_source_restarts = MetricValue()
        self.watch_source_gaps = MetricValue()
        self.watch_source_lag_seconds = LabeledValues()
        self.watch_source_lag_changes = LabeledValues()
        self.watch_source_retained_bytes = MetricValue()

    def _add_hub_metrics(self) -> None:
        """Actors and their messages."""
        self.hub_sessions = MetricValue()
        self.hub_detached_sessions = MetricValue()
        self.hub_actors = LabeledValues()
        self.hub_registry_fill_ratio = MetricValue()
        self.hub_messages = LabeledValues()
        self.hub_deliveries = LabeledValues()
        self.hub_errors = LabeledValues()
        self.hub_dead_letters = LabeledValues()
        self.hub_dropped = MetricValue()
        self.hub_duplicates = LabeledValues()
        self.hub_from_rewritten = MetricValue()
        self.hub_rate_limited = LabeledValues()
        self.hub_pauses = MetricValue()
        self.hub_queue_messages = MetricValue()
        self.hub_queue_bytes = MetricValue()
        self.hub_mailbox_lag = MetricValue()
        self.hub_asks_open = MetricValue()
        self.hub_ws_closes = LabeledValues()
        self.hub_relay_seconds = Histogram(LATENCY_BUCKETS_S)
        self.hub_commit_wait_seconds = Histogram(LATENCY_BUCKETS_S)
        self.hub_broadcast_seconds = Histogram(LATENCY_BUCKETS_S)

    def observe_sync(self, seconds: float, records: int) -> None:
        """Record the duration and the number of records of one commit."""
        self.sync_seconds.observe(seconds)
        self.commit_records.observe(records)

    def render(self) -> bytes:
        """The text of ``/metrics``."""
        return render_prometheus(self, SERVER_METRICS)
